"""Build the wheel, unpack it elsewhere, and import it from there with this interpreter's torch.

The tests run on the checkout; this catches what only a wheel can lack: a module, ``py.typed``, the
command's entry point.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

PROBE = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import resumable_data
home = pathlib.Path(resumable_data.__file__).parent
if home != pathlib.Path(sys.argv[1], "resumable_data"):
    sys.exit(f"imported {home}, expected the wheel's copy under {sys.argv[1]}")
for name in resumable_data.__all__:
    getattr(resumable_data, name)
print(f"imported {len(resumable_data.__all__)} public names from the wheel")
"""


def run(*command: str | Path, cwd: str | None = None) -> None:
    """One child process; its output is ours, its failure ends this script."""
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)  # noqa: S603 - our own commands


def build(into: str) -> Path:
    """The wheel of this checkout."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-c", CONSTRAINTS)
    run(*pip, "-w", into, ROOT)
    (wheel,) = Path(into).glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> int:
    """The number of package files in the wheel; exits where one of the checkout's is not among them."""
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
        tables = [archive.read(name).decode() for name in held if name.endswith("/entry_points.txt")]
    wanted = {"resumable_data/py.typed"}
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "resumable_data").rglob("*.py")}
    if missing := wanted - set(held):
        sys.exit(f"{wheel.name} lacks {sorted(missing)}")
    if not any("resumable-data = resumable_data.cli:main" in table for table in tables):
        sys.exit(f"{wheel.name} lacks the resumable-data command")
    return len(wanted)


def main() -> None:
    """Exit 0 where the wheel holds every module and imports."""
    with tempfile.TemporaryDirectory() as work:
        wheel = build(work)
        count = check_contents(wheel)
        target = Path(work, "unpacked").resolve()
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-c", CONSTRAINTS)
        run(*pip, "--target", target, wheel)
        # -I: neither PYTHONPATH nor the working directory may bring the checkout in.
        run(sys.executable, "-I", "-c", PROBE, target, cwd=work)
        print(f"{wheel.name}: {count} files")


if __name__ == "__main__":
    main()
