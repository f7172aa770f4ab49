import math

import pytest
import torch

from resumable_data.checkpoint.config import check_config
from resumable_data.errors import CheckpointMismatchError


@pytest.mark.parametrize("value", [math.nan, [math.nan, 1], torch.tensor([1.0, math.nan]), torch.tensor(2)])
def test_a_configuration_equals_itself(value):
    again = value.clone() if isinstance(value, torch.Tensor) else value
    check_config({"deep": {"x": value}}, {"deep": {"x": again}})


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        ({"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0])}, r"x was tensor"),
        ({"x": torch.tensor([1.0])}, {"x": torch.tensor([1.0, 1.0])}, r"x was tensor"),
        ({"x": torch.tensor([1.0])}, {"x": torch.tensor([1])}, r"x was tensor"),
        ({"x": 1}, {"x": True}, r"x was 1, is True"),
        ({"x": math.nan}, {"x": 0.0}, r"x was nan, is 0\.0"),
        ([{"a": 1}], [{"b": 1}], r"\[0\]\.a is only in the file; \[0\]\.b is not in the file"),
        ({"o": {"a": 1}}, {"o": {}}, r": o\.a is only in the file"),
        (None, {"x": 1}, r"config was None"),
    ],
)
def test_differences_are_named(saved, current, message):
    with pytest.raises(CheckpointMismatchError, match=message):
        check_config(saved, current)


def test_lists_that_share_lists_are_shown_in_short():
    laughs = ["ha"]
    for _ in range(40):
        laughs = [laughs] * 10
    with pytest.raises(CheckpointMismatchError, match="x was ") as caught:
        check_config({"x": laughs}, {"x": 1})
    assert len(str(caught.value)) < 400
