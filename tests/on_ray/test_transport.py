"""Tensors that are packed for the object store come out as they went in."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch

from fewstep.launch.ray.transport import pack, unpack


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(5).double(),
        torch.randn(2, 3).bfloat16(),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.nn.Parameter(torch.randn(2)),
    ],
    ids=["float32", "float64", "bfloat16", "scalar", "bool", "empty", "parameter"],
)
def test_values_dtypes_and_shapes_are_kept(tensor: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Out of band, as Ray sends it: what arrives lies in memory that cannot be written.
        buffers: list[pickle.PickleBuffer] = []
        sent = pickle.dumps(pack({"a": tensor}), protocol=5, buffer_callback=buffers.append)
        frozen = [bytes(buffer.raw()) for buffer in buffers]
        found = unpack(pickle.loads(sent, buffers=frozen))["a"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor.detach())
    assert len(sent) < 1000  # the values themselves are not in it


def test_nothing_is_copied() -> None:
    tensor = torch.randn(4)
    packed = pack({"a": tensor})["a"]
    tensor[0] = 5.0
    assert unpack({"a": packed})["a"][0] == 5.0
