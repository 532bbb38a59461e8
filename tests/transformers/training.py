"""What the ranks of run.py do: a model is trained unsharded, by FSDP2 or by Penstock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import penstock
import torch
import torch.distributed as dist
import transformers
from architectures import ARCHITECTURES
from penstock._blocks import find_blocks
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS = 4

transformers.logging.set_verbosity_error()


@dataclass
class Trained:
    """What became of a model.

    Attributes
    ----------
    losses : list of float
        On this rank's batches, before each step and behind the last one.
    parameters, blocks : int
        How many it has.
    """

    losses: list[float]
    parameters: int
    blocks: int


def _by_fsdp2(model: nn.Module, stage: int) -> None:
    for _, block in find_blocks(model, None):
        fully_shard(block, reshard_after_forward=stage == 3)
    fully_shard(model, reshard_after_forward=stage == 3)


def _by_penstock(model: nn.Module, stage: int) -> None:
    penstock.shard(model, stage=stage)


WAYS: dict[str, Callable[[nn.Module, int], None]] = {
    "unsharded": lambda model, stage: None,
    "FSDP2": _by_fsdp2,
    "Penstock": _by_penstock,
}


def train(kind: str, way: str, stage: int) -> Trained:
    """Train a model of an architecture; an unsharded one has the batches of all ranks."""
    model = ARCHITECTURES[kind].build(kind, seed=0)
    _give_scalars_a_row(model)
    parameters = sum(p.numel() for p in model.parameters())
    blocks = len(find_blocks(model, None))
    WAYS[way](model, stage)
    rank, size = dist.get_rank(), dist.get_world_size()
    places = range(size) if way == "unsharded" else [rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(STEPS):
        for place in places:
            loss = _loss_of(kind, model, step, place)
            (loss / len(places)).backward()
            if place == rank:
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    losses.append(_loss_of(kind, model, STEPS, rank).item())
    if way == "Penstock":
        penstock.close(model)
    return Trained(losses, parameters, blocks)


def _give_scalars_a_row(model: nn.Module) -> None:
    """Do what FSDP2's and Penstock's errors ask for: CLIP has a scalar."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim == 0:
                module._parameters[name] = nn.Parameter(parameter.detach().reshape(1))


def _loss_of(kind: str, model: nn.Module, step: int, place: int) -> torch.Tensor:
    seed = 100 * step + place
    batch = ARCHITECTURES[kind].draw(torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)  # what dropout leaves out is the same, however it is trained
    return model(**batch).loss
