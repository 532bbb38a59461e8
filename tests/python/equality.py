"""Train a model sharded and unsharded on the same batches, and compare."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import penstock
import pytest
import torch
import torch.distributed as dist
from models import DEVICE, Net, loss_of, make
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

TOLERANCE = 1e-5

# On GPUs each test makes communicators anew; stage 2 holds what 1 holds and reduces as 3 does.
both_ways = pytest.mark.parametrize("stage", [1, 3] if DEVICE == "cuda" else [1, 2, 3])


def world() -> tuple[int, int]:
    """Rank and number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@cache
def make_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all ranks, the same one each time.

    torch keeps the groups of each, and gloo a thread a group that wakes a hundred times a second.
    """
    return init_device_mesh(DEVICE, shape, mesh_dim_names=names)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' rows of a sharded tensor.

    By one collective of the group: full_tensor() takes milliseconds on the host.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local, mesh = tensor.to_local().detach(), tensor.device_mesh
    if tensor.placements != (Shard(0),) or type(local) is not torch.Tensor:
        return tensor.full_tensor().detach()
    rows = -(-tensor.shape[0] // mesh.size())
    mine = local.new_zeros(rows, *tensor.shape[1:])
    mine[: len(local)] = local
    everyones = mine.new_empty(mesh.size() * rows, *tensor.shape[1:])
    # As bytes: gloo does not know all dtypes.
    parts = [everyones.view(-1).view(torch.uint8), mine.view(-1).view(torch.uint8)]
    dist.all_gather_into_tensor(*parts, group=mesh.get_group())
    return everyones[: tensor.shape[0]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@contextmanager
def breaking_off(module: nn.Module) -> Iterator[None]:
    """Run a backward that raises when it gets to the module's output."""

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("stop here")

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    handle = module.register_forward_hook(watch)
    with pytest.raises(ValueError, match="stop here"):
        yield
    handle.remove()


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, name
    distance = (got.double() - want.double()).norm()
    # A single number that is a sum with cancellation keeps fewer digits than a norm does.
    scale = max(want.double().norm().item(), 0.01)
    assert distance <= tolerance * scale, f"{name}: off by {distance}"


def assert_same_gradients(sharded: nn.Module, reference: nn.Module, tolerance: float) -> None:
    pairs = zip(sharded.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), twin in pairs:
        assert (parameter.grad is None) == (twin.grad is None), f"{name}: {parameter.grad}"
        if twin.grad is not None:
            assert_close(f"gradient of {name}", whole(parameter.grad), twin.grad, tolerance)


def assert_same_parameters(sharded: nn.Module, reference: nn.Module, tolerance: float) -> None:
    pairs = zip(sharded.named_parameters(), reference.named_parameters(), strict=True)
    for (name, parameter), (twin_name, twin) in pairs:
        assert name == twin_name
        assert_close(name, whole(parameter), twin.detach(), tolerance)


def accumulate_reference(
    model: nn.Module, step: int, loss: Callable[..., torch.Tensor] = loss_of
) -> list[float]:
    """Gradients of the mean over ranks, summed in rank order; returns the ranks' losses."""
    _, size = world()
    losses = []
    for rank in range(size):
        value = loss(model, step, rank)
        (value / size).backward()
        losses.append(value.item())
    return losses


def pair(
    stage: int = 3, kind: Callable[[], nn.Module] = Net, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A model twice: unsharded and sharded."""
    return make(kind), penstock.shard(make(kind), stage=stage, **options)


def finish(reference: nn.Module, sharded: nn.Module) -> None:
    """Compare gradients, step, compare parameters."""
    assert_same_gradients(sharded, reference, TOLERANCE)
    for model in (reference, sharded):
        optimizer = sgd(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(sharded, reference, TOLERANCE)
    penstock.close(sharded)


def train_both(
    kind: Callable[[], nn.Module],
    *,
    steps: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    loss: Callable[..., torch.Tensor] = loss_of,
    between: Callable[[nn.Module], None] | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> nn.Module:
    """Compare losses, gradients and parameters over some steps; returns the sharded model."""
    rank, _ = world()
    reference, sharded = make(kind), penstock.shard(make(kind), **options)
    twins = optimizer(reference.parameters()), optimizer(sharded.parameters())
    for step in range(steps):
        losses = accumulate_reference(reference, step, loss)
        value = loss(sharded, step, rank)
        value.backward()
        assert abs(value.item() - losses[rank]) <= tolerance * abs(losses[rank]), f"step {step}"
        assert_same_gradients(sharded, reference, tolerance)
        for each in twins:
            each.step()
            each.zero_grad()
        if between is not None:
            between(sharded)
    assert_same_parameters(sharded, reference, tolerance)
    return sharded
