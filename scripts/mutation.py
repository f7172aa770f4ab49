"""A safeguard taken away, by replacing text, and short names for the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "resumable_data/checkpoint"


@dataclass(frozen=True)
class Mutation:
    """A safeguard taken away.

    Attributes:
        name: What is missing.
        file: Where, in the checkpoint package.
        edits: Texts, each there exactly once, and what stands in their place.
        tests: What pytest is given; one of them must fail.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """The file, relative to the root."""
        return f"{PACKAGE}/{self.file}"

    def applied(self, source: str) -> str:
        """The file's text without the safeguard.

        Raises:
            ValueError: A text to replace is not there, or more than once.
        """
        for old, new in self.edits:
            count = source.count(old)
            if count != 1:
                raise ValueError(f"{self.name}: {self.path} has {count} times, expected once:\n{old}")
            source = source.replace(old, new)
        return source


def cut(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    """One text replaced."""
    return Mutation(name, file, ((old, new),), tests)


def power_cut(scene: str, layout: str = "single") -> str:
    """The simulated power cuts after each call of a scene."""
    return f"tests/crash/test_simulated_crashes.py::test_a_power_cut_after_any_call[{scene}-{layout}]"


def checkpoint(file: str, test: str = "") -> str:
    """A test of the checkpoints, or a file of them."""
    return f"tests/checkpoint/test_{file}.py" + (f"::test_{test}" if test else "")


def crash(file: str, test: str) -> str:
    """A test of crashes."""
    return f"tests/crash/test_{file}.py::test_{test}"
