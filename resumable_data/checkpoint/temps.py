"""Names of temporary files: each says who is writing it, so that the debris of the dead can be told apart.

``.<target>.<host>-<boot>-<pid>-<start>-<random>.tmp``: host and pid namespace, boot, process id and the
process's start time. The last two together name one process of one boot, also after the id was given anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

_TEMP = re.compile(
    r"\.(?P<target>.+)\.(?P<host>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{12}\.tmp"
)
_LONGEST_TARGET = 120  # bytes; with the rest of the name it stays below the 255 of file systems


def temp_name(target: str) -> str:
    """A fresh temp's name for the file `target`, in the name of this process."""
    host, boot, start = _this_process(os.getpid())
    tag = f"{host}-{boot}-{os.getpid()}-{start}-{secrets.token_hex(6)}"
    return f".{shortened(target)}.{tag}.tmp"


def shortened(target: str) -> str:
    """The part of a target's name that its temps bear."""
    return os.fsencode(target)[:_LONGEST_TARGET].decode("utf-8", "ignore")


def is_dead(name: str, *, ours: Callable[[str], bool], alone: bool) -> bool:
    """Whether `name` is a temp for a target that is `ours` and that nobody is writing any more.

    With `alone` nobody writes at all but the caller, who is about to: even a temp of this process is what a
    failed save could not remove. Otherwise a writer on another machine may be alive, and its temp is left.
    """
    found = _TEMP.fullmatch(name)
    if found is None or not ours(found["target"]):
        return False
    host, boot, _ = _this_process(os.getpid())
    here = found["host"] == host
    if alone or (here and found["boot"] != boot):
        return True
    return here and not _is_running(int(found["pid"]), int(found["start"]))


def _is_running(pid: int, start: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process is a process
    now = _start_time(pid)
    return now is None or now == start


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None where /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name in field 2 may hold spaces


@functools.lru_cache(maxsize=1)
def _this_process(pid: int) -> tuple[str, str, int]:
    """This machine (host name and pid namespace) and this boot, eight hex digits each; our start time or 0.

    `pid` is the cache's key: a fork has a start of its own, and may live in another namespace.
    """
    host, boot = socket.gethostname(), "?"
    with contextlib.suppress(OSError):  # without /proc the name of the machine must do
        host += f" {Path('/proc/self/ns/pid').readlink()}"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return _digest(host), _digest(boot), _start_time(pid) or 0


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
