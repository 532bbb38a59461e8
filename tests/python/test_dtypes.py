"""Parameters of any dtype are gathered; what is trained are floats of 16 bits or more."""

import penstock
import pytest
import torch
from equality import world
from models import DEVICE
from torch import nn

EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


class Quantised(nn.Module):
    """A frozen matrix of another dtype, with an odd number of rows, and a trained vector."""

    def __init__(self, dtype: torch.dtype, trained: bool = False) -> None:
        super().__init__()
        values = torch.arange(35, dtype=torch.float32).view(7, 5) / 8 - 2
        self.matrix = nn.Parameter(values.to(dtype), requires_grad=trained)
        self.vector = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() @ self.matrix.float().t() * self.vector.float()


def gather_frozen(dtype, param_dtype):
    rank, _ = world()
    torch.manual_seed(rank)
    reference = Quantised(dtype).to(DEVICE)
    sharded = penstock.shard(Quantised(dtype).to(DEVICE), param_dtype=param_dtype)
    for _ in range(3):  # eagerly, and by plan
        x = torch.randint(-4, 4, (3, 5), device=DEVICE).float()
        got = sharded(x)
        assert torch.equal(got, reference(x))
        got.sum().backward()
    assert sharded.matrix.dtype == dtype
    penstock.close(sharded)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["as it is", "bf16"])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_frozen_parameters_of_eight_bits_are_gathered_as_they_are(worlds, dtype, param_dtype):
    worlds(2).run(gather_frozen, dtype, param_dtype)


def shard_trained(dtype):
    with pytest.raises(penstock.PenstockError, match=r"float8.*freeze"):
        penstock.shard(Quantised(dtype, trained=True).to(DEVICE))


@pytest.mark.parametrize("dtype", EIGHT_BITS[:2], ids=str)
def test_trained_parameters_of_eight_bits_are_refused(worlds, dtype):
    worlds(2).run(shard_trained, dtype)
