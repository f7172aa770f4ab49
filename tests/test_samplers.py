"""Samplers and batch samplers of others: any of them, stopped anywhere, goes on as it would have."""

from __future__ import annotations

import json
import random

import pytest
import torch
from support.datasets import Augmented, Indices, Logged, keep
from support.fresh import CallFailedError
from support.runs import plainly, streams
from support.samplers import (
    CASES,
    Anywhere,
    ByLength,
    Hidden,
    Lengthless,
    N,
    Python,
    legs,
    make,
    saves,
)
from torch.utils.data import DataLoader, DistributedSampler, Sampler, WeightedRandomSampler

from resumable_data import ResumableLoader, StateMismatchError, sampled

pytest_plugins = ["support.plugin"]

EPOCHS = 3
LAWFUL = sorted(set(CASES) - {"hidden"})


def chained(fresh, case, seeding, states, stops, crew):
    """From each stop three events in one fresh interpreter, and the rest after that as if in another."""
    first = fresh(
        legs, case=case, seeding=seeding, jobs=[[states[stop], 3] for stop in stops], epochs=EPOCHS, crew=crew
    )
    second = fresh(
        legs, case=case, seeding=seeding, jobs=[[state, None] for _, state in first], epochs=EPOCHS, crew={}
    )
    return [[*head, *tail] for (head, _), (tail, _) in zip(first, second, strict=True)]


@pytest.mark.parametrize("case", LAWFUL)
def test_any_sampler_stopped_anywhere_and_twice_goes_on_as_it_would_have(fresh, case):
    whole, states = saves(case, "batch", EPOCHS)
    epochs = [[event[2] for event in whole if event[0] == e and event[1] != "end"] for e in range(EPOCHS)]
    assert all(epochs)
    if case not in ("a_list", "sequential"):
        # the order itself changes from epoch to epoch, not the augmentations alone
        assert keys(epochs[0]) != keys(epochs[1]) != keys(epochs[2])
    states = json.loads(json.dumps(states))
    # an "end" is seen before the body of its epoch is over, so the state of that moment has closed the epoch
    stops = [at for at in range(len(states)) if at == 0 or whole[at - 1][1] != "end"] + [len(whole)]
    for stop, seen in zip(stops, chained(fresh, case, "batch", states, stops, {}), strict=True):
        assert whole[:stop] + seen == whole, stop


def keys(batches):
    return [[int(key) for key in torch.as_tensor(batch[0]).reshape(-1)] for batch in batches]


WITH_WORKERS = {
    "anywhere",
    "lengthless_limited",
    "random_generator",
    "nested_twice",
    "single_sampler",
    "stateful",
}


@pytest.mark.parametrize(
    "case",
    [case if case in WITH_WORKERS else pytest.param(case, marks=pytest.mark.nightly) for case in LAWFUL],
)
def test_workers_read_ahead_and_it_does_not_show(fresh, case):
    whole, _ = saves(case, "sample", EPOCHS)
    ahead, states = saves(case, "sample", EPOCHS, num_workers=2)
    assert ahead == whole
    states = json.loads(json.dumps(states))
    # in the middle of epoch 1, and at its last batch
    ends = [at for at, event in enumerate(whole) if event[1] == "end"]
    stops = [(ends[0] + ends[1]) // 2, ends[1]]
    seen = chained(fresh, case, "sample", states, stops, {"num_workers": 2})
    assert [whole[:stop] + rest for stop, rest in zip(stops, seen, strict=True)] == [whole, whole]


def test_the_process_keeps_its_own_streams_whatever_a_sampler_draws():
    loader = make("anywhere")
    before = streams()
    running = iter(loader)
    next(running)
    loader.state_dict()
    list(running)
    loader.seek(1, 2)
    list(loader)
    assert streams() == before


def test_a_sampler_without_a_seed_of_its_own_reads_the_same_wherever_the_process_stands():
    random.seed(1)
    one = plainly(list(make("anywhere")))
    random.seed(2)
    torch.manual_seed(5)
    assert plainly(list(make("anywhere"))) == one
    # control: under DataLoader the same sampler depends on where the streams stand
    assert list(DataLoader(Indices(N), 4, sampler=Python(N), collate_fn=keep)) != list(
        DataLoader(Indices(N), 4, sampler=Python(N), collate_fn=keep)
    )


def test_skipped_samples_are_not_fetched(tmp_path):
    log = tmp_path / "log"
    log.touch()

    def loader():
        return ResumableLoader(Logged(N, log), 4, sampler=Python(N), seed=3, collate_fn=keep)

    whole = list(loader())
    log.write_text("")
    other = loader()
    state = saved_after(other, 4)
    log.write_text("")
    resumed = loader()
    resumed.load_state_dict(state)
    assert list(resumed) == whole[4:]
    assert [int(line) for line in log.read_text().split()] == [key for batch in whole[4:] for key in batch]


def saved_after(loader, batches):
    running = iter(loader)
    for _ in range(batches):
        next(running)
    return json.loads(json.dumps(loader.state_dict()))


# ── refused: an order that is not the one that was saved ─────────────────────────────────────────────


def hidden_resumed(state):
    loader = make("hidden")
    loader.load_state_dict(state)
    before = loader.state_dict()
    try:
        list(loader)
    except StateMismatchError as error:
        # a refused skip leaves the loader where it was
        assert loader.state_dict() == before
        return [str(error), list(error.fields)]
    return None


def test_a_hidden_history_is_refused(fresh):
    loader = make("hidden")
    list(loader)
    state = saved_after(loader, 2)
    assert (state["epoch"], state["batch_in_epoch"]) == (1, 2)
    message, fields = fresh(hidden_resumed, state=state)
    assert fields == ["order_digest"]
    assert "order_digest" in message
    # at the start of an epoch nothing was delivered that could differ
    assert fresh(hidden_resumed, state=saved_after(make("hidden"), 0)) is None


def test_control_without_the_digest_a_hidden_history_is_trusted(monkeypatch):
    def resumed_wrongly():
        loader = make("hidden")
        list(loader)
        return hidden_resumed(saved_after(loader, 2))

    assert resumed_wrongly() is not None
    monkeypatch.setattr(sampled, "_chain", lambda digest, keys: b"")
    assert resumed_wrongly() is None


class Versioned(Sampler):
    """An order that another version of the code draws otherwise, and one that depends on its data."""

    def __init__(self, data, version):
        self.data, self.version = data, version

    def __iter__(self):
        order = random.sample(self.data, len(self.data))
        yield from order if self.version == 1 else order[::-1]

    def __len__(self):
        return len(self.data)


REFUSED = {
    "another version": (lambda: Versioned(range(N), 1), lambda: Versioned(range(N), 2)),
    "other data": (lambda: Versioned(range(N), 1), lambda: Versioned([*range(1, N), 0], 1)),
    "other weights": (
        lambda: WeightedRandomSampler([1.0] * N, N),
        lambda: WeightedRandomSampler([5.0] + [1.0] * (N - 1), N),
    ),
    "fewer samples than were delivered": (lambda: Python(N), lambda: Python(5)),
    "another sampler": (lambda: Python(N), lambda: Anywhere(N)),
    "another generator's draws": (
        lambda: WeightedRandomSampler([1.0] * N, N, generator=torch.Generator().manual_seed(1)),
        lambda: WeightedRandomSampler([1.0, 9.0] * N, N, generator=torch.Generator().manual_seed(1)),
    ),
}


def resumed_to_its_end(loader, state):
    loader.load_state_dict(state)
    return list(loader)


@pytest.mark.parametrize("change", sorted(REFUSED))
def test_an_order_that_changed_is_refused_by_its_digest(change):
    before, after = REFUSED[change]
    state = saved_after(ResumableLoader(Indices(N), 4, sampler=before(), seed=3), 3)
    same = ResumableLoader(Indices(N), 4, sampler=before(), seed=3)
    same.load_state_dict(state)
    assert len(list(same)) == 3
    other = ResumableLoader(Indices(N), 4, sampler=after(), seed=3)
    with pytest.raises(StateMismatchError, match="order_digest") as caught:
        resumed_to_its_end(other, state)
    assert list(caught.value.fields) == ["order_digest"]


def test_an_order_that_changed_is_accepted_by_name_and_by_number():
    state = saved_after(ResumableLoader(Indices(N), 4, sampler=Versioned(range(N), 1), seed=3), 3)
    other = ResumableLoader(Indices(N), 4, sampler=Versioned(range(N), 2), seed=3, collate_fn=keep)
    whole = list(other)
    other.load_state_dict(state, override={"order_digest"})
    assert other.batch_in_epoch == 3
    assert list(other) == whole[3:]


@pytest.mark.parametrize("count", [10, 3000])
def test_keys_that_are_arrays_are_digested_whole(count):
    # numpy and torch write a long array with dots in its middle
    def loader(middle):
        order = torch.arange(count)
        order[count // 2], order[count // 2 + 1] = count // 2 + middle, count // 2 + 1 - middle
        return ResumableLoader(
            Indices(count), batch_sampler=[order.numpy(), order.numpy()], collate_fn=len, seed=3
        )

    state = saved_after(loader(0), 1)
    same, other = loader(0), loader(1)
    same.load_state_dict(state)
    assert len(list(same)) == 1
    other.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="order_digest"):
        list(other)


def test_the_digest_follows_every_batch():
    loader = make("python")
    running = iter(loader)
    seen = [loader.state_dict()["order_digest"]]
    for _ in running:
        seen.append(loader.state_dict()["order_digest"])
    assert seen[0] == ""
    assert len(set(seen)) == len(seen) - (seen[-1] == "")
    assert all(len(digest) == 32 for digest in seen[1:-1])


# ── what else can be asked ───────────────────────────────────────────────────────────────────────────


def test_such_an_order_belongs_to_its_rank_and_its_batch_size():
    state = saved_after(make("python"), 2)
    for changed in ({"batch_size": 5}, {"num_replicas": 2, "rank": 0}):
        loader = ResumableLoader(
            Augmented(N), **{"batch_size": 4, "sampler": Python(N), "seed": 3, **changed}
        )
        with pytest.raises(StateMismatchError) as caught:
            loader.load_state_dict(state)
        assert list(caught.value.fields) == [next(iter(changed))]


def test_a_custom_sampler_is_not_dealt_out_again():
    def ranked(rank):
        return ResumableLoader(
            Augmented(N), 4, sampler=Python(N), seed=3, num_replicas=2, rank=rank, collate_fn=keep
        )

    one, other = list(ranked(0)), list(ranked(1))
    assert [[s[0] for s in batch] for batch in one] == [[s[0] for s in batch] for batch in other]
    assert sum(map(len, one)) == N
    # but the ranks' augmentations are their own
    assert all(a != b for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True))


def test_batch_at_is_refused_and_seek_reads_forward():
    loader = make("python")
    whole = plainly(list(loader))
    with pytest.raises(ValueError, match="batch_at"):
        loader.batch_at(0, 1)
    loader.seek(0, 3)
    assert loader.samples_in_epoch == 12
    assert plainly(list(loader)) == whole[3:]
    loader.seek(0, 1)
    assert plainly(loader.peek()) == whole[1]
    assert plainly(list(loader)) == whole[1:]
    with pytest.raises(IndexError, match="past the epoch's end"):
        loader.seek(0, 99)


def test_looking_back_over_a_hidden_history_is_refused():
    loader = make("hidden")
    saved_after(loader, 4)
    with pytest.raises(StateMismatchError, match="order_digest"):
        loader.seek(0, 1)


def test_lengths():
    assert len(make("python")) == 6
    assert len(make("anywhere_drop_last")) == 5
    with pytest.raises(TypeError, match="batches_per_epoch"):
        len(make("lengthless"))
    assert make("lengthless").batches_remaining is None
    limited = make("lengthless_limited")
    assert len(limited) == limited.batches_remaining == len(list(limited)) == 4


class Understating(Python):
    """Says it is shorter than it is."""

    def __len__(self):
        return 8


def test_a_sampler_longer_than_it_says_is_read_to_its_end():
    loader = ResumableLoader(Indices(N), 4, sampler=Understating(N), seed=3, collate_fn=keep)
    remaining = []
    whole = []
    for batch in loader:
        whole += batch
        remaining.append(loader.batches_remaining)
    assert sorted(whole) == list(range(N))
    assert remaining == [1, 0, 0, 0, 0, 0]


def test_samples_are_counted_where_batches_have_lengths():
    loader = make("buckets")
    seen = 0
    for batch in loader:
        seen += len(batch[0])
        if loader.epoch == 0:
            assert loader.samples_in_epoch == loader.consumed_samples == seen
    assert loader.consumed_samples == N


class Failing(Python):
    """Raises in the middle of an epoch, once."""

    failed = False

    def __iter__(self):
        for number, key in enumerate(super().__iter__()):
            if number == 9 and not self.failed:
                self.failed = True
                raise OSError("the index file went away")
            yield key


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_raises_is_read_again_to_the_same_place(workers):
    whole = list(ResumableLoader(Indices(N), 4, sampler=Python(N), seed=3, collate_fn=keep))
    loader = ResumableLoader(Indices(N), 4, sampler=Failing(N), seed=3, collate_fn=keep, num_workers=workers)
    with pytest.raises(OSError, match="went away"):
        list(loader)
    seen = whole[: loader.batch_in_epoch]
    assert seen + list(loader) == whole


def test_an_empty_sampler_gives_an_empty_epoch():
    for kind in ([], Lengthless(0)):
        loader = ResumableLoader(Indices(N), 4, sampler=kind, seed=3)
        assert list(loader) == []
        assert loader.epoch == 1


def test_the_epoch_reaches_the_sampler_inside_and_torch_agrees():
    def torchs(epoch):
        inner = DistributedSampler(range(N), 2, 1, seed=9)
        inner.set_epoch(epoch)
        return list(Bare(inner, 4))

    loader = ResumableLoader(
        Indices(N), batch_sampler=Bare(DistributedSampler(range(N), 2, 1, seed=9), 4), collate_fn=keep, seed=3
    )
    assert [list(loader) for _ in range(3)] == [torchs(0), torchs(1), torchs(2)]


class Bare(ByLength):
    """Batches in the inner sampler's order."""

    def __iter__(self):
        keys = list(self.sampler)
        for at in range(0, len(keys), self.batch_size):
            yield keys[at : at + self.batch_size]


def test_control_without_forwarding_set_epoch_every_epoch_is_the_first(monkeypatch):
    from resumable_data import dealers

    monkeypatch.setattr(dealers, "chain_of", lambda sampler: [sampler])
    loader = ResumableLoader(
        Indices(N), batch_sampler=Bare(DistributedSampler(range(N), 2, 1, seed=9), 4), collate_fn=keep, seed=3
    )
    first, second = list(loader), list(loader)
    assert first == second


def test_a_fresh_interpreter_refuses_by_name(fresh):
    # what the other tests rest on: an error over there is an error here
    state = saved_after(make("python"), 2)
    with pytest.raises(CallFailedError, match="order"):
        fresh(legs, case="buckets", seeding="batch", jobs=[[state, None]], epochs=1, crew={})


def test_hidden_within_one_process_goes_on():
    # nothing is refused while the object itself lives
    loader = make("hidden")
    first = saved_after(loader, 2)
    with pytest.warns(UserWarning, match="left out"):
        following = list(loader)
    assert first["batch_in_epoch"] == 2
    assert len(following) == 6
    assert isinstance(loader.sampler, Hidden)
