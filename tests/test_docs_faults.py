"""The rows of docs/reference/faults.md that name a test in full name one that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reference" / "faults.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z]\d+(?:, [A-Z]\d+)*) \| .* \| (.*) \|$", PAGE, re.MULTILINE)


def test_tests_that_rows_name_exist():
    named = [(row, test) for row, cell in ROWS for test in re.findall(r"`([\w/]+\.py::\w+)`", cell)]
    assert len(named) > 40
    for row, test in named:
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / path).read_text(), (row, test)


def test_every_row_about_checkpoints_names_one():
    own = [(row, cell) for row, cell in ROWS if row[0] in "CH"]
    assert len(own) == len(dict(own)) > 60
    assert [row for row, cell in own if "::test_" not in cell] == []
