"""Parameters of any dtype are gathered; what is trained are floats of 16 bits or more."""

import penstock
import pytest
import torch
from equality import assert_close, whole, world
from models import DEVICE, batch, make
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


class Normed(nn.Module):
    """Batch norms, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def train_batch_norms():
    reference, sharded = make(Normed), penstock.shard(make(Normed), param_dtype=torch.bfloat16)
    for linear, _ in reference.blocks:
        linear.to(torch.bfloat16)
    for step in range(3):
        x = batch(step, rank=0, size=6).repeat(1, 2)[:, :6].bfloat16()
        for model in (reference, sharded):
            model.train(step < 2)
        want, got = reference(x), sharded(x)
        assert got.dtype == torch.bfloat16 and torch.equal(got, want)
        for y in (want, got):
            y.square().mean().backward()
    for (name, parameter), twin in zip(
        sharded.named_parameters(), reference.parameters(), strict=True
    ):
        assert parameter.dtype == torch.float32
        assert_close(name, whole(parameter.grad), twin.grad.float(), 1e-2)
    for buffer, twin in zip(sharded.buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, twin)
    penstock.close(sharded)


def test_batch_norms_keep_their_dtype_beside_others_in_bf16(worlds):
    worlds(2).run(train_batch_norms)
