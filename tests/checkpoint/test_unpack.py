import pickle

import pytest
import torch

from checkpoint.evil import packed, saved
from resumable_data.checkpoint import unpack
from resumable_data.checkpoint.limits import EXPANDED_BYTES, Limits
from resumable_data.checkpoint.saveable import prepare
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLimitError,
    CheckpointSecurityError,
)


@pytest.fixture
def load(tmp_path):
    def load(data, **options):
        (tmp_path / "x.pt").write_bytes(data)
        with (tmp_path / "x.pt").open("rb", buffering=0) as file:
            return unpack.load_archive(file, "x.pt", **options)

    return load


def test_tensors_come_back_on_the_cpu(load):
    found = load(saved({"a": torch.ones(3), "b": [1, 0.5]}))
    assert torch.equal(found["a"], torch.ones(3))
    assert found["b"] == [1, 0.5]


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0+cpu", "2.9", "unknown", ""])
def test_a_torch_that_is_too_old_loads_nothing(load, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(CheckpointError, match=r"expected 2\.10 or newer") as caught:
        load(saved({}))
    assert type(caught.value) is CheckpointError
    assert caught.value.found == version


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cu128", "3.0.0a0+git123"])
def test_a_torch_that_is_not(load, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert load(saved({})) == {}


@pytest.mark.parametrize(
    ("data", "kind", "advice"),
    [
        (b"", CheckpointSecurityError, "Nothing of it was run"),
        (
            packed(b"\x80\x02" + b"]" * 65 + b"a" * 64 + b"."),
            CheckpointLimitError,
            "Nothing of it was loaded",
        ),
        (packed(b"\x80\x02N"), CheckpointCorruptError, "damaged"),
    ],
)
def test_a_message_names_the_file_and_says_what_to_do(load, data, kind, advice):
    with pytest.raises(kind, match=rf"^x\.pt: .*\. .*{advice}") as caught:
        load(data)
    assert type(caught.value) is kind


def test_found_and_expected_are_passed_on(load):
    with pytest.raises(CheckpointLimitError) as caught:
        load(saved([0.0] * 10), limits=Limits(values=9))
    assert caught.value.expected == 9


def test_memory_that_runs_out_while_nothing_is_made_yet(load, monkeypatch):
    def exhausted(*args):
        raise MemoryError

    monkeypatch.setattr(unpack, "scan", exhausted)
    with pytest.raises(CheckpointLimitError, match="memory ran out"):
        load(saved({}))


def test_a_disk_that_cannot_be_read(load, monkeypatch):
    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(unpack, "read_archive", broken)
    with pytest.raises(CheckpointCorruptError, match=r"cannot be read \(Input/output error"):
        load(saved({}))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (pickle.UnpicklingError("no\nmore"), CheckpointSecurityError),
        (RuntimeError("no\nmore"), CheckpointCorruptError),
        (ValueError("no\nmore"), CheckpointCorruptError),
        (MemoryError("no\nmore"), MemoryError),
    ],
)
def test_what_torch_itself_refuses(load, monkeypatch, error, kind):
    def refuse(*args, **options):
        assert options["weights_only"] is True
        raise error

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(kind, match="no"):
        load(saved({}))


def test_values_that_only_torch_can_refuse_are_corrupt(load):
    encode = b"c_codecs\nencode\nX\x02\x00\x00\x00\xc4\x80X\x06\x00\x00\x00latin1\x86R"  # U+0100
    with pytest.raises(CheckpointCorruptError, match="torch cannot read it"):
        load(packed(b"\x80\x02" + encode + b"."))


def test_what_looks_larger_than_it_is_is_refused_when_saved_and_when_loaded(load):
    fits = torch.zeros(1).expand(EXPANDED_BYTES // 4)
    assert load(saved(prepare({"a": fits})))["a"].shape == fits.shape
    larger = torch.zeros(1).expand(EXPANDED_BYTES // 4 + 1)
    with pytest.raises(CheckpointLimitError, match="if it were copied"):
        load(saved({"a": larger}))
    with pytest.raises(TypeError, match=r"state\['a'\] is an expanded tensor"):
        prepare({"a": larger})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_are_loaded_are_those_that_are_saved(load):
    dtypes = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert load(saved(dtypes)) == dtypes
    passed = []
    for name, dtype in dtypes.items():
        try:
            tensor = torch.zeros(16, dtype=torch.uint8).view(dtype)
        except RuntimeError:  # no view of these
            continue
        try:
            ready = prepare([tensor])
        except TypeError:
            with pytest.raises((CheckpointError, KeyError)):  # some dtypes torch cannot even write
                load(saved([tensor]))
            continue
        (found,) = load(saved(ready))
        assert found.dtype is dtype
        assert torch.equal(found.view(torch.uint8), torch.zeros(16, dtype=torch.uint8))
        passed.append(name)
    assert {"torch.float32", "torch.bfloat16", "torch.uint64", "torch.float8_e4m3fn", "torch.bool"} <= set(
        passed
    )
