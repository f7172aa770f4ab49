"""The script that cuts the power of a real file system, where there is a root to run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("power_cut.py")
CANNOT = 77


def cuts(number):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cuts", str(number)],
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["cut"], line["layout"]) for line in found] == [
        (cut, layout)
        for cut in ("after save returned", "at random", "without syncs")
        for layout in ("single", "sharded")
    ]
    for line in found:
        assert sum(line["outcomes"].values()) == number


def test_what_save_promised_survives_a_power_cut():
    cuts(8)


@pytest.mark.nightly
def test_what_save_promised_survives_power_cuts_all_night():
    cuts(200)
