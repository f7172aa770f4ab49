"""What the pages show runs, and where they point there is something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^`\n]*)$")
NO_RUN = re.compile(r"^\s*<!--\s*no-run:\s*(?P<reason>.*?)\s*-->\s*$")
LINK = re.compile(r"!?\[[^\]\n]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(?P<text>.+?)\s*#*$")


class Block(NamedTuple):
    line: int  # of its first line of code, 1-based
    language: str
    code: str
    reason: str | None  # why it is not run; None where it is


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page; a fence that is never closed is an error."""
    found: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if not fence:
            at += 1
            continue
        indent = len(fence["indent"])
        end = at + 1
        while end < len(lines) and lines[end].strip() != fence["ticks"]:
            end += 1
        if end == len(lines):
            raise ValueError(f"line {at + 1}: the fence {lines[at].strip()} is never closed")
        marker = NO_RUN.match(lines[at - 1]) if at else None
        language = (fence["info"].split() or [""])[0]
        code = "\n".join(line[indent:] for line in lines[at + 1 : end])
        found.append(Block(at + 2, language, code, marker["reason"] if marker else None))
        at = end + 1
    return found


def prelude(filters: list[str]) -> str:
    """The suite's own warning filters, as code: ``action[:message[:category]]``, the message a pattern."""
    parts = ["import warnings"]
    for line in filters:
        action, message, category = [*line.split(":"), "", ""][:3]
        parts.append(f"warnings.filterwarnings({action!r}, {message!r}, {category or 'Warning'})")
    return "\n".join(parts)


def program(text: str, page: str) -> str:
    """One script of a page's python blocks, "" for none; tracebacks name the page and its line."""
    parts = []
    for block in blocks(text):
        if block.language == "python" and block.reason is None:
            source = "\n" * (block.line - 1) + block.code
            parts.append(f"exec(compile({source!r}, {page!r}, 'exec'), globals())\n")
    return "".join(parts)


def run(text: str, page: str, work: Path, filters: list[str]) -> subprocess.CompletedProcess[str]:
    """The page in a process of its own, as ``__main__`` of a file, in an empty directory."""
    script = work / "page.py"
    script.write_text(f"{prelude(filters)}\n{program(text, page)}", encoding="utf-8")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=work,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def unfenced(text: str) -> list[str]:
    """The lines of a page outside its fenced blocks."""
    kept, fence = [], ""
    for line in text.splitlines():
        match = FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif match:
            fence = match["ticks"]
        else:
            kept.append(line)
    return kept


def anchors(text: str) -> set[str]:
    """The names that mkdocs and GitHub give to a page's headings."""
    headings = [match["text"] for line in unfenced(text) if (match := HEADING.match(line))]
    bare = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"\s+", "-", heading) for heading in bare}


def leads_nowhere(target: str, page: Path) -> bool:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return False  # another site: not fetched here
    name, _, anchor = target.partition("#")
    there = page.parent / name if name else page
    if not there.exists():
        return True
    return bool(anchor) and anchor not in anchors(there.read_text(encoding="utf-8"))


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere; brackets in code are no links."""
    prose = re.sub(r"`[^`\n]*`", "", "\n".join(unfenced(page.read_text(encoding="utf-8"))))
    return [link["target"] for link in LINK.finditer(prose) if leads_nowhere(link["target"], page)]


@pytest.fixture
def filters(pytestconfig) -> list[str]:
    return pytestconfig.getini("filterwarnings")


def label(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUNNABLE = [page for page in PAGES if program(page.read_text(encoding="utf-8"), "")]


@pytest.mark.parametrize("page", RUNNABLE, ids=label)
def test_python_blocks_run(page, tmp_path, filters):
    done = run(page.read_text(encoding="utf-8"), label(page), tmp_path, filters)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_blocks_name_their_language_and_reasons(page):
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language, f"{label(page)}:{block.line}: name the block's language"
        assert block.language not in {"py", "python3", "pycon"}, f"{label(page)}:{block.line}: write python"
        assert block.reason is None or len(block.reason) > 10, f"{label(page)}:{block.line}: give a reason"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_relative_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_pages_are_found():
    assert {"README.md", "docs/index.md"} <= {label(page) for page in PAGES}
    assert RUNNABLE


# ── the checker itself ───────────────────────────────────────────────────────────────────────────────

PAGE = """# A title: with (signs)

```python
x = [1]
```

<!-- no-run: needs two machines -->
```python
raise SystemExit(3)
```

```console
$ python -c 'raise SystemExit(4)'
```

1. In a list:

    ```python
    x.append(2)
    assert x == [1, 2]
    ```
"""


def test_blocks_share_state_and_marked_ones_are_left_out(tmp_path, filters):
    assert [block.language for block in blocks(PAGE)] == ["python", "python", "console", "python"]
    assert [block.reason for block in blocks(PAGE)] == [None, "needs two machines", None, None]
    done = run(PAGE, "page.md", tmp_path, filters)
    assert done.returncode == 0, done.stderr


def test_a_failing_block_fails_and_names_its_line(tmp_path, filters):
    done = run(PAGE.replace("x == [1, 2]", "x == [1]"), "page.md", tmp_path, filters)
    assert done.returncode != 0
    assert 'File "page.md", line 20' in done.stderr


def test_a_marker_counts_only_right_before_its_block(tmp_path, filters):
    done = run(PAGE.replace("machines -->\n", "machines -->\n\n"), "page.md", tmp_path, filters)
    assert done.returncode == 3


def test_a_warning_fails(tmp_path, filters):
    page = "```python\nimport warnings\nwarnings.warn('old', DeprecationWarning)\n```\n"
    done = run(page, "page.md", tmp_path, filters)
    assert done.returncode != 0
    assert "DeprecationWarning: old" in done.stderr
    assert run(page.replace("'old'", "'set_vital is old'"), "page.md", tmp_path, filters).returncode == 0


def test_an_open_fence_is_an_error():
    with pytest.raises(ValueError, match="line 1: the fence ```python is never closed"):
        blocks("```python\nx = 1\n")


def test_broken_links_are_seen(tmp_path):
    (tmp_path / "there.md").write_text(PAGE)
    page = tmp_path / "here.md"
    page.write_text("""# Here
[a](there.md) [b](there.md#a-title-with-signs) [c](#here) [d](https://example.org/x) `[e](code.md)`
[f](gone.md) [g](there.md#gone) [h](#gone) ![i](gone.png)

```text
[j](code.md)
```
""")
    assert broken_links(page) == ["gone.md", "there.md#gone", "#gone", "gone.png"]
