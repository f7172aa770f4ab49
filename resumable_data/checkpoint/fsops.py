"""The system calls of writing checkpoints, behind one object that tests can replace."""

from __future__ import annotations

import contextlib
import os


class FsOps:
    """The system calls of a save, one method each; tests inject one that fails at a chosen call.

    Paths are strings: making a `Path` of one costs more than most of these calls do.
    """

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """A file descriptor; the mode is subject to the umask."""
        return os.open(path, flags, mode)

    def write(self, fd: int, data: memoryview) -> int:
        """Bytes written, possibly fewer than given."""
        return os.write(fd, data)

    def writeback(self, fd: int, offset: int, count: int) -> None:
        """Tell the disk that it may begin with these bytes. A hint: an error of the disk's comes out of fsync."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a file system that takes no hints is only slower
                os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """Force a file's bytes to the disk; after a failure the file must be given up, not synced again."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Give a descriptor back; network file systems report late write errors here."""
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Move a file within its directory, replacing the target in one step; or a directory to a free name."""
        os.replace(source, target)  # noqa: PTH105 - the strings are there; see the class

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)  # noqa: PTH108 - likewise

    def mkdir(self, path: str) -> None:
        """Make a directory; its mode is subject to the umask."""
        os.mkdir(path)  # noqa: PTH102 - likewise

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)  # noqa: PTH106 - likewise

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, in no order."""
        return os.listdir(path)  # noqa: PTH208 - likewise

    def dirsync(self, path: str) -> None:
        """Force a directory's entries, hence the renames in it, to the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


FS = FsOps()
