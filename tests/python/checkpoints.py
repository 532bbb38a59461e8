"""Models that go on from each other's checkpoints, and ranks that have the same."""

from collections.abc import Callable, Iterable
from typing import Any

import penstock
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor


def assert_same_rows(name: str, tensor: DTensor, group: Any) -> None:
    """What ranks of a group have of a tensor has the same bits."""
    rows = tensor.to_local().detach()
    everyones = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, rows.contiguous(), group=group)
    assert all(torch.equal(each, rows) for each in everyones), name


def save_and_go_on(
    folder: str,
    makers: Iterable[Callable[[], nn.Module]],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    step: Callable[[nn.Module, torch.optim.Optimizer, int], None],
    loss_of: Callable[[nn.Module], torch.Tensor],
) -> nn.Module:
    """Have each model load what the one before has saved, and go on as that does.

    step: trains on a batch by its number. Returns the last one.
    """
    before = None
    for place, make in enumerate(makers):
        model = make()
        optimizer = optimizer_of(model)
        step(model, optimizer, place)
        if before is not None:
            target = _state_of(model, optimizer)
            dcp.load(target, checkpoint_id=f"{folder}/{place - 1}")
            set_model_state_dict(model, target["model"])
            set_optimizer_state_dict(model, optimizer, target["optimizer"])
            for each in (before, (model, optimizer)):
                step(*each, 10 + place)
            wanted = loss_of(before[0]).item()
            assert loss_of(model).item() == pytest.approx(wanted, rel=1e-5), place
            if "_penstock_engine" in before[0].__dict__:
                penstock.close(before[0])
        dcp.save(_state_of(model, optimizer), checkpoint_id=f"{folder}/{place}")
        before = (model, optimizer)
    return model


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
