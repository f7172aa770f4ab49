"""Remove each safeguard of the checkpoints in turn, in a copy, and see that a test fails.

    python scripts/mutate_checkpoints.py [--only WORDS] [--jobs N] [--list]

Each mutation replaces text of the package that must be there exactly once; then the tests named for it run against
the mutated copy. The table says which test failed first. The exit status is 1 where a mutation survives, does not
apply, or where the tests do not pass without any mutation. Nothing in the checkout changes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutation import Mutation
from mutations_of_content import CONTENT
from mutations_of_reading import READING
from mutations_of_writing import WRITING

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300  # seconds for the tests of one mutation: one that hangs has been noticed, too
COPIED = ("resumable_data", "tests", "pyproject.toml")
LINKED = ("docs", "README.md", "CHANGELOG.md", "mkdocs.yml", "scripts", "benchmarks", "Makefile")
MUTATIONS = WRITING + READING + CONTENT


def copied(into: Path) -> Path:
    """A copy of package and tests, with links to the rest."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, into / name)
    for name in LINKED:
        if (ROOT / name).exists():
            (into / name).symlink_to(ROOT / name)
    return into


def python(home: Path, *arguments: str, limit: int | None = LIMIT) -> tuple[int, str]:
    """Exit status and output of an interpreter that imports the copy; status -1 where it took too long."""
    path = os.pathsep.join((str(home), str(home / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, our own tests
            [sys.executable, *arguments],
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return -1, str(error)
    return done.returncode, done.stdout


def examined(home: Path, tests: tuple[str, ...], limit: int | None) -> tuple[int, str]:
    """Status and output of pytest, up to the first failure."""
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    return python(home, "-m", "pytest", *options, *tests, limit=limit)


def outcome(mutation: Mutation) -> tuple[bool, str]:
    """Whether a mutation was noticed, and by which test."""
    with tempfile.TemporaryDirectory() as place:
        home = copied(Path(place))
        target = home / mutation.path
        try:
            target.write_text(mutation.applied(target.read_text()))
        except ValueError as error:
            return False, f"DOES NOT APPLY: {error}"
        status, output = examined(home, mutation.tests, LIMIT)
    if status == -1:
        return True, f"hangs for more than {LIMIT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", output, re.MULTILINE)
    if status == 1 and failed:
        return True, failed[1].removeprefix("tests/")
    return False, "SURVIVES" if status == 0 else f"NO TEST RAN (status {status}): {output[-500:]}"


def baseline(mutations: list[Mutation]) -> str:
    """What is wrong with the tests before anything is mutated; empty where nothing is."""
    tests = tuple(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    whole = {test for test in tests if "::" not in test}
    rest = tuple(test for test in tests if test in whole or test.split("::")[0] not in whole)
    with tempfile.TemporaryDirectory() as place:
        home = copied(Path(place))
        _, where = python(home, "-c", "import resumable_data; print(resumable_data.__file__)")
        if Path(where.strip()) != home / "resumable_data" / "__init__.py":
            return f"the copy is not what is imported, but {where}"
        status, output = examined(home, rest, None)
    return "" if status == 0 else output[-3000:]


def run(mutations: list[Mutation], jobs: int) -> Iterator[tuple[Mutation, bool, str]]:
    """Every mutation with its outcome, in their order."""
    with ThreadPoolExecutor(jobs) as pool:
        for mutation, (noticed, by) in zip(mutations, pool.map(outcome, mutations), strict=True):
            yield mutation, noticed, by


def main() -> int:
    """Run what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(description="Remove each safeguard in turn; a test must fail.")
    parser.add_argument("--only", default="", help="mutations whose name or file contains this")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="name them, run nothing")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.only in m.name or options.only in m.file]
    if options.list:
        print("\n".join(f"{mutation.file}: {mutation.name}" for mutation in chosen))
        return 0
    wrong = baseline(chosen)
    if wrong:
        print(f"the tests fail without any mutation:\n{wrong}")
        return 1
    print("| mutation | file | killed by |\n|---|---|---|", flush=True)
    bad = 0
    for mutation, noticed, by in run(chosen, options.jobs):
        bad += not noticed
        print(f"| {mutation.name} | {mutation.file} | {by} |", flush=True)
    print(f"\n{len(chosen)} mutations, {len(chosen) - bad} killed, {bad} not")
    return 1 if bad or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
