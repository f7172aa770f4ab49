import copy
import json
import math
import random
import subprocess
import sys
import timeit
from pathlib import Path

import numpy as np
import pytest
import torch

from resumable_data import rng, rng_streams
from resumable_data.errors import RNGRestoreError
from resumable_data.rng import capture_rng_state, restore_rng_state

BIT_GENERATORS = [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]


@pytest.fixture(autouse=True)
def _streams_as_before(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    bits = np.random.get_bit_generator()
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    np.random.set_bit_generator(bits)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draws():
    return (
        [random.random() for _ in range(3)],
        [random.gauss(0, 1) for _ in range(3)],
        np.random.rand(3).tolist(),
        np.random.standard_normal(3).tolist(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
    )


def named_generators():
    named = {cls.__name__: np.random.Generator(cls(3)) for cls in BIT_GENERATORS}
    return named | {
        "torch": torch.Generator().manual_seed(5),
        "python": random.Random(7),
        "legacy": np.random.RandomState(9),
        "legacy_philox": np.random.RandomState(np.random.Philox(9)),
    }


def named_draws(generators):
    out = {}
    for name, generator in generators.items():
        if isinstance(generator, torch.Generator):
            out[name] = torch.rand(5, generator=generator).tolist()
        elif isinstance(generator, random.Random):
            out[name] = [generator.gauss(0, 1) for _ in range(3)]
        else:
            out[name] = [
                int(generator.integers(2**31)) if hasattr(generator, "integers") else generator.randint(2**31)
            ] + [float(generator.standard_normal()) for _ in range(3)]
    return out


def same_streams(a, b):
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def test_every_stream_continues_after_a_restore():
    draws()
    generators = named_generators()
    named_draws(generators)  # leaves half-used words and cached Gaussians behind
    state = capture_rng_state(generators)
    expected = draws(), named_draws(generators)
    assert (draws(), named_draws(generators)) != expected  # without a restore they go on elsewhere
    report = restore_rng_state(state, generators=generators)
    assert (draws(), named_draws(generators)) == expected
    assert report.restored[:3] == ("python", "numpy", "torch_cpu")
    assert len(report.restored) == 3 + len(generators)
    assert report.skipped == {}


def test_capture_draws_nothing_and_restore_is_the_identity_on_it():
    state = capture_rng_state()
    assert same_streams(capture_rng_state(), state)
    restore_rng_state(state)
    assert same_streams(capture_rng_state(), state)


@pytest.mark.parametrize("odd_draws", [0, 1])
def test_cached_gaussians_are_part_of_the_state(odd_draws):
    random.seed(1)
    np.random.seed(1)
    for _ in range(odd_draws):
        random.gauss(0, 1)
        np.random.standard_normal()
    state = capture_rng_state()
    assert (state["python"]["gauss"] != "") == bool(odd_draws)
    assert state["numpy"]["has_gauss"] == odd_draws
    expected = random.gauss(0, 1), np.random.standard_normal()
    random.gauss(0, 1), np.random.standard_normal()
    restore_rng_state(state)
    assert (random.gauss(0, 1), np.random.standard_normal()) == expected


def leaves(value):
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_the_state_is_plain_and_passes_json_and_weights_only(tmp_path):
    generators = named_generators()
    state = capture_rng_state(generators)
    assert {type(leaf) for leaf in leaves(state)} == {int, str}
    assert json.loads(json.dumps(state)) == state
    torch.save(state, tmp_path / "rng.pt")
    assert torch.load(tmp_path / "rng.pt", weights_only=True) == state
    assert len(json.dumps(capture_rng_state())) < 24_000


FRESH = """
import json, random, sys
import torch
state = torch.load(sys.argv[1], weights_only=True)  # before anything else of ours is imported
random.seed(99); torch.manual_seed(99); torch.randn(3)
import numpy as np
np.random.seed(99)
from resumable_data.rng import restore_rng_state
from tests.test_rng import draws, named_draws, named_generators
generators = named_generators()
named_draws(generators); named_draws(generators)
restore_rng_state(state, generators=generators)
print(json.dumps([draws(), named_draws(generators)]))
"""


def test_a_fresh_interpreter_continues_every_stream_r10(tmp_path):
    generators = named_generators()
    named_draws(generators)
    draws()
    torch.save(capture_rng_state(generators), tmp_path / "rng.pt")
    expected = json.dumps([draws(), named_draws(generators)])
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "rng.pt")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.stdout.strip() == expected
    assert json.dumps([draws(), named_draws(generators)]) != expected


@pytest.mark.parametrize("cls", BIT_GENERATORS)
def test_the_legacy_global_may_stand_on_any_bit_generator(cls):
    np.random.set_bit_generator(cls(4))
    np.random.standard_normal()
    state = capture_rng_state()
    expected = draws()
    draws()
    restore_rng_state(state)
    assert draws() == expected


# ── what is refused (R12): nothing may have moved ────────────────────────────────────────────────────


def put(path, value):
    def edit(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        state[last] = value

    return edit


def drop(*path):
    def edit(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        del state[last]

    return edit


def cut(path, characters):
    def edit(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        state[last] = state[last][:-characters]

    return edit


ZERO_WORDS = "0" * (624 * 8)
BAD = {
    "python missing": ("python", drop("python")),
    "numpy missing": ("numpy", drop("numpy")),
    "torch_cpu missing": ("torch_cpu", drop("torch_cpu")),
    "cuda missing": ("torch_cuda", drop("torch_cuda")),
    "unknown stream": ("torch_tpu", put(["torch_tpu"], [])),
    "newer schema": ("schema", put(["schema"], "resumable_data.rng.v2")),
    "python truncated": ("python.words", cut(["python", "words"], 2)),
    "python no dict": ("python", put(["python"], [1, 2])),
    "python zeros": ("python.words", put(["python", "words"], ZERO_WORDS + "70020000")),
    "python position": ("python.words", put(["python", "words"], "01000000" * 624 + "71020000")),
    "python a list of ints": ("python.words", put(["python", "words"], [0] * 10**7)),
    "python version": ("python.version", put(["python", "version"], 2)),
    "python bool version": ("python.version", put(["python", "version"], True)),
    "python nan": ("python.gauss", put(["python", "gauss"], "nan")),
    "python float": ("python.gauss", put(["python", "gauss"], 0.5)),
    "python no hex": ("python.words", put(["python", "words"], "zz" * 2500)),
    "python spaces": ("python.words", put(["python", "words"], "  " * 2500)),
    "numpy truncated": ("numpy.state.key", cut(["numpy", "state", "key"], 8)),
    "numpy zeros": ("numpy.state.key", put(["numpy", "state", "key"], ZERO_WORDS)),
    "numpy position": ("numpy.state.pos", put(["numpy", "state", "pos"], 625)),
    "numpy negative": ("numpy.state.pos", put(["numpy", "state", "pos"], -1)),
    "numpy huge": ("numpy.state.pos", put(["numpy", "state", "pos"], 2**20000)),
    "numpy float pos": ("numpy.state.pos", put(["numpy", "state", "pos"], 3.0)),
    "numpy has_gauss": ("numpy.has_gauss", put(["numpy", "has_gauss"], 2)),
    "numpy gauss": ("numpy.gauss", put(["numpy", "gauss"], "inf")),
    "numpy other kind": ("numpy.bit_generator", put(["numpy", "bit_generator"], "PCG64")),
    "numpy no kind": ("numpy.bit_generator", drop("numpy", "bit_generator")),
    "numpy field missing": ("numpy", drop("numpy", "has_gauss")),
    "torch truncated": ("torch_cpu", cut(["torch_cpu"], 16)),
    "torch empty": ("torch_cpu", put(["torch_cpu"], "")),
    "torch zeros": ("torch_cpu", put(["torch_cpu"], "00" * 5056)),
    "torch ints": ("torch_cpu", put(["torch_cpu"], [0] * 10**7)),
    "torch bytes": ("torch_cpu", put(["torch_cpu"], b"00" * 5056)),
    "cuda no list": ("torch_cuda", put(["torch_cuda"], "00")),
    "cuda long list": ("torch_cuda", put(["torch_cuda"], ["00"] * 10**6)),
    "rank": ("rank", put(["rank"], "0")),
    "world_size": ("world_size", put(["world_size"], True)),
    "generators no dict": ("generators", put(["generators"], [])),
    "generator int name": ("generators", put(["generators", 3], {})),
    "Philox truncated": ("Philox", cut(["generators", "Philox", "state", "buffer"], 2)),
    "Philox buffer": ("Philox", put(["generators", "Philox", "state", "buffer_pos"], 5)),
    "Philox int": ("Philox", put(["generators", "Philox", "state", "uinteger"], 2**32)),
    "SFC64 extra": ("SFC64", put(["generators", "SFC64", "state", "more"], 1)),
    "PCG64 out of range": ("PCG64", put(["generators", "PCG64", "state", "state", "state"], 2**128)),
    "PCG64 even": ("PCG64", put(["generators", "PCG64", "state", "state", "inc"], 4)),
    "PCG64 is DXSM": ("PCG64", put(["generators", "PCG64", "state", "bit_generator"], "PCG64DXSM")),
    "MT19937 zeros": ("MT19937", put(["generators", "MT19937", "state", "state", "key"], ZERO_WORDS)),
    "kind": ("torch", put(["generators", "torch", "kind"], "random.Random")),
    "device": ("torch", put(["generators", "torch", "device"], "cuda")),
    "generator missing": ("python", drop("generators", "python")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_state_is_refused_by_name_and_nothing_moves_r12(case):
    stream, edit = BAD[case]
    generators = named_generators()
    state = copy.deepcopy(capture_rng_state(generators))
    draws(), named_draws(generators)
    edit(state)
    before = capture_rng_state(generators)
    with pytest.raises(RNGRestoreError, match=stream.replace(".", r"\.")) as caught:
        restore_rng_state(state, generators=generators)
    assert same_streams(capture_rng_state(generators), before)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [None, 3, "state", [], {}])
def test_something_else_than_a_state_is_refused(value):
    with pytest.raises(RNGRestoreError, match="expected"):
        restore_rng_state(value)


def test_zeroed_words_of_torch_are_refused_although_torch_takes_them():
    raw = bytearray(torch.get_rng_state().numpy().tobytes())
    raw[24 : 24 + 8 * 624] = bytes(8 * 624)
    torch.Generator().set_state(torch.frombuffer(raw, dtype=torch.uint8))  # accepted, and draws only zeros
    state = capture_rng_state() | {"torch_cpu": raw.hex()}
    with pytest.raises(RNGRestoreError, match=r"torch_cpu.*zeros"):
        restore_rng_state(state)


def test_words_that_torch_would_cut_to_32_bits_are_refused():
    raw = bytearray(torch.get_rng_state().numpy().tobytes())
    raw[24 + 8 + 5] = 1
    with pytest.raises(RNGRestoreError, match=r"torch_cpu.*2\*\*32"):
        restore_rng_state(capture_rng_state() | {"torch_cpu": raw.hex()})


def test_another_bit_generator_under_the_legacy_global_is_refused():
    state = capture_rng_state()
    np.random.set_bit_generator(np.random.Philox(1))
    with pytest.raises(RNGRestoreError, match=r"numpy\.bit_generator.*'MT19937'.*'Philox'"):
        restore_rng_state(state)


@pytest.mark.parametrize("failing", ["numpy", "torch_cpu", "generators['last']"])
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_failure_while_setting_puts_every_stream_back(monkeypatch, failing, error):
    generators = {"last": np.random.default_rng(1)}
    state = capture_rng_state(generators)
    draws(), generators["last"].random()
    before = capture_rng_state(generators)
    plain = rng._apply

    def sabotage(changes):
        def fail():
            next(change for change in changes if change.name == failing).apply()
            raise error

        plain([rng_streams.Change(c.name, fail, c.undo) if c.name == failing else c for c in changes])

    monkeypatch.setattr(rng, "_apply", sabotage)
    expected = RNGRestoreError if isinstance(error, RuntimeError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        restore_rng_state(state, generators=generators)
    assert same_streams(capture_rng_state(generators), before)
    if expected is RNGRestoreError:
        assert failing in str(caught.value)
        assert "put back" in str(caught.value)


# ── whose state it is (R13) ──────────────────────────────────────────────────────────────────────────


def test_each_rank_gets_its_own_streams_back_r13():
    states, expected = {}, {}
    for rank in (0, 1):
        torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
        states[rank] = capture_rng_state(rank=rank, world_size=2)
        expected[rank] = draws()
    for rank in (0, 1):
        restore_rng_state(states[rank], rank=rank, world_size=2)
        assert draws() == expected[rank]
    assert expected[0] != expected[1]
    before = capture_rng_state()
    with pytest.raises(RNGRestoreError, match="rank 1 of 2, this process is rank 0 of 2"):
        restore_rng_state(states[1], rank=0, world_size=2)
    assert same_streams(capture_rng_state(), before)


def test_the_same_rank_of_another_world_size_is_accepted_with_one_warning():
    state = capture_rng_state(rank=1, world_size=4)
    expected = draws()
    with pytest.warns(UserWarning, match="4 processes.*one of 2") as caught:
        restore_rng_state(state, rank=1, world_size=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert draws() == expected


def test_rank_and_world_size_come_from_the_environment(monkeypatch):
    assert (capture_rng_state()["rank"], capture_rng_state()["world_size"]) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    state = capture_rng_state()
    assert (state["rank"], state["world_size"]) == (3, 8)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="rank=3, world_size=1"):
        capture_rng_state()
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(ValueError, match="RANK"):
        capture_rng_state()


def test_rank_and_world_size_come_from_the_process_group(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state = capture_rng_state()
    finally:
        torch.distributed.destroy_process_group()
    assert (state["rank"], state["world_size"]) == (0, 1)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 1), (0, 0)])
def test_an_impossible_rank_is_a_value_error(rank, size):
    with pytest.raises(ValueError, match="0 <= rank < world_size"):
        capture_rng_state(rank=rank, world_size=size)


def test_arguments_of_wrong_types_are_type_errors():
    with pytest.raises(TypeError, match="rank"):
        capture_rng_state(rank="0", world_size=1)
    with pytest.raises(TypeError, match=r"generators\['x'\].*SystemRandom"):
        capture_rng_state({"x": random.SystemRandom()})
    with pytest.raises(TypeError, match=r"generators\['x'\].*int"):
        restore_rng_state(capture_rng_state(), generators={"x": 3})
    with pytest.raises(TypeError, match="names"):
        capture_rng_state([torch.Generator()])


# ── devices (R11) ────────────────────────────────────────────────────────────────────────────────────


class FakeDevices:
    """Stands for torch.cuda, torch.xpu or torch.mps with `count` devices whose state is 16 bytes."""

    def __init__(self, count, fail_at=None):
        self.states = [torch.full((16,), i, dtype=torch.uint8) for i in range(count)]
        self.fail_at = fail_at

    def is_available(self):
        return bool(self.states)

    def device_count(self):
        return len(self.states)

    def get_rng_state(self, device=0):
        return self.states[device].clone()

    def set_rng_state(self, state, device=0):
        if device == self.fail_at and not torch.equal(state, self.states[device]):
            raise RuntimeError("the driver says no")
        self.states[device] = state.clone()

    def advance(self):
        self.states = [state + 100 for state in self.states]

    def values(self):
        return [int(state[0]) for state in self.states]


@pytest.fixture
def machine(monkeypatch):
    def build(**modules):
        table = {kind: modules.get(kind, FakeDevices(0)) for kind in rng_streams.DEVICE_KINDS}
        monkeypatch.setattr(rng_streams, "device_module", table.__getitem__)
        return table

    return build


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_every_device_is_captured_and_restored(machine, kind):
    count = 1 if kind == "mps" else 4
    fake = machine(**{kind: FakeDevices(count)})[kind]
    state = capture_rng_state()
    assert len(state[f"torch_{kind}"]) == count
    fake.advance()
    assert fake.values() == [i + 100 for i in range(count)]
    report = restore_rng_state(state)
    assert fake.values() == list(range(count))
    assert f"torch_{kind}[{count - 1}]" in report.restored


@pytest.mark.parametrize("present", [0, 1, 2, 6])
def test_four_devices_on_a_machine_with_another_number_r11(machine, present):
    machine(cuda=FakeDevices(4))
    state = capture_rng_state()
    expected = draws()
    fake = machine(cuda=FakeDevices(present))["cuda"]
    fake.advance()
    before = capture_rng_state()
    with pytest.raises(RNGRestoreError, match=f"torch_cuda.*4 cuda.*sees {present}"):
        restore_rng_state(state)
    assert same_streams(capture_rng_state(), before)
    with pytest.warns(UserWarning, match=r"torch_cuda\[") as caught:
        report = restore_rng_state(state, strict=False)
    assert len(caught) == 1
    both = min(4, present)
    assert fake.values() == list(range(both)) + [i + 100 for i in range(both, present)]
    assert sorted(report.skipped) == [f"torch_cuda[{i}]" for i in range(both, max(4, present))]
    assert draws() == expected


def test_a_device_that_fails_while_being_set_leaves_all_as_they_were(machine):
    fake = machine(cuda=FakeDevices(3, fail_at=2))["cuda"]
    state = capture_rng_state()
    fake.advance()
    draws()
    before = capture_rng_state()
    with pytest.raises(RNGRestoreError, match=r"torch_cuda\[2\].*the driver says no.*put back"):
        restore_rng_state(state)
    assert same_streams(capture_rng_state(), before)


@pytest.mark.parametrize("bad", ["00" * 15, "", 7, ["00" * 16], "0g" * 16])
def test_a_bad_device_entry_is_refused_before_anything_is_set(machine, bad):
    machine(cuda=FakeDevices(2))
    state = capture_rng_state()
    state["torch_cuda"][1] = bad
    draws()
    before = capture_rng_state()
    with pytest.raises(RNGRestoreError, match=r"torch_cuda\[1\]"):
        restore_rng_state(state)
    assert same_streams(capture_rng_state(), before)


def test_generators_on_one_side_only_are_skipped_without_strict():
    state = capture_rng_state({"old": random.Random(1), "both": random.Random(2)})
    given = {"both": random.Random(0), "new": random.Random(3)}
    expected = random.Random(2).random()
    with pytest.raises(RNGRestoreError, match=r"generators\['new'\]"):
        restore_rng_state(state, generators=given)
    with pytest.warns(UserWarning, match=r"generators\['new'\].*generators\['old'\]"):
        report = restore_rng_state(state, generators=given, strict=False)
    assert set(report.skipped) == {"generators['new']", "generators['old']"}
    assert given["both"].random() == expected


def test_an_active_accelerator_of_another_kind_is_named_once(monkeypatch):
    monkeypatch.setattr(rng, "_named_accelerators", set())
    device = type("Device", (), {"type": "hpu"})()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    with pytest.warns(UserWarning, match="'hpu' cannot be captured"):
        capture_rng_state()
    capture_rng_state()  # warnings are errors here: a second one would fail


def test_torchs_default_device_does_not_matter():
    state = capture_rng_state()
    expected = draws()
    with torch.device("meta"):
        restore_rng_state(capture_rng_state())
        restore_rng_state(state)
    assert draws() == expected


def test_capture_and_restore_cost_less_than_a_few_milliseconds():
    state = capture_rng_state()
    seconds = min(timeit.repeat(lambda: restore_rng_state(state), number=10, repeat=5)) / 10
    assert math.isfinite(seconds)
    assert seconds < 5e-3  # about 0.4 ms; loose, for machines that do other things too
