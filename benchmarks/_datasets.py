"""The datasets of the benchmarks, from rows that cost next to nothing to photographs that cost milliseconds."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

TOKENS = 2048
SIDE = 160


class Rows(Dataset):
    """Rows of 32 floats: a sample that costs about as little as a sample can."""

    def __init__(self, n: int) -> None:
        self.rows = torch.randn(n, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Tokens(Dataset):
    """Windows of 2048 tokens of a memory-mapped file of uint16, begun at a random offset."""

    def __init__(self, n: int, path: Path) -> None:
        np.random.default_rng(0).integers(0, 50_000, (n + 1) * TOKENS, dtype=np.uint16).tofile(path)
        self.n = n
        self.path = path
        self._map: Any = None  # opened where it is read, once a process

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._map is None:
            self._map = np.memmap(self.path, np.uint16, mode="r")
        begin = index * TOKENS + random.randrange(TOKENS)
        return torch.from_numpy(self._map[begin : begin + TOKENS].astype(np.int64))


class Photographs(Dataset):
    """Tiles of scikit-learn's two photographs as JPEG: decoded, resized, flipped at random, as floats."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.files = _tiles()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        image = Image.open(io.BytesIO(self.files[index % len(self.files)])).resize((SIDE, SIDE))
        pixels = torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)
        return pixels.flip(2) if random.random() < 0.5 else pixels


def _tiles() -> list[bytes]:
    """Tiles of 208 x 208 pixels, encoded anew."""
    import sklearn.datasets
    from PIL import Image

    found = []
    for path in sorted((Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg")):
        whole = Image.open(path)
        for left in range(0, whole.width - 207, 208):
            for top in range(0, whole.height - 207, 208):
                held = io.BytesIO()
                whole.crop((left, top, left + 208, top + 208)).save(held, "JPEG", quality=90)
                found.append(held.getvalue())
    return found


class Batched(Rows):
    """Rows that a dataset hands out by the batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(self.rows[indices])


class Virtual(Dataset):
    """Item i is i, of any number of items; counts what it was asked for."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


def tensors(n: int) -> TensorDataset:
    """Rows of 32 floats and a label each."""
    return TensorDataset(Rows(n).rows, torch.arange(n) % 10)


def arrow(n: int) -> Any:
    """Rows of 32 floats and a label each as a Hugging Face dataset on Arrow."""
    import datasets

    rows = Rows(n).rows.numpy()
    return datasets.Dataset.from_dict({"x": list(rows), "y": list(range(n))}).with_format("torch")


def makers(folder: str) -> dict[str, Callable[[int], Any]]:
    """Name -> a function of n."""
    return {
        "rows": Rows,
        "tensors": tensors,
        "tokens": lambda n: Tokens(n, Path(folder, f"{n}.bin")),
        "jpeg": Photographs,
        "getitems": Batched,
        "arrow": arrow,
    }
