"""A user's sampler or batch sampler, read a batch at a time so that it can be resumed.

It is read under global streams of its own, seeded from (seed, epoch), so that an order which draws from
python's, numpy's or torch's global stream is a function of these two, and the process's own streams stay
where they are. A resumed epoch is read again from its start and skipped forward by number, without touching
the dataset; the keys read on the way are digested and compared, so a sampler with a history of its own is
refused rather than trusted. A sampler with ``state_dict`` is not skipped: its state as of the first
undelivered batch is carried.
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from resumable_data.encoding import decode, encode
from resumable_data.errors import StateError
from resumable_data.progress import slow_progress
from resumable_data.seeding import OwnStreams, StreamStates, order_words
from resumable_data.state import mismatch

#: Batches read at once; more would only run further ahead of what the sampler may want to know.
CHUNK = 16


class Extent(NamedTuple):
    """How far an epoch of a sampler was read: its number, the batches, their digest, and whether it ended."""

    epoch: int
    batches: int
    digest: bytes
    ended: bool


class Mark(NamedTuple):
    """What belongs to a position in a user's order besides its number.

    ``digest`` chains all keys before the position. For a sampler with a state of its own: ``state`` is its state
    there, ``streams`` its global streams where it drew from them, and ``ended`` whether it is known to have
    ended there (at an epoch's start: in the epoch before), for it may have made itself ready for the next epoch.
    ``previous`` is for an epoch's start, where there is no digest yet: what was read before of a sampler that
    may have a history.
    """

    digest: bytes
    state: Any = None
    streams: StreamStates | None = None
    ended: bool = False
    previous: Extent | None = None


START = Mark(b"")


class Drawn(NamedTuple):
    """One batch as the sampler gave it: its keys, the samples before and after it, the mark after it."""

    keys: Any
    before: int | None
    after: int | None
    mark: Mark


def is_stateful(sampler: Any) -> bool:
    """Whether the sampler offers a state of its own."""
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")


class Reading:
    """One epoch of a user's sampler, being read.

    Args:
        sampler: The sampler, or the batch sampler.
        batch_size: Keys in a batch; None: the sampler gives whole batches.
        drop_last: Leave out an incomplete last batch.
        coordinates: (seed, epoch).
        number: Batches before the position where reading begins.
        samples: Samples before the position, where known.
        mark: The position's mark, set in a stateful sampler.
        after_end: Whether the sampler was iterated to its end before, in this process.
        known: (batches, digest) that this epoch is known to have begun with: compared when reading gets there.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        coordinates: tuple[int, int],
        number: int,
        samples: int | None,
        mark: Mark,
        known: tuple[int, bytes] | None,
        after_end: bool = False,
    ) -> None:
        self._sampler = sampler
        self._batch_size, self._drop_last = batch_size, drop_last
        self._stateful = is_stateful(sampler)
        self._words = order_words(*coordinates)
        self._streams = OwnStreams(self._words, mark.streams, tracked=self._stateful)
        self._chunk = 1  # the first batch is not kept waiting for others
        self._undelivered: deque[Drawn] = deque()
        self._number = number  # of the first undelivered batch
        self._before = (number, samples, mark)  # the position of the first undelivered batch
        self._ended = mark.ended and number > 0  # at an epoch's start it is the epoch before that ended
        self._keys: Iterator[Any] | None = None
        self._last = (samples, mark)  # as of the last batch read
        self._after_end = after_end
        self._known = None if self._stateful else known
        self._positioned = False
        self.broken = False  # the sampler raised: what it would give next is unknown

    def extent(self, epoch: int) -> Extent | None:
        """How far this was read, batches in flight included; None where nothing was, or a state tells all."""
        batches = self._number + len(self._undelivered)
        if self._stateful or not self._positioned or not batches:
            return None
        return Extent(epoch, batches, self._last[1].digest, self._ended)

    def reread(self, ended: bool) -> None:
        """Read as far as an earlier process did, which asked for one more where the sampler ended."""
        self.position()
        if ended and self.batch(self._number) is not None:
            raise mismatch({"order_digest": ("an end", "further batches")})

    @property
    def ended(self) -> bool:
        """Whether the sampler gave all it had, and all of it was delivered."""
        return self._ended and not self._undelivered

    @property
    def ahead(self) -> Mark | None:
        """The mark of the first undelivered batch, where the sampler was read further than that."""
        return self._before[2] if self._undelivered else None

    def batch(self, number: int) -> Drawn | None:
        """Batch ``number`` of the epoch, at or after the first undelivered one; None past the end.

        Raises:
            StateMismatchError: The order is not the one the position was taken in.
        """
        self.position()
        # of a sampler with a state one batch more is read: whether a batch was the last belongs to its mark
        wanted = number - self._number + (2 if self._stateful else 1)
        while len(self._undelivered) < wanted and not self._ended:
            self._read(self._chunk)
            self._chunk = 1 if self._stateful else min(CHUNK, 2 * self._chunk)
        at = number - self._number
        return self._undelivered[at] if at < len(self._undelivered) else None

    def place_at(self, number: int) -> tuple[int | None, Mark]:
        """(samples, mark) after ``number`` batches: at the first undelivered one, or after one in flight."""
        if number == self._before[0]:
            return self._before[1], self._before[2]
        drawn = self._undelivered[number - 1 - self._number]
        return drawn.after, drawn.mark

    def deliver_before(self, number: int) -> None:
        """Batches below ``number`` are delivered: forget them."""
        while self._number < number:
            drawn = self._undelivered.popleft()
            self._number += 1
            self._before = (self._number, drawn.after, drawn.mark)

    def position(self) -> None:
        """Skip forward to the position, unless that was done; the dataset is not touched.

        Raises:
            StateMismatchError: The order is not the one the position was taken in.
        """
        if self._positioned:
            return
        try:
            if self._stateful:
                self._begin()
            elif self._number:
                self._skip()
            self._positioned = True
            if self._known is not None and self._known[0] > self._number:
                ahead = self.batch(self._known[0] - 1)
                self._compare(self._known[0], b"" if ahead is None else ahead.mark.digest)
        except BaseException:
            self.broken = True
            raise

    def _skip(self) -> None:
        samples: int | None = 0
        digest = b""
        done = 0
        with slow_progress("skipping forward in the sampler", self._number) as advance:
            for at in range(0, self._number, 1024):
                read = self._streams.around(self._pull, min(1024, self._number - at))
                for keys in read:
                    digest = _chain(digest, keys)
                    samples = _plus(samples, keys)
                    done += 1
                    self._compare(done, digest)
                advance(len(read))
        if done < self._number and (self._known is None or self._known[0] != self._number):
            raise IndexError(
                f"batch_in_epoch must be in [0, {done}], found {self._number}: past the epoch's end"
            )
        self._compare(self._number, digest)
        self._last = (samples, Mark(digest))
        self._before = (self._number, samples, Mark(digest))

    def _compare(self, batches: int, digest: bytes) -> None:
        if self._known is not None and batches == self._known[0] and digest != self._known[1]:
            raise mismatch({"order_digest": (self._known[1].hex(), digest.hex())})

    def _read(self, count: int) -> None:
        samples, mark = self._last
        for keys in self._guarded_pull(count):
            after = _plus(samples, keys)
            mark = self._mark(_chain(mark.digest, keys))
            self._undelivered.append(Drawn(keys, samples, after, mark))
            samples = after
        self._last = (samples, mark)
        if self._ended and self._stateful:
            self._note_end()

    def _note_end(self) -> None:
        if self._undelivered:
            drawn = self._undelivered[-1]
            self._undelivered[-1] = drawn._replace(mark=drawn.mark._replace(ended=True))
        else:
            number, samples, mark = self._before
            self._before = (number, samples, mark._replace(ended=True))

    def _mark(self, digest: bytes) -> Mark:
        if not self._stateful:
            return Mark(digest)
        moved = self._streams.states if self._streams.moved else None
        return Mark(digest, copy.deepcopy(self._sampler.state_dict()), moved, self._ended)

    def _begin(self) -> None:
        """Begin to iterate a stateful sampler at the position."""
        number, samples, mark = self._before
        if mark.state is None:  # the start of an epoch: its state is taken before anything is read ahead
            mark = self._mark(mark.digest)._replace(ended=self._after_end)
            self._before, self._last = (number, samples, mark), (samples, mark)
        else:
            # what the sampler draws to find its end belongs to an epoch that is over
            OwnStreams(self._words).around(self._set, mark)
        self._keys = iter(()) if self._ended else self._streams.around(iter, self._sampler)

    def _set(self, mark: Mark) -> None:
        self._sampler.load_state_dict(copy.deepcopy(mark.state))
        # some samplers make themselves ready for the next epoch as they end, others only when asked once more
        # what an incomplete last batch left behind is not a beginning
        least = self._batch_size or 1 if self._drop_last else 1
        if mark.ended and len(list(islice(iter(self._sampler), least))) == least:
            self._sampler.load_state_dict(copy.deepcopy(mark.state))

    def _guarded_pull(self, count: int) -> list[Any]:
        try:
            return self._streams.around(self._pull, count)
        except BaseException:
            self.broken = True
            raise

    def _pull(self, count: int) -> list[Any]:
        """The next ``count`` batches, or fewer where the sampler ends; runs on the sampler's own streams."""
        if self._keys is None:
            self._keys = iter(self._sampler)
        read: list[Any] = []
        while len(read) < count and not self._ended:
            if self._batch_size is None:
                keys: Any = list(islice(self._keys, 1))
                self._ended = not keys
                keys = _owned(keys[0]) if keys else None
            else:
                keys = list(islice(self._keys, self._batch_size))
                self._ended = len(keys) < self._batch_size
                keys = keys if keys and not (self._ended and self._drop_last) else None
            if keys is not None:
                read.append(keys)
        return read


def _owned(keys: Any) -> Any:
    """A batch of keys that stays as it is although the sampler may use its list or buffer again."""
    if isinstance(keys, torch.Tensor):
        return keys.clone()
    if isinstance(keys, (list, np.ndarray)):
        return keys.copy()
    return list(keys) if isinstance(keys, Iterator) else keys


def _plus(samples: int | None, keys: Any) -> int | None:
    return samples + len(keys) if samples is not None and hasattr(keys, "__len__") else None


def _chain(digest: bytes, keys: Any) -> bytes:
    """The digest after one more batch of keys."""
    listed = keys if isinstance(keys, (list, tuple)) else [keys]
    if all(type(key) is int and -(1 << 63) <= key < 1 << 63 for key in listed):
        data = b"i" + np.array(listed, dtype="<i8").tobytes()
    else:
        data = b"r" + b"\0".join(map(_key_bytes, listed))
    # as many bytes as a state carries, so that a resumed chain goes on as the uninterrupted one does
    return hashlib.sha256(digest + data).digest()[:16]


def _key_bytes(key: Any) -> bytes:
    if isinstance(key, torch.Tensor):
        key = key.detach().cpu().numpy()
    if isinstance(key, np.ndarray) and not key.dtype.hasobject:  # numpy would print the middle as dots
        return f"{key.dtype.str}{key.shape}".encode() + key.tobytes()
    return repr(key).encode()


def encode_mark(mark: Mark) -> str | None:
    """The sampler's own state as JSON text; None for a sampler without one.

    Raises:
        TypeError: Something in it cannot be encoded; the error names its key.
    """
    if mark.previous is not None and mark.state is None:
        epoch, batches, digest, ended = mark.previous
        return encode({"previous": [epoch, batches, digest.hex(), ended]}, "sampler")
    if mark.state is None:
        return None
    streams = None if mark.streams is None else tuple(mark.streams)
    return encode({"state": mark.state, "streams": streams, "ended": mark.ended}, "sampler.state_dict()")


def decode_mark(digest: str, text: str | None) -> Mark:
    """A mark from a loader state.

    Raises:
        StateError: Not such a digest or text.
    """
    try:
        read = None if text is None else decode(text)
        if read is None:
            return Mark(bytes.fromhex(digest))
        if "previous" in read:
            epoch, batches, before, ended = read["previous"]
            return Mark(b"", previous=Extent(int(epoch), int(batches), bytes.fromhex(before), ended is True))
        streams = None if read["streams"] is None else StreamStates(*read["streams"])
        return Mark(bytes.fromhex(digest), read["state"], streams, read["ended"] is True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"state['sampler'] or state['order_digest'] cannot be read: {error}; load another checkpoint",
            expected="what state_dict() wrote",
            found=None if text is None else text[:80],
        ) from error


def chain_of(sampler: Any) -> Iterable[Any]:
    """The sampler and those inside it, outermost first."""
    found: list[Any] = []
    while sampler is not None and all(sampler is not known for known in found):
        found.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
    return found
