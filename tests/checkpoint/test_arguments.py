import pytest
import torch

from checkpoint.helpers import names
from resumable_data.checkpoint import CheckpointManager

KEY = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"every_steps": 0}, ValueError, "every_steps must be at least 1, found 0"),
        ({"every_steps": 0, "enabled": False}, ValueError, "every_steps"),
        ({"every_steps": 2.5}, TypeError, "every_steps must be an int, found 2.5"),
        ({"keep_last": 0}, ValueError, "keep_last"),
        ({"keep_last": True}, TypeError, "keep_last"),
        ({"enabled": 1}, TypeError, "enabled"),
        ({"durability": "some"}, ValueError, "durability must be 'full' or 'process', found 'some'"),
        ({"durability": None}, ValueError, "durability"),
        ({"keep_best": "loss"}, TypeError, "keep_best"),
        ({"keep_best": ("loss",)}, TypeError, "keep_best"),
        ({"keep_best": ("loss", 1)}, TypeError, "keep_best"),
        ({"keep_best": "lo"}, TypeError, "keep_best"),
        ({"keep_best": ("loss", "lowest")}, ValueError, "'min' or 'max', found 'lowest'"),
        ({"shards": 0}, ValueError, "shards must be from 1 to 999, found 0"),
        ({"shards": 1000}, ValueError, "shards"),
        ({"shards": True}, TypeError, "shards"),
        ({"shards": "2"}, TypeError, "shards"),
        ({"shards": int}, TypeError, "shards"),
        ({"hmac_key": KEY[:15]}, ValueError, "at least 16 bytes, found 15"),
        ({"hmac_key": KEY.decode()}, TypeError, "hmac_key must be bytes, found a str"),
    ],
)
def test_bad_arguments_are_named(tmp_path, options, error, match):
    with pytest.raises(error, match=match):
        CheckpointManager(tmp_path, **options)


def test_a_bad_key_is_in_no_message(tmp_path):
    with pytest.raises(ValueError, match="hmac_key") as caught:
        CheckpointManager(tmp_path, hmac_key=b"secret")
    assert "secret" not in str(caught.value).replace("secrets.token_bytes", "")


@pytest.mark.parametrize(
    "options",
    [
        {"keep_best": ["loss", "max"]},
        {"keep_best": ("", "min"), "keep_last": None},
        {"shards": 1},
        {"shards": 999},
        {"shards": len, "durability": "process"},
        {"hmac_key": KEY},
    ],
)
def test_good_arguments_are_taken_and_make_no_file(tmp_path, options):
    CheckpointManager(tmp_path / "run", **options)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (-1, ValueError),
        (10**12, ValueError),
        (True, TypeError),
        ("3", TypeError),
        (1.0, TypeError),
        (None, TypeError),
    ],
)
def test_a_bad_step_is_refused_before_any_file(tmp_path, step, error):
    manager = CheckpointManager(tmp_path / "run")
    for call in (
        manager.path_for,
        lambda step: manager.save(step, {}),
        lambda step: manager.finish(step, {}),
    ):
        with pytest.raises(error, match="step"):
            call(step)
    assert names(tmp_path) == []


def test_the_last_step_and_ints_of_other_kinds_are_taken(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        assert manager.save(torch.tensor(7), {}).name == "step_000000000007.pt"
        assert manager.save(10**12 - 1, {}).name == "step_999999999999.pt"


@pytest.mark.parametrize(("reason", "error"), [("", ValueError), (" \n", ValueError), (None, TypeError)])
def test_a_mark_needs_a_reason(tmp_path, reason, error):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {})
        with pytest.raises(error, match="reason"):
            manager.mark_bad(1, reason)
        assert manager.load_latest().step == 1
