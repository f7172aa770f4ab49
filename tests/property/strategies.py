"""Generated geometries of a run, and the count of how many were tried."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hypothesis import strategies as st
from support_law import Batched, Noted, noted

from resumable_data import ResumableLoader

#: What was tried in this process: label -> the distinct generated cases. conftest.py prints how many.
TRIED: dict[str, set[object]] = {}


def tried(label, *case):
    """Note a generated case that held."""
    TRIED.setdefault(label, set()).add(case)


def examples(count):
    """This many in CI, ten times as many in the nightly profile."""
    return count * (10 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1)


@dataclass(frozen=True)
class Geometry:
    """Everything that decides what a run delivers."""

    n: int
    batch_size: int
    num_replicas: int
    drop_last: bool
    shuffle: bool
    seeding: str
    seed: int
    batched: bool

    def loader(self, rank, *, num_workers=0, persistent_workers=False):
        return ResumableLoader(
            Batched(self.n) if self.batched else Noted(self.n),
            self.batch_size,
            shuffle=self.shuffle,
            collate_fn=noted,
            drop_last=self.drop_last,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            seed=self.seed,
            num_replicas=self.num_replicas,
            rank=rank,
            seeding=self.seeding,
        )

    @property
    def ranks(self):
        return range(self.num_replicas)

    @property
    def batches(self):
        """Written here once more, to be compared with the loader's own."""
        if self.drop_last:
            return self.n // (self.num_replicas * self.batch_size)
        per_rank = (self.n + self.num_replicas - 1) // self.num_replicas
        return (per_rank + self.batch_size - 1) // self.batch_size


@st.composite
def geometries(draw, max_n=60, max_replicas=4, seedings=("batch", "sample")):
    shuffle = draw(st.booleans())
    # torch's own argument check refuses to shuffle nothing
    n = draw(st.integers(1 if shuffle else 0, max_n))
    seeding = draw(st.sampled_from(seedings))
    return Geometry(
        n=n,
        batch_size=draw(st.integers(1, 9)),
        num_replicas=draw(st.integers(1, max_replicas)),
        drop_last=draw(st.booleans()),
        shuffle=shuffle,
        seeding=seeding,
        seed=draw(st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))),
        batched=seeding == "batch" and draw(st.booleans()),
    )


#: Fractions of what is left at which a run is stopped, one stop after another.
chains = st.lists(st.floats(0, 1), min_size=1, max_size=4)
