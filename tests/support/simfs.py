"""A file system that forgets: what a directory may look like after a crash at any moment of a save.

`SimFS` performs every call on a real directory and writes it down. From the record it computes what a power
cut after call N may leave, by the rules that POSIX gives and no more: the bytes of a file are safe up to its
last fsync, the names in a directory up to the last fsync of that directory. Of everything later any part may
have reached the disk: each creation, rename and deletion by itself, in any order, and of a file's bytes any
sectors, the rest being as before, or zeros where the file has grown.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from resumable_data.checkpoint.fsops import FsOps

SECTOR = 512  # bytes; what a disk writes whole or not at all
EXHAUSTIVE = 1 << 10  # all combinations are tried up to this number: ten effects that happened or did not
SAMPLES = 200  # of them, where there are more
_BOOT = re.compile(r"(\.[0-9a-f]{8}-)[0-9a-f]{8}(-\d+-\d+-[0-9a-f]{12}\.tmp)")
_MODELLED = {
    "open", "write", "fsync", "close", "rename", "unlink", "listdir", "dirsync", "mkdir", "rmdir",
    "writeback",  # a hint: of what it does nothing is promised
}  # fmt: skip

State = dict[str, bytes | None]  # path -> content, None for a directory


@dataclass(frozen=True)
class Op:
    """One call that changed something: on the bytes of a node, or on the names in a directory."""

    kind: str
    node: int
    place: tuple[int, str] = (0, "")  # directory and name
    target: tuple[int, str] = (0, "")  # of a rename
    offset: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class Crash:
    """What one crash may leave.

    Attributes:
        at: How many calls were done.
        reached: The marks set before it.
        state: The directory's content.
        in_order: The changes of names that survived are the first so many of all.
    """

    at: int
    reached: frozenset[str]
    state: State
    in_order: bool


class SimFS(FsOps):
    """The real calls, on record.

    Args:
        root: The directory that is watched; what is in it now counts as safe.
        blind: Calls that are performed but not recorded, as if the protocol did not have them: a name for
            all of its calls, (name, n) for the n-th from 0.
    """

    def __init__(self, root, *, blind=()):
        unknown = {name for name in dir(FsOps) if not name.startswith("_")} - _MODELLED
        if unknown:
            raise NotImplementedError(f"SimFS does not model {sorted(unknown)}")
        self.root = Path(root)
        self.ops: list[Op] = []
        self.marks: list[tuple[int, str]] = []
        self._blind = set(blind)
        self.counts: Counter[str] = Counter()
        self._guard = threading.RLock()  # a protocol may sync in one thread and write in another
        self._next = itertools.count(1)
        self._tree: dict[int, dict[str, int]] = {}
        self._base: dict[int, bytes] = {}
        self._open: dict[int, int] = {}
        self._scan(self.root, 0)
        self._start = {node: dict(names) for node, names in self._tree.items()}

    def _scan(self, path, node):
        self._tree[node] = {}
        for child in sorted(path.iterdir()):
            number = self._tree[node][child.name] = next(self._next)
            if child.is_dir():
                self._scan(child, number)
            else:
                self._base[number] = child.read_bytes()

    def mark(self, name):
        """Name this moment: what the caller was told has happened."""
        self.marks.append((len(self.ops), name))

    # ── the calls ────────────────────────────────────────────────────────────────────────────────────

    def _place(self, path):
        *above, name = Path(path).relative_to(self.root).parts
        node = 0
        for part in above:
            node = self._tree[node][part]
        return node, name

    def _node(self, path):
        if Path(path) == self.root:
            return 0
        directory, name = self._place(path)
        return self._tree[directory].get(name)

    def _record(self, name, op):
        if not {name, (name, self.counts[name])} & self._blind:
            self.ops.append(op)
        self.counts[name] += 1

    def open(self, path, flags, mode=0o666):
        with self._guard:
            fd = super().open(path, flags, mode)
            node = self._node(path)
            if node is None:
                place = self._place(path)
                node = self._tree[place[0]][place[1]] = next(self._next)
                self._record("open", Op("create", node, place))
            elif flags & os.O_TRUNC:
                raise NotImplementedError("SimFS does not model O_TRUNC")
            self._open[fd] = node
            return fd

    def write(self, fd, data):
        with self._guard:
            count = super().write(fd, data)
            offset = os.lseek(fd, 0, os.SEEK_CUR) - count
            self._record("write", Op("write", self._open[fd], offset=offset, data=bytes(data[:count])))
            return count

    def fsync(self, fd):
        with self._guard:
            super().fsync(fd)
            self._record("fsync", Op("fsync", self._open[fd]))

    def close(self, fd):
        with self._guard:
            super().close(fd)
            self._open.pop(fd)

    def rename(self, source, target):
        with self._guard:
            super().rename(source, target)
            place, goal = self._place(source), self._place(target)
            node = self._tree[place[0]].pop(place[1])
            self._tree[goal[0]][goal[1]] = node
            self._record("rename", Op("rename", node, place, goal))

    def _removed(self, kind, path):
        place = self._place(path)
        self._record(kind, Op("remove", self._tree[place[0]].pop(place[1]), place))

    def unlink(self, path):
        with self._guard:
            super().unlink(path)
            self._removed("unlink", path)

    def rmdir(self, path):
        with self._guard:
            super().rmdir(path)
            self._removed("rmdir", path)

    def mkdir(self, path):
        with self._guard:
            super().mkdir(path)
            place = self._place(path)
            node = self._tree[place[0]][place[1]] = next(self._next)
            self._tree[node] = {}
            self._record("mkdir", Op("mkdir", node, place))

    def dirsync(self, path):
        with self._guard:
            super().dirsync(path)
            if Path(path) == self.root or self.root in Path(path).parents:
                self._record("dirsync", Op("dirsync", self._node(path)))

    # ── what a crash leaves ──────────────────────────────────────────────────────────────────────────

    def performed(self, at=None):
        """The directory with every call up to `at` done in full, as a killed process leaves it."""
        disk = _Disk(self._start, self._base)
        for op in self.ops[:at]:
            disk.take(op)
        return disk.state(disk.names, {node: disk.whole(node) for node in disk.writes})

    def killed(self):
        """A crash of the process alone after every call, and in the midst of every write."""
        for at in range(len(self.ops) + 1):
            yield Crash(at, self._reached(at), self.performed(at), True)
            if at < len(self.ops) and self.ops[at].kind == "write":
                disk = _Disk(self._start, self._base)
                for op in self.ops[:at]:
                    disk.take(op)
                op = self.ops[at]
                disk.take(Op("write", op.node, offset=op.offset, data=op.data[: len(op.data) // 2]))
                state = disk.state(disk.names, {node: disk.whole(node) for node in disk.writes})
                yield Crash(at, self._reached(at), state, True)

    def crashes(self, seed=0):
        """Every crash of the machine, each state once for the same marks reached."""
        draw = random.Random(seed)
        disk = _Disk(self._start, self._base)
        seen = set()
        for at in range(len(self.ops) + 1):
            if at:
                disk.take(self.ops[at - 1])
            reached = self._reached(at)
            for state, in_order in disk.survivors(draw):
                key = (reached, in_order, _identity(state))
                if key not in seen:
                    seen.add(key)
                    yield Crash(at, reached, state, in_order)

    def _reached(self, at):
        return frozenset(name for position, name in self.marks if position <= at)


class _Disk:
    """What is safe, and what is under way to the disk."""

    def __init__(self, tree, base):
        self.safe = {node: dict(names) for node, names in tree.items()}
        self.data = dict(base)
        self.names: list[Op] = []
        self.writes: dict[int, list[Op]] = {}

    def take(self, op):
        if op.kind == "write":
            self.writes.setdefault(op.node, []).append(op)
        elif op.kind == "fsync":
            self.data[op.node] = self.whole(op.node)
            self.writes.pop(op.node, None)
        elif op.kind == "dirsync":
            _apply(self.safe, [each for each in self.names if each.place[0] == op.node])
            self.names = [each for each in self.names if each.place[0] != op.node]
        else:
            self.names.append(op)
            if op.kind == "create":
                self.data[op.node] = b""
            elif op.kind == "mkdir":
                self.safe[op.node] = {}

    def whole(self, node):
        content = bytearray(self.data[node])
        for op in self.writes.get(node, ()):
            content.extend(bytes(max(0, op.offset - len(content))))
            content[op.offset : op.offset + len(op.data)] = op.data
        return bytes(content)

    def _variants(self, node, draw):
        """What a file with unsynced bytes may hold."""
        before, after = self.data[node], self.whole(node)
        grown = before + bytes(max(0, len(after) - len(before)))
        found = [before, grown, after, after[: len(after) // 2 // SECTOR * SECTOR]]
        for _ in range(2):
            torn = bytearray(grown)
            for start in range(0, len(after), SECTOR):
                if draw.random() < 0.5:
                    torn[start : start + SECTOR] = after[start : start + SECTOR]
            found.append(bytes(torn))
        return list(dict.fromkeys(found))

    def survivors(self, draw):
        """Pairs of a state and whether its names are the first so many changes."""
        nodes = list(self.writes)
        choices = [self._variants(node, draw) for node in nodes]
        size = 2 ** len(self.names)
        for variants in choices:
            size *= len(variants)
        if size <= EXHAUSTIVE:
            picks = itertools.product(*[(False, True)] * len(self.names), *choices)
        else:
            picks = self._sample(choices, draw)
        for pick in picks:
            kept, contents = pick[: len(self.names)], pick[len(self.names) :]
            chosen = [op for op, keep in zip(self.names, kept, strict=True) if keep]
            in_order = chosen == self.names[: len(chosen)]
            yield self.state(chosen, dict(zip(nodes, contents, strict=True))), in_order

    def _sample(self, choices, draw):
        count = len(self.names)
        for length in range(count + 1):
            for place in (0, 2):  # the old bytes, the new bytes
                yield (*(i < length for i in range(count)), *(variants[place] for variants in choices))
        for _ in range(SAMPLES):
            yield (*(draw.random() < 0.5 for _ in range(count)), *map(draw.choice, choices))

    def state(self, names, contents):
        tree = {node: dict(entries) for node, entries in self.safe.items()}
        _apply(tree, names)
        data = self.data | contents
        found: State = {}

        def walk(node, path):
            for name, child in tree[node].items():
                if child in tree:
                    found[path + name] = None
                    walk(child, path + name + "/")
                else:
                    found[path + name] = data[child]

        walk(0, "")
        return found


def _apply(tree, ops):
    """Changes of names, in the order they were made; one whose ground is missing says what it says of itself."""
    for op in ops:
        names = tree[op.place[0]]
        if op.kind in ("create", "mkdir"):
            names[op.place[1]] = op.node
        elif names.get(op.place[1]) == op.node:
            del names[op.place[1]]
        if op.kind == "rename":
            tree[op.target[0]][op.target[1]] = op.node


def _identity(state):
    return frozenset(
        (path, None if data is None else hashlib.sha256(data).digest()) for path, data in state.items()
    )


def materialise(state, directory):
    """Write a state into an empty directory, as the machine finds it after it was started again.

    Temps bear the mark of the boot that wrote them; after a crash it is another one.
    """
    directory.mkdir(parents=True)
    for path, data in sorted(state.items()):
        place = directory / _BOOT.sub(r"\g<1>00000000\g<2>", path)
        if data is None:
            place.mkdir()
        else:
            place.write_bytes(data)


def tree_of(directory):
    """The state that a directory is in."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in directory.rglob("*")
    }
