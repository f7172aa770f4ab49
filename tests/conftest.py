"""Hypothesis profiles, and a line that says how many generated geometries were tried."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# too_slow: an example may start worker processes
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("nightly", max_examples=1000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_FROM_WORKERS: dict[str, int] = {}


def _tried():
    module = sys.modules.get("property.strategies")
    return {} if module is None else {label: len(cases) for label, cases in module.TRIED.items()}


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # under pytest-xdist the counts live in its workers
        session.config.workeroutput["geometries"] = _tried()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for label, count in (getattr(node, "workeroutput", None) or {}).get("geometries", {}).items():
        _FROM_WORKERS[label] = _FROM_WORKERS.get(label, 0) + count


def pytest_terminal_summary(terminalreporter):
    counts = _FROM_WORKERS or _tried()
    if counts:
        terminalreporter.section("generated geometries")
        for label, count in sorted(counts.items()):
            terminalreporter.line(f"{count:6d}  {label}")
        terminalreporter.line(f"{sum(counts.values()):6d}  in all")
