"""The samplers that ``loader.sampler`` and ``loader.batch_sampler.sampler`` show for the built-in orders.

They stand where ``DataLoader`` has its ``RandomSampler`` and ``SequentialSampler``, are instances of these
for code that asks, list this rank's indices of the present epoch, and forward ``set_epoch`` to the loader.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from resumable_data.run import Run


class _Forwarding(Sampler[int]):
    # weak: the loader holds the view, and must not wait for the garbage collector to let go of its workers
    _run: weakref.ref[Run]

    def _loader(self) -> Run:
        run = self._run()
        if run is None:
            raise ReferenceError("the loader this sampler belongs to is gone: keep a reference to the loader")
        return run

    def set_epoch(self, epoch: int) -> None:
        """The loader's own ``set_epoch``."""
        self._loader().set_epoch(epoch)


class _View(_Forwarding):
    def __iter__(self) -> Iterator[int]:
        return iter(self._loader().indices())

    def __len__(self) -> int:
        return self._loader().samples()


class ShuffledView(_View, RandomSampler):
    """Shown for ``shuffle=True``: this rank's indices of the present epoch."""


class SequentialView(_View, SequentialSampler):
    """Shown for ``shuffle=False``: this rank's indices."""


class GeneratorView(_Forwarding, RandomSampler):
    """Shown for ``shuffle=True, generator=g``: torch's own sampler, which draws from g when iterated."""


def make_view(run: Run, template: DataLoader[Any], shuffle: bool) -> Sampler[int]:
    """The sampler to show for an order that is not the user's own."""
    dataset: Any = template.dataset
    view: ShuffledView | SequentialView | GeneratorView
    if shuffle and template.generator is not None:
        view = GeneratorView(dataset, generator=template.generator)
    else:
        view = ShuffledView(dataset) if shuffle else SequentialView(dataset)
    view._run = weakref.ref(run)
    return view
