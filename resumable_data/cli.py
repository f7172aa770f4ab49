"""The command line: ``resumable-data demo``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

_EXTRAS = {
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "rich": "rich",
}  # what the demonstration needs


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: The arguments; None: those of the process.

    Returns:
        The exit status. ``demo``: 0 if the killed run is the uninterrupted one, 1 if it is not, 2 if the
        demonstration could not be run, 130 if it was interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="resumable-data", description="Training runs that survive being killed."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    options = parser.parse_args(argv)
    status: int = options.run(options)
    return status


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="kill a training run again and again, and compare it with one that was never killed",
        description="Train on 1,437 images of digits, kill the training again and again, compare every loss "
        "and the weights with a run that was never killed, and show what the usual recipe makes of it.",
    )
    demo.add_argument("--out", default="demo-output", help="directory for the runs and the picture")
    demo.add_argument("--seed", type=int, default=0, help="seed of the kills")
    demo.add_argument("--kills", type=_at_least_one, default=None, help="how many (default: 8, quick: 3)")
    demo.add_argument("--quick", action="store_true", help="three epochs instead of nine")
    demo.set_defaults(run=_demo)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def _demo(options: argparse.Namespace) -> int:
    missing = [name for module, name in _EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return _refuse(f"the demonstration needs {', '.join(missing)}: pip install 'resumable-data[demo]'")
    from resumable_data.demo.drive import run_demo
    from resumable_data.demo.process import ChildError

    try:
        return run_demo(options.out, seed=options.seed, kills=options.kills, quick=options.quick)
    except (ChildError, OSError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130


def _refuse(message: str) -> int:
    print(f"resumable-data: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
