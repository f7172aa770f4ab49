import pytest
import torch

from resumable_data.checkpoint.limits import DEEPEST, DEFAULT, Limits
from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.standins import Box, Function, Leaf, Storage, StorageType, Tensor
from resumable_data.checkpoint.survey import survey
from resumable_data.errors import CheckpointLimitError, CheckpointSecurityError


def nested(levels, end=None):
    for level in range(levels):
        end = (end,) if level % 2 else Box("list", [] if end is None else [end])
    return end


def test_values_are_counted_at_each_of_their_places():
    ordered = Box("OrderedDict", ["a", Tensor(), "b", (1, 2)])
    ordered.hung = ("_metadata", Box("dict", ["", 1]))
    assert survey(1, DEFAULT) == survey(Leaf("bytes"), DEFAULT) == survey(Tensor(), DEFAULT) == 1
    assert survey((), DEFAULT) == 1
    assert survey(Box("list", [0.0] * 1000), DEFAULT) == 1001
    assert survey(ordered, DEFAULT) == 1 + 3 + 3 + 1 + 3
    assert survey((ordered, ordered, Box("set", [(1, 2)])), DEFAULT) == 1 + 2 * 11 + 4


def test_the_bound_of_values_is_exact():
    shared = Box("list", [0.0] * 9)
    tree = (shared, shared, shared)
    assert survey(tree, Limits(values=31)) == 31
    with pytest.raises(CheckpointLimitError, match="more than 30 values"):
        survey(tree, Limits(values=30))


def test_as_deep_as_is_saved_passes_and_no_deeper():
    survey(nested(DEEPEST), DEFAULT)
    with pytest.raises(CheckpointLimitError, match="deeper than 64 levels"):
        survey(nested(DEEPEST + 1), DEFAULT)
    tree = []
    for _ in range(DEEPEST - 1):
        tree = [tree]
    prepare(tree)
    with pytest.raises(TypeError, match="nests deeper"):
        prepare([tree])


def test_depth_is_that_of_the_longest_way_also_through_what_was_met_before():
    low = nested(40)
    survey((nested(23, low), low), DEFAULT)
    for tree in ((nested(24, low), low), (low, nested(24, low))):
        with pytest.raises(CheckpointLimitError, match="deeper than 64 levels"):
            survey(tree, DEFAULT)


def test_the_keys_of_a_dict_are_no_level():
    survey(nested(DEEPEST - 1, Box("dict", [(1, 2), 3])), DEFAULT)


def test_what_contains_itself():
    box = Box("dict", ["a", 1])
    box.items += ["b", (1, Box("list", [box]))]
    hung = Box("OrderedDict", [])
    hung.hung = ("a", hung)
    for tree in (box, hung):
        with pytest.raises(CheckpointLimitError, match="contain themselves"):
            survey((tree,), DEFAULT)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Function("torch.Size"), "function"),
        (StorageType(torch.uint8), "storagetype"),
        (Storage(torch.uint8, 4), "storage"),
    ],
)
def test_what_is_no_value(value, name):
    for tree in (value, (value,), Box("list", [1, value]), Box("dict", ["a", value])):
        with pytest.raises(CheckpointSecurityError, match=f"a bare {name}"):
            survey(tree, DEFAULT)


def test_a_tree_of_a_million_containers_needs_no_recursion():
    chain = nested(200_000)
    with pytest.raises(CheckpointLimitError, match="deeper"):
        survey(chain, DEFAULT)
    assert survey(chain, Limits(depth=200_000)) == 200_000
