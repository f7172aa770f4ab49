"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, shipped inside its package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

TRAINING = 1437  # the first images are for training, the other 360 for evaluation


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images, float32 of shape (1797, 1, 8, 8) in [0, 1], and their labels, int64 of shape (1797,).

    The same values as ``sklearn.datasets.load_digits``, read from the file behind it: importing
    scikit-learn takes two seconds, and a run that is killed ten times starts eleven times.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: pip install 'resumable-data[demo]'"
        )
    # rows of 64 pixels in 0..16 and one label
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images = torch.from_numpy(rows[:, :64]).to(torch.float32).reshape(-1, 1, 8, 8) / 16
    return images, torch.from_numpy(rows[:, 64]).to(torch.int64)


def split() -> tuple[TensorDataset, TensorDataset]:
    """The training part (1437 images) and the evaluation part (360)."""
    images, labels = load_digits()
    return (
        TensorDataset(images[:TRAINING], labels[:TRAINING]),
        TensorDataset(images[TRAINING:], labels[TRAINING:]),
    )
