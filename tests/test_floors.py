"""The package's floors, held against its imports: arrows go down only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "resumable_data"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
MAX_LINES = 400

# Lowest floor first. Within a floor a module imports only from the modules listed before it. The package's
# own __init__ is PACKAGE, a subpackage's is the subpackage's name. Not every listed module exists already.
FLOORS: list[list[str]] = [
    ["errors", "state", "splitmix", "plan", "cursor"],
    [
        "permutation",
        "sampling",
        "bucketing",
        "schedule",
        "mixture",
        "encoding",
        "progress",
        "mersenne",
        "seeding",
        "reseeders",
        "draws",
        "sampled",
        "orders",
        "rng_values",
        "rng_streams",
        "rng",
    ],
    [
        "fetch",
        "engines",
        "deals",
        "dealing",
        "dealers",
        "options",
        "resume",
        "notices",
        "passes",
        "run",
        "views",
        "wrap",
        "attributes",
        "loader",
    ],
    [
        "checkpoint.limits",
        "checkpoint.saveable",
        "checkpoint.temps",
        "checkpoint.fsops",
        "checkpoint.sink",
        "checkpoint.atomic",
        "checkpoint.layout",
        "checkpoint.sharding",
        "checkpoint.standins",
        "checkpoint.calls",
        "checkpoint.opcodes",
        "checkpoint.archive",
        "checkpoint.survey",
        "checkpoint.unpack",
        "checkpoint.files",
        "checkpoint.gate",
        "checkpoint.arguments",
        "checkpoint.lock",
        "checkpoint.mismatch",
        "checkpoint.models",
        "checkpoint.undo",
        "checkpoint.slots",
        "checkpoint.optimizers",
        "checkpoint.schedulers",
        "checkpoint.config",
        "checkpoint.schema",
        "checkpoint.steps",
        "checkpoint.payload",
        "checkpoint.committing",
        "checkpoint.store",
        "checkpoint.retention",
        "checkpoint.pruning",
        "checkpoint.staging",
        "checkpoint.background",
        "checkpoint.writer",
        "checkpoint.session",
        "checkpoint.transfer",
        "checkpoint.distributed",
        "checkpoint.manager",
        "checkpoint",
    ],
    [
        "preemption",
        "testing",
        PACKAGE,
        "integrations",
        "demo.digits",
        "demo.train",
        "demo.usual",
        "demo.kills",
        "demo.child",
        "demo.process",
        "demo.lanes",
        "demo.verdict",
        "demo.draw",
        "demo.screen",
        "demo.drive",
        "demo",
        "cli",
    ],
]
# Durability stores any object with a state_dict; it knows no loader.
BARRED: dict[int, set[int]] = {3: {2}}
# What a floor may import from outside, besides the standard library; None: anything.
OUTSIDE: list[set[str] | None] = [
    set(),
    {"numpy", "torch"},
    {"numpy", "torch", "torchdata"},
    {"numpy", "torch"},
    None,
]
# Floors that know nothing of loaders, and the modules among theirs that may name torch's samplers.
NO_LOADERS = {1, 3}
SAMPLERS_ALLOWED = {"bucketing", "draws", "mixture", "orders"}

# What a module may import besides, inside a try: it does without where it is not installed.
OPTIONAL = {("progress", "tqdm")}
PLACE = {name: (floor, place) for floor, names in enumerate(FLOORS) for place, name in enumerate(names)}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


def read_tree(root: Path) -> dict[str, str]:
    """Module name relative to the package (``"checkpoint.atomic"``) -> source."""
    tree = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree[name or PACKAGE] = path.read_text(encoding="utf-8")
    return tree


def is_package(name: str, tree: Mapping[str, str]) -> bool:
    return name == PACKAGE or any(other.startswith(f"{name}.") for other in tree)


def absolute(name: str, tree: Mapping[str, str], node: ast.ImportFrom) -> str:
    """The full dotted name that a ``from`` import reads from, relative ones resolved."""
    if not node.level:
        return node.module or ""
    here = PACKAGE.split(".") + ([] if name == PACKAGE else name.split("."))
    up = node.level - (1 if is_package(name, tree) else 0)
    base = here[: len(here) - up]
    return ".".join(base + ([node.module] if node.module else []))


def imports(name: str, tree: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(tree[name])):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = absolute(name, tree, node)
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def target(full: str, tree: Mapping[str, str]) -> str | None:
    """The module of the package that a full dotted name stands for or in; None for an outside name."""
    if full.split(".")[0] != PACKAGE:
        return None
    inner = full.removeprefix(PACKAGE).removeprefix(".")
    while inner and inner not in tree and inner not in PLACE:
        inner = inner.rpartition(".")[0]
    return inner or PACKAGE


# ── the rules: each yields complaints ────────────────────────────────────────────────────────────────


def unlisted(tree: Mapping[str, str]) -> Iterator[str]:
    for name in tree:
        if name not in PLACE:
            yield f"{name}: in no floor; enter it in FLOORS"


def upward(tree: Mapping[str, str]) -> Iterator[str]:
    for name in tree:
        if name not in PLACE:
            continue
        for line, full in imports(name, tree):
            other = target(full, tree)
            if other is None or other == name or other not in PLACE:
                continue
            if PLACE[other] > PLACE[name]:
                yield f"{name}:{line}: imports {other}, which stands above it"
            elif PLACE[other][0] in BARRED.get(PLACE[name][0], set()):
                yield f"{name}:{line}: imports {other}, of a floor that is barred to it"


def outside(tree: Mapping[str, str]) -> Iterator[str]:
    for name in tree:
        allowed = OUTSIDE[PLACE[name][0]] if name in PLACE else None
        if allowed is None:
            continue
        for line, full in imports(name, tree):
            top = full.split(".")[0]
            if (name, top) in OPTIONAL:
                continue
            if top != PACKAGE and top not in sys.stdlib_module_names and top not in allowed:
                yield f"{name}:{line}: imports {top}; its floor may import {sorted(allowed) or 'nothing'}"


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, "" for anything else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def loaders(tree: Mapping[str, str]) -> Iterator[str]:
    """torch.utils.data where loaders are unknown; samplers are orders, and allowed to those."""
    for name in tree:
        if name not in PLACE or PLACE[name][0] not in NO_LOADERS:
            continue
        attributes = [
            (node.lineno, dotted(node))
            for node in ast.walk(ast.parse(tree[name]))
            if isinstance(node, ast.Attribute)
        ]
        for line, full in [*imports(name, tree), *attributes]:
            if full != "torch.utils.data" and not full.startswith("torch.utils.data."):
                continue
            if name in SAMPLERS_ALLOWED and full.endswith(("Sampler", "Dataset")):
                continue
            if name in SAMPLERS_ALLOWED and any(
                longer.startswith(f"{full}.") and longer.endswith("Sampler") for _, longer in attributes
            ):
                continue  # the inner part of an attribute chain that ends in a sampler
            yield f"{name}:{line}: uses {full}; its floor knows nothing of loaders"


def cycles(tree: Mapping[str, str]) -> Iterator[str]:
    arrows = {
        name: {other for _, full in imports(name, tree) if (other := target(full, tree)) in tree} - {name}
        for name in tree
    }
    for begin in arrows:
        reached: set[str] = set()
        todo = list(arrows[begin])
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                todo.extend(arrows[name])
        if begin in reached:
            yield f"{begin}: imports itself in a circle"


def too_long(tree: Mapping[str, str]) -> Iterator[str]:
    for name, source in tree.items():
        lines = len(source.splitlines())
        if lines > MAX_LINES:
            yield f"{name}: {lines} lines, at most {MAX_LINES}"


def asserts(tree: Mapping[str, str]) -> Iterator[str]:
    for name, source in tree.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assert):
                yield f"{name}:{node.lineno}: assert vanishes under -O; raise an error"


def undocumented(tree: Mapping[str, str]) -> Iterator[str]:
    for name, source in tree.items():
        module = ast.parse(source)
        if source.strip() and not ast.get_docstring(module):
            yield f"{name}: no docstring"
        yield from (f"{name}:{line}: {what} has no docstring" for line, what in bare(module.body))


def bare(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[int, str]]:
    """Public functions and classes without a docstring, methods of public classes included."""
    for node in body:
        if not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from bare(node.body, f"{prefix}{node.name}.")
        elif any(dotted(mark).endswith(("overload", ".setter", ".deleter")) for mark in node.decorator_list):
            continue  # documented at the implementation, or at the property itself
        if not ast.get_docstring(node):
            yield node.lineno, f"{prefix}{node.name}"


RULES = [unlisted, upward, outside, loaders, cycles, too_long, asserts, undocumented]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule):
    tree = read_tree(ROOT)
    assert "errors" in tree
    assert list(rule(tree)) == []


def test_no_module_is_listed_twice():
    names = [name for floor in FLOORS for name in floor]
    assert len(names) == len(set(names)) == len(PLACE)
    assert len(OUTSIDE) == len(FLOORS)


# ── negative controls: a small tree that breaks one rule, and the complaint ──────────────────────────

BROKEN = {
    "module in no list": (unlisted, {"helpers": ""}, "helpers: in no floor"),
    "import of a higher floor": (upward, {"plan": "from resumable_data import loader"}, "imports loader"),
    "import of a name from above": (
        upward,
        {"plan": "from resumable_data.loader import ResumableLoader"},
        "imports loader",
    ),
    "import by full name": (upward, {"plan": "import resumable_data.loader"}, "imports loader"),
    "later module of the same floor": (upward, {"errors": "from .state import LoaderState"}, "imports state"),
    "lazy import": (upward, {"rng": "def f():\n    from . import engines"}, "imports engines"),
    "import for types only": (
        upward,
        {"rng": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .loader import Any"},
        "imports loader",
    ),
    "public names from below": (upward, {"loader": "import resumable_data"}, f"imports {PACKAGE}"),
    "the loader from durability": (
        upward,
        {"checkpoint": "", "checkpoint.manager": "from ..loader import ResumableLoader"},
        "barred",
    ),
    "relative import in a subpackage": (
        upward,
        {"checkpoint": "", "checkpoint.atomic": "from .manager import CheckpointManager"},
        "imports checkpoint.manager",
    ),
    "subpackage's __init__ from inside": (
        upward,
        {"checkpoint": "", "checkpoint.atomic": "from . import CheckpointManager"},
        "imports checkpoint, which",
    ),
    "torch on the lowest floor": (outside, {"state": "def f():\n    import torch"}, "imports torch"),
    "an extra on floor 1": (outside, {"rng": "import scipy.stats"}, "imports scipy"),
    "torchdata in durability": (outside, {"checkpoint.gate": "import torchdata"}, "imports torchdata"),
    "a loader on floor 1": (
        loaders,
        {"orders": "from torch.utils.data import DataLoader, RandomSampler"},
        "uses torch.utils.data.DataLoader",
    ),
    "a loader by attribute": (
        loaders,
        {"checkpoint.payload": "import torch\nx = torch.utils.data.Dataset"},
        "uses torch.utils.data",
    ),
    "a sampler where none belongs": (
        loaders,
        {"rng": "from torch.utils.data import RandomSampler"},
        "uses torch.utils.data.RandomSampler",
    ),
    "circle of two": (
        cycles,
        {"errors": "from .state import x", "state": "def f():\n    from .errors import y"},
        "errors: imports itself in a circle",
    ),
    "401 lines": (too_long, {"plan": "x = 1\n" * 401}, "plan: 401 lines"),
    "assert": (asserts, {"plan": "def f(x):\n    assert x > 0"}, "plan:2: assert"),
    "module without docstring": (undocumented, {"plan": "x = 1"}, "plan: no docstring"),
    "function without docstring": (undocumented, {"plan": '"""D."""\ndef f(): ...'}, "plan:2: f has"),
    "method without docstring": (
        undocumented,
        {"plan": '"""D."""\nclass C:\n    """D."""\n    def f(self): ...'},
        "C.f has no docstring",
    ),
}


@pytest.mark.parametrize(("rule", "tree", "complaint"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_tree_is_seen(rule, tree, complaint):
    found = list(rule(tree))
    assert found
    assert all(complaint in line for line in found[:1]), found


def test_every_rule_has_a_negative_control():
    assert {rule for rule, _, _ in BROKEN.values()} == set(RULES)


SOUND = {
    PACKAGE: '"""D."""\nfrom .loader import ResumableLoader',
    "errors": '"""D."""',
    "state": '"""D."""\nfrom .errors import StateError\nimport json',
    "orders": '"""D."""\nfrom torch.utils.data import DistributedSampler\nx = torch.utils.data.RandomSampler',
    "loader": '"""D."""\nfrom resumable_data.orders import x\nimport torchdata',
    "checkpoint": '"""D."""\nfrom .atomic import save',
    "checkpoint.atomic": '"""D."""\nfrom ..errors import CheckpointError\nfrom resumable_data import rng',
    "demo.train": '"""D."""\nfrom resumable_data import ResumableLoader\nimport sklearn',
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sound_tree_is_left_in_peace(rule):
    assert list(rule(SOUND)) == []
