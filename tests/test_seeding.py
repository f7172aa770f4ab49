from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.datasets import Images, Indices, keep
from support.runs import build, passes, plainly, recipe, samples, streams
from torch.utils.data import get_worker_info

from resumable_data import ResumableLoader, seeding
from resumable_data.seeding import (
    TAG_BATCH,
    TAG_COLLATE,
    TAG_SAMPLE,
    TAG_WORKER,
    SampleWords,
    StreamsAside,
    Words,
    batch_words,
    draw_base_seed,
    seed_streams,
    streams_kept,
    worker_generator,
)

pytest_plugins = ["support.plugin"]

GOLDEN_FILE = Path(__file__).parent / "golden" / "seeding.json"
TAGS = {"BATC": TAG_BATCH, "SAMP": TAG_SAMPLE, "COLL": TAG_COLLATE, "WORK": TAG_WORKER}


@pytest.fixture(autouse=True)
def _streams_as_before():
    with streams_kept():
        yield


# ── frozen words and draws ───────────────────────────────────────────────────────────────────────────


def first_draws(words):
    """What the libraries give right after seeding: no Gaussians, whose last bit is the C library's."""
    seed_streams(Words(*words))
    return {
        "python": [random.random(), random.getrandbits(64)],
        "numpy": [np.random.rand(), int(np.random.randint(2**31))],
        "torch": [
            torch.rand((), dtype=torch.float64).item(),
            int(torch.randint(2**31, ()).item()),
        ],
    }


def words_of(kind, coordinates):
    if kind == "sample.v1":
        seed, epoch, position = coordinates
        return SampleWords(seed, epoch).at(position)
    return batch_words(TAG_COLLATE if kind == "collate" else TAG_BATCH, *coordinates)


def base_seeds(coordinates):
    """The base seed that torch draws for the workers, and what their streams are seeded with."""
    return draw_base_seed(worker_generator(*coordinates))


def delivered(mode):
    """Two batches with draws of the dataset's and of collate_fn's, as a loader delivers them."""
    plain = recipe(12, 3, data="augmented", collate_fn="mask", seeding=mode, seed=42)
    loader = build(plain)
    return [plainly(loader.batch_at(epoch, number)) for epoch, number in ((0, 0), (5, 3))]


def golden():
    with GOLDEN_FILE.open() as file:
        return json.load(file)


GOLDEN = golden()


@pytest.mark.parametrize("entry", GOLDEN["draws"], ids=lambda e: f"{e['kind']}-{e['coordinates']}")
def test_words_and_first_draws_are_golden(entry):
    words = words_of(entry["kind"], entry["coordinates"])
    assert list(words) == entry["words"]
    assert first_draws(words) == entry["first"]


@pytest.mark.parametrize("entry", GOLDEN["base_seeds"], ids=lambda e: str(e["coordinates"]))
def test_worker_base_seeds_are_golden(entry):
    assert base_seeds(entry["coordinates"]) == entry["base_seed"]


@pytest.mark.parametrize("mode", ["batch", "sample"])
def test_delivered_batches_are_golden(mode):
    assert delivered(mode) == GOLDEN["delivered"][mode]


def test_tags_are_golden_and_differ():
    assert {name: tag.to_bytes(4, "big").decode() for name, tag in TAGS.items()} == dict(
        zip(TAGS, TAGS, strict=True)
    )
    assert GOLDEN["tags"] == TAGS


def mix(z):
    # a transcription of the definition, apart from the package
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % 2**64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def words_by_definition(tag, *coordinates):
    golden_ratio = 0x9E3779B97F4A7C15
    state = mix((tag + golden_ratio) % 2**64)
    for word in coordinates:
        state = mix((state + golden_ratio) % 2**64 ^ mix((word + golden_ratio) % 2**64))
    return [mix((state + k * golden_ratio) % 2**64) for k in (1, 2, 3, 4)]


@pytest.mark.parametrize("entry", GOLDEN["draws"], ids=lambda e: f"{e['kind']}-{e['coordinates']}")
def test_golden_words_follow_from_the_definition(entry):
    tag = {"batch.v1": 0x42415443, "sample.v1": 0x53414D50, "collate": 0x434F4C4C}[entry["kind"]]
    assert words_by_definition(tag, *entry["coordinates"]) == entry["words"]


def test_golden_covers_every_kind_and_the_largest_coordinates():
    assert {entry["kind"] for entry in GOLDEN["draws"]} == {"batch.v1", "sample.v1", "collate"}
    for kind in ("batch.v1", "sample.v1", "collate"):
        largest = max(max(e["coordinates"]) for e in GOLDEN["draws"] if e["kind"] == kind)
        assert largest == 2**64 - 1


# ── what the streams are seeded with ─────────────────────────────────────────────────────────────────


def test_the_libraries_and_the_user_get_words_of_their_own():
    seen = set()
    for epoch in range(50):
        for first in range(0, 64, 8):
            for tag in (TAG_BATCH, TAG_COLLATE):
                words = batch_words(tag, 7, epoch, first, 0)
                # torch and numpy look at the low 32 bits only: these have to differ already
                assert len({word & 0xFFFFFFFF for word in words}) == 4
                seen.update(words)
    assert len(seen) == 50 * 8 * 2 * 4


def test_each_stream_is_seeded_with_its_word():
    seed_streams(Words(python=2**64 - 1, numpy=2**40 + 5, torch=2**63 + 9, user=0))
    assert random.random() == random.Random(2**64 - 1).random()
    assert np.random.rand() == np.random.RandomState(5).rand()
    assert torch.default_generator.initial_seed() % 2**64 == 2**63 + 9
    assert torch.rand(4).tolist() == torch.rand(4, generator=torch.Generator().manual_seed(9)).tolist()


def test_seeding_drops_a_second_gaussian_that_the_last_batch_left():
    def gaussians():
        return random.gauss(0, 1), np.random.standard_normal(), torch.randn(1).item()

    words = batch_words(TAG_BATCH, 7, 0, 0, 0)
    seed_streams(words)
    first = gaussians()
    gaussians()
    gaussians()
    seed_streams(words)
    assert gaussians() == first


def test_ranks_draw_apart_by_batch_and_alike_by_sample():
    assert batch_words(TAG_BATCH, 7, 0, 8, 0) != batch_words(TAG_BATCH, 7, 0, 8, 1)
    sample = {}
    for rank in (0, 1):
        plain = recipe(16, 4, data="augmented", seeding="sample", num_replicas=2, rank=rank)
        sample |= {index: draws for one in passes(build(plain), 1) for index, *draws in samples(one)}
    alone = build(recipe(16, 4, data="augmented", seeding="sample"))
    assert {index: draws for index, *draws in samples(passes(alone, 1)[0])} == sample


# ── streams set aside ────────────────────────────────────────────────────────────────────────────────


def draw_from_everything():
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(3)


@pytest.mark.parametrize("gaussians", [0, 1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_streams_set_aside_come_back_bit_for_bit(gaussians, fails):
    for _ in range(gaussians):  # an odd number leaves a second Gaussian for the next call
        random.gauss(0, 1)
        np.random.standard_normal()
    aside, before = StreamsAside(), streams()
    bits = np.random.get_bit_generator()

    def inside(argument):
        seed_streams(Words(1, 2, 3, 4))
        draw_from_everything()
        assert streams() != before
        if fails:
            raise KeyError(argument)
        return argument * 2

    if fails:
        with pytest.raises(KeyError):
            aside.around(inside, 3)
    else:
        assert aside.around(inside, 3) == 6
    assert streams() == before
    assert np.random.get_bit_generator() is bits


def test_a_cached_gaussian_is_the_next_one_after_a_fetch():
    expected = []
    for fetch in (False, True):
        random.seed(3)
        np.random.seed(3)
        random.gauss(0, 1)
        np.random.standard_normal()
        if fetch:
            next(iter(build(recipe(4, 2, data="augmented", collate_fn="mixup"))))
        expected.append([random.gauss(0, 1), np.random.standard_normal(), torch.initial_seed()])
    assert expected[0] == expected[1]


def test_another_bit_generator_of_the_users_is_put_back():
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        before, bits = streams_of_numpy(), np.random.get_bit_generator()
        rest_of = passes(build(recipe(8, 2, data="augmented")), 1)
        assert (streams_of_numpy(), np.random.get_bit_generator()) == (before, bits)
    finally:
        np.random.set_bit_generator(own)
    assert rest_of == passes(build(recipe(8, 2, data="augmented")), 1)


def streams_of_numpy():
    return json.dumps(plainly(np.random.get_state(legacy=False)), sort_keys=True)


class Failing(Indices):
    """Draws from every stream and raises at one item."""

    def __getitem__(self, index):
        draw_from_everything()
        if index == 3:
            raise OSError("unreadable")
        return index


@pytest.mark.parametrize("mode", ["batch", "sample"])
@pytest.mark.parametrize("how", ["dataset", "collate"])
def test_streams_and_threads_come_back_when_a_batch_fails(mode, how):
    def refuse(batch):
        draw_from_everything()
        raise OSError("unreadable")

    if how == "dataset":
        loader = ResumableLoader(Failing(6), 2, seed=7, seeding=mode, collate_fn=keep)
    else:
        loader = ResumableLoader(Indices(6), 2, seed=7, seeding=mode, collate_fn=refuse)
    random.gauss(0, 1)
    np.random.standard_normal()
    before, threads = streams(), torch.get_num_threads()
    with pytest.raises(OSError, match="unreadable"):
        list(loader)
    with pytest.raises(OSError, match="unreadable"):
        loader.batch_at(0, 1)
    assert streams() == before
    assert torch.get_num_threads() == threads


def test_streams_kept_takes_draws_back_also_after_an_error():
    before = streams()

    def fail():
        with streams_kept():
            draw_from_everything()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert streams() == before


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────


class Threads(Indices):
    def __getitem__(self, index):
        return torch.get_num_threads()


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("mode", ["batch", "sample"])
def test_a_fetch_runs_on_one_thread_and_the_process_keeps_its_own(mode, crew):
    loader = ResumableLoader(Threads(6), 2, seed=7, seeding=mode, **crew)
    for batch in loader:
        assert batch.tolist() == [1, 1]
        assert torch.get_num_threads() == 2
    assert loader.peek().tolist() == [1, 1]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_without_seeding_nothing_is_set_aside():
    loader = ResumableLoader(Threads(2), 2, seed=7, seeding=None)
    assert next(iter(loader)).tolist() == [2, 2]


def images(workers, count=20):
    loader = ResumableLoader(Images(count), 4, shuffle=True, seed=7, num_workers=workers)
    return torch.cat(list(loader))


@pytest.mark.usefixtures("_two_threads")
def test_normalised_images_are_bitwise_equal_with_and_without_workers():
    here, there = images(0), images(2)
    assert here.shape == (20, 3, 224, 224)
    assert torch.equal(here.view(torch.int32), there.view(torch.int32))


@pytest.mark.usefixtures("_two_threads")
def test_control_two_threads_normalise_to_other_bits(monkeypatch):
    there = [Images(20)[index] for index in range(20)]
    torch.set_num_threads(1)
    alone = [Images(20)[index] for index in range(20)]
    torch.set_num_threads(2)
    if all(torch.equal(a, b) for a, b in zip(alone, there, strict=True)):
        pytest.skip("this machine reduces to the same bits on one thread and on two")
    expected = images(2)
    # the fault: the fetch keeps the process's threads
    monkeypatch.setattr(seeding.torch, "set_num_threads", lambda count: None)
    assert not torch.equal(images(0), expected)


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────


class WorkerSeeds(Indices):
    """Item i is (the worker's seed, the seed its streams began with)."""

    def __getitem__(self, index):
        return get_worker_info().seed, began[0]


began = []


def note_seed(worker_id):
    began.append(torch.initial_seed())


def test_worker_init_fn_finds_the_streams_seeded_from_the_golden_base_seed():
    entry = next(e for e in GOLDEN["base_seeds"] if e["coordinates"] == [42, 0, 0])
    loader = ResumableLoader(WorkerSeeds(4), 1, num_workers=2, seed=42, worker_init_fn=note_seed)
    seen = sorted({tuple(int(x) for x in batch) for batch in loader})
    assert seen == [(entry["base_seed"] + worker,) * 2 for worker in (0, 1)]
    assert began == []  # nothing of it happened in this process


def test_worker_seeds_differ_between_ranks_epochs_and_runs():
    found = {base_seeds((seed, epoch, rank)) for seed in range(4) for epoch in range(25) for rank in range(4)}
    assert len(found) == 400
