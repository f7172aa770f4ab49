"""The fixtures ``fresh``, ``newborn`` and ``crew``: a test module names this one in ``pytest_plugins``."""

from __future__ import annotations

import pytest

from support.fresh import Fresh

#: Crews of workers: CI's two, and the full grid.
CI_CREWS = [{"num_workers": 0}, {"num_workers": 2}]
GRID = [
    {"num_workers": workers, "persistent_workers": persistent, "multiprocessing_context": start}
    for workers in (1, 2, 4)
    for persistent in (False, True)
    for start in ("fork", "spawn")
]


@pytest.fixture(scope="session")
def fresh():
    caller = Fresh()
    yield caller
    caller.close()


@pytest.fixture
def newborn():
    """As ``fresh``, in an interpreter that served nothing before."""
    caller = Fresh()
    yield caller
    caller.close()


def _label(crew):
    start, persistent = crew.get("multiprocessing_context", ""), crew.get("persistent_workers", False)
    return "-".join(
        [f"workers{crew['num_workers']}", *filter(None, [start, "persistent" if persistent else ""])]
    )


@pytest.fixture(
    params=[*CI_CREWS, *(pytest.param(crew, marks=pytest.mark.nightly) for crew in GRID)], ids=_label
)
def crew(request):
    """Arguments on worker processes; every row is tested with each."""
    return request.param
