"""What the pages quote is what is there: files word for word, the README's diff, its transcript."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_docs_snippets import PAGES, ROOT, blocks, label

FIRST_RUN = ROOT / "docs" / "tutorial" / "first_run.py"
QUOTED = re.compile(r"it is (?P<path>\S+) word for word")


def quotes(text: str) -> list[tuple[str, str]]:
    """(path in the repository, quoted code) of every block that says it is a file."""
    found = [(QUOTED.match(block.reason or ""), block.code) for block in blocks(text)]
    return [(match["path"], code) for match, code in found if match]


def differing(text: str) -> list[str]:
    return [path for path, code in quotes(text) if code.strip() != (ROOT / path).read_text().strip()]


def sides(diff: str) -> tuple[str, str]:
    """The code before and after a diff whose lines begin with "-", "+" or " "."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-")  # type: ignore[return-value]  # two, by construction


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_quoted_files_are_the_files(page):
    text = page.read_text(encoding="utf-8")
    assert differing(text) == [], "copy the file into the page's block"


def test_the_tutorial_quotes_its_program():
    page = ROOT / "docs" / "tutorial" / "first-run.md"
    paths = [path for path, _ in quotes(page.read_text(encoding="utf-8"))]
    assert FIRST_RUN.relative_to(ROOT).as_posix() in paths


def test_a_quote_that_drifted_is_seen():
    page = "<!-- no-run: it is {path} word for word, which is run -->\n```python\n{code}\n```\n"
    path, code = FIRST_RUN.relative_to(ROOT).as_posix(), FIRST_RUN.read_text().strip()
    assert differing(page.format(path=path, code=code)) == []
    assert differing(page.format(path=path, code=code.replace("4000", "4001"))) == [path]


def test_both_sides_of_the_readme_diff_run(tmp_path):
    page = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    (diff,) = [block.code for block in page if block.language == "diff"]
    around = """
import torch
from torch.utils.data import TensorDataset
dataset = TensorDataset(torch.arange(64.0).reshape(-1, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
seen = 0
def train_on(batch):
    global seen
    seen += len(batch[0])
    optimizer.zero_grad(); model(batch[0]).sum().backward(); optimizer.step()
for code in {sides}:
    exec(code, globals())
    print(seen)
"""
    done = run(["-c", around.format(sides=sides(diff))], tmp_path)
    assert done.stdout.split() == [str(64 * 10), str(2 * 64 * 10)]  # 64 samples, 10 epochs, both sides
    assert (tmp_path / "runs" / "first" / "latest.json").exists()


def run(arguments: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=work,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def kill_once_it_saved(arguments: list[str], work: Path, directory: Path, least: int) -> None:
    """Start the program, SIGKILL it when it has committed a checkpoint of step `least` or later."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=work, env=environment(), stdout=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 120
        while not any(int(path.stem[5:17]) >= least for path in directory.glob("step_*.pt")):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < end, "it never saved"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL


def test_the_tutorial_run_is_the_same_when_killed(tmp_path):
    # the program itself, with fewer epochs
    program = (
        f"import sys; sys.path.insert(0, {str(FIRST_RUN.parent)!r}); import first_run; first_run.EPOCHS = 3"
    )
    killed = f"{program}; first_run.main('killed')"
    kill_once_it_saved(["-c", killed], tmp_path, tmp_path / "killed", 100)
    done = run(["-c", f"{killed}; first_run.main('whole')"], tmp_path)
    resumed, of_killed, of_whole = done.stdout.splitlines()
    assert resumed.startswith("resumed after step ")
    assert of_killed == of_whole
