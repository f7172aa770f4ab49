"""DataLoader's own attributes, answered by the DataLoader that a ResumableLoader has."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def _shown(name: str) -> Any:
    return property(lambda self: getattr(self._template, name), doc=f"As ``DataLoader.{name}``.")


class DataLoaderAttributes:
    """Read-only views of what DataLoader shows, so that code which reads them goes on working."""

    _template: DataLoader[Any]

    dataset: Any = _shown("dataset")
    batch_size: Any = _shown("batch_size")
    sampler: Any = _shown("sampler")
    batch_sampler: Any = _shown("batch_sampler")
    num_workers: Any = _shown("num_workers")
    collate_fn: Any = _shown("collate_fn")
    pin_memory: Any = _shown("pin_memory")
    pin_memory_device: Any = _shown("pin_memory_device")
    drop_last: Any = _shown("drop_last")
    timeout: Any = _shown("timeout")
    worker_init_fn: Any = _shown("worker_init_fn")
    multiprocessing_context: Any = _shown("multiprocessing_context")
    generator: Any = _shown("generator")
    prefetch_factor: Any = _shown("prefetch_factor")
    persistent_workers: Any = _shown("persistent_workers")
    in_order: Any = _shown("in_order")
