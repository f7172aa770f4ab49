"""Power cuts on a real ext4: ``sudo python tests/crash/power_cut.py --cuts 200`` (root, loop devices, Linux).

A process saves checkpoints onto a file system on a loop device, and the file system is shut down under it by
ext4's own ioctl, which drops all that has not reached the device, the journal's tail included. It is mounted
again and what is there is loaded. Prints a line of JSON for each kind of cut; exit status 1 where something
was lost that had been promised, 77 where this machine cannot do it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402 - the path comes first
from support.checkpoints import LAYOUTS, Hasty, managed, objects_of  # noqa: E402 - likewise
from support.forked import SIZE, ended, fork, looker, saver  # noqa: E402 - likewise

from resumable_data.checkpoint.fsops import FsOps  # noqa: E402 - likewise

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
NO_LOG_FLUSH = 2  # its flag: not even the journal is written
CANNOT = 77  # exit status, as automake has it
TOOLS = ("mkfs.ext4", "mount", "umount")


class Disk:
    """An ext4 file system in a file."""

    def __init__(self, folder):
        self.image, self.place = folder / "disk.img", folder / "mounted"
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(128 << 20)
        run("mkfs.ext4", "-q", "-F", str(self.image))

    def mount(self):
        run("mount", "-o", "loop", str(self.image), str(self.place))

    def cut(self):
        """From here on nothing reaches the disk, and what has not yet is gone."""
        fd = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self):
        run("umount", str(self.place))


def run(*command):
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def obstacle():
    """Why it cannot be done here; None where it can."""
    if os.geteuid() != 0:
        return "not root"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"no {tool}"
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        try:
            disk.mount()
        except subprocess.CalledProcessError as error:
            return f"no loop device can be mounted: {error.stderr.decode().strip()}"
        try:
            disk.cut()
        except OSError as error:
            return f"ext4 has no shutdown here: {error.strerror}"
        finally:
            disk.unmount()
    return None


def saved_and_waiting(directory, options, report, *, ops, saves):
    """So many saves beyond what is there, a report, and then nothing."""
    with managed(directory, ops, keep_last=2, **options) as manager:
        found = manager.restore({})
        step = found.step if found else 0
        for _ in range(saves):
            step += 1
            manager.save(step, objects_of(step, SIZE))
        os.write(report, f"{step}\n".encode())
        signal.pause()


def reported(source, *, wait):
    """The last step that a saver has reported; 0 where none."""
    said = b""
    while select.select([source], [], [], 60 if wait and not said else 0)[0]:
        part = os.read(source, 1 << 16)
        if not part:
            break
        said += part
    return int(said.split()[-1]) if said.split() else 0


def cut_once(disk, layout, draw, kind):
    """One cut: the last step promised before it, what loaded after it, and what a look says besides."""
    options = LAYOUTS[layout]
    disk.mount()
    directory = disk.place / "run"
    if kind == "at random":
        pid, source = fork(saver, directory, options)
        time.sleep(draw.uniform(0, 0.15))
        promised = reported(source, wait=False)
    else:
        ops = Hasty() if kind == "without syncs" else FsOps()
        pid, source = fork(saved_and_waiting, directory, options, ops=ops, saves=draw.randint(1, 3))
        promised = reported(source, wait=True)
    disk.cut()
    os.kill(pid, signal.SIGKILL)
    ended(pid, source)
    disk.unmount()
    disk.mount()
    try:
        looked, _ = ended(*fork(looker, directory, options))
    finally:
        disk.unmount()
    return promised, json.loads(looked)


def verdict(promised, looked, kind):
    """What happened, in words; those that begin with LOST are wrong."""
    if looked["error"]:
        return f"LOST: {looked['error']}"
    found = looked["found"] or [0, 0]
    if found[0] != found[1] or looked["skipped"] or looked["damaged"] or looked["debris"]:
        return f"LOST: {looked}"
    if found[0] < promised:
        return f"LOST: step {promised} was promised, step {found[0]} is there"
    if looked["after"] != looked["wanted"]:
        return f"LOST: the next save left {looked['after']}"
    if kind == "at random" and found[0] > promised:
        return "one newer than promised loads"
    return "the one promised loads"


def main(arguments=None):
    """The cuts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuts", type=int, default=20, help="of each kind and layout")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    reason = obstacle()
    if reason:
        print(f"cannot be done here: {reason}")
        return CANNOT
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    draw, lost = random.Random(chosen.seed), False
    for kind in ("after save returned", "at random", "without syncs"):
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory() as folder:
                disk = Disk(Path(folder))
                outcomes = Counter(
                    verdict(*cut_once(disk, layout, draw, kind), kind) for _ in range(chosen.cuts)
                )
            wrong = [outcome for outcome in outcomes if outcome.startswith("LOST")]
            if kind == "without syncs":  # the control: a cut that loses nothing would prove nothing
                count = sum(outcomes[outcome] for outcome in wrong)
                outcomes = Counter({"lost, as it should be": count, "kept by luck": chosen.cuts - count})
                lost |= count == 0
            else:
                lost |= bool(wrong)
            print(json.dumps({"cut": kind, "layout": layout, "outcomes": dict(outcomes)}), flush=True)
    return int(lost)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
