"""Scikit-learn's handwritten digits: the built-in data set of small runs and tests."""

from typing import Final

import torch
from torch import Tensor

NUM_CLASSES: Final = 10
IMAGE_SHAPE: Final = (1, 8, 8)
"""Channels, height and width of one image."""

_MAX_VALUE: Final = 16.0


def load_digits() -> tuple[Tensor, Tensor]:
    """Load the digits that come with scikit-learn (no download).

    The data are the test part of Alpaydin and Kaynak's "Optical Recognition of Handwritten Digits"
    (UCI, 1998). Every call returns fresh tensors on the CPU, in the data set's own order.

    Returns:
        Images, float32 [1797, 1, 8, 8] in [-1, 1] (ink is +1), and labels, int64 [1797] in 0..9.
    """
    from sklearn import datasets  # importing scikit-learn takes about a second

    values, labels = datasets.load_digits(return_X_y=True)
    images = torch.as_tensor(values).to(torch.float32).reshape(-1, *IMAGE_SHAPE)
    return images * (2.0 / _MAX_VALUE) - 1.0, torch.as_tensor(labels).to(torch.int64).clone()
