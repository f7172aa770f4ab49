"""The mutations of scripts/mutate_checkpoints.py still apply; running them takes minutes and is its own business."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
try:
    from mutate_checkpoints import MUTATIONS
    from mutation import Mutation
finally:
    sys.path.remove(str(ROOT / "scripts"))


def label(mutation):
    return f"{mutation.file}: {mutation.name}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=label)
def test_a_mutation_applies_once_and_is_python(mutation):
    source = (ROOT / mutation.path).read_text()
    mutated = mutation.applied(source)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=label)
def test_the_tests_of_a_mutation_exist(mutation):
    assert mutation.tests
    for test in mutation.tests:
        path, _, function = test.partition("::")
        text = (ROOT / path).read_text()
        assert not function or f"def {function.partition('[')[0]}(" in text, test


def test_names_are_given_once():
    assert len(set(map(label, MUTATIONS))) == len(MUTATIONS) > 60


def test_a_text_that_is_missing_or_doubled_is_an_error():
    for source in ("", "here here"):
        with pytest.raises(ValueError, match="expected once"):
            Mutation("x", "store.py", (("here", "there"),), ()).applied(source)
    assert Mutation("x", "store.py", (("here", "there"),), ()).applied("here") == "there"
