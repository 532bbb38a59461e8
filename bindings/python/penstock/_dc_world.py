"""What a DeepCompile runtime needs of the process group that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock._errors import PenstockError
from penstock._memory import segment_maker
from penstock._roll import Roll
from penstock._world import meet, private_groups, stream_of


@dataclass
class DeepCompileWorld:
    """Ranks, device, private process groups, and where memory that peers map comes from."""

    rank: int
    size: int
    device: torch.device
    stream: int
    timeout: float
    gather: Any
    reduce: Any
    questions: Any
    segments: Callable[[int], torch.Tensor] | None
    roll: Roll


def world_of(group: Any, timeout: float = 600.0) -> DeepCompileWorld:
    """Make private process groups of the ranks of `group` (None: all, or this process alone)."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        device = _device(("cpu",))
        segments = segment_maker(device)
        roll = Roll(None, 0, 1, timeout)
        return DeepCompileWorld(
            0, 1, device, stream_of(device), timeout, None, None, None, segments, roll
        )
    group = group if group is not None else dist.group.WORLD
    rank, size = group.rank(), group.size()
    if rank < 0:
        raise PenstockError("EINVAL", "this process is not a rank of the process group given")
    device = _device(tuple(kind.type for kind in group._device_types))
    name, roll = meet(group, rank, size, timeout)
    gather, reduce, questions = private_groups(name, roll, ("gather", "reduce", "questions"))
    segments = segment_maker(device)
    return DeepCompileWorld(
        rank, size, device, stream_of(device), timeout, gather, reduce, questions, segments, roll
    )


def _device(kinds: tuple[str, ...]) -> torch.device:
    """Return this rank's GPU where the group serves GPUs, else the CPU."""
    if "cuda" in kinds and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
