"""What ranks compare, or make equal, while a model is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from penstock._errors import PenstockError
from penstock._world import World, local_of

_SUMS = 1 << 20  # of a tensor at most, which are added up by their places
_TEXT_BYTES = 512


# ---- values -------------------------------------------------------------------------------------


def check_equal(world: World, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise EMISMATCH on all ranks where a parameter has other values on one of them.

    Parameters
    ----------
    world : World
        The ranks; all of them call this alike, and so do those along its other axes.
    parameters : dict of str and torch.Tensor
        By name: the same names, shapes and dtypes on all ranks. They are read once.
    """
    if world.size == 1 and world.axes is None:
        return
    sums = torch.stack([_checksum(local_of(tensor)) for tensor in parameters.values()]).cpu()
    everyones = world.all_gather(sums).unsqueeze(0)
    if world.axes is not None:
        everyones = world.axes.all_gather(everyones[0])
    differ = everyones != everyones[:, :1]  # by place along the axes, rank and parameter
    if world.axes is not None:
        same = [world.axes.is_same(parameter) for parameter in parameters.values()]
        differ |= (everyones != everyones[:1, :1]) & torch.tensor(same)
    for name, at in zip(parameters, differ.unbind(dim=-1), strict=True):
        if at.any():
            place, rank = at.nonzero()[0].tolist()
            where = f", place {place} along {world.axes.names}," if world.axes is not None else ""
            count = int(differ.flatten(0, 1).any(dim=0).sum())
            raise PenstockError(
                "EMISMATCH",
                f"parameter {name!r} has other values on rank {rank}{where} than on rank 0, and so "
                f"have {count} of {len(parameters)}: give all ranks the same model (one seed, one "
                "checkpoint), or call penstock.shard(..., broadcast=True), which gives all ranks "
                "the values of rank 0",
            )


def check_equal_along_axes(world: World, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise EMISMATCH on all ranks where rows of what is the same along other axes differ there.

    Parameters
    ----------
    world : World
        The ranks; all of them call this alike, and so do those along its other axes.
    parameters : dict of str and torch.Tensor
        By name: sharded. They are read once.
    """
    axes = world.axes
    if axes is None:
        return
    same = {name: local_of(tensor) for name, tensor in parameters.items() if axes.is_same(tensor)}
    if not same:
        return
    everyones = axes.all_gather(torch.stack([_checksum(rows) for rows in same.values()]).cpu())
    differ = (everyones != everyones[0]).any(dim=0).tolist()
    error = None
    if any(differ):
        name = list(same)[differ.index(True)]
        text = f"parameter {name!r} does not have the same values along {axes.names}"
        error = PenstockError("EMISMATCH", text)
    failure = find_failure(world, error)
    if failure is not None:
        raise PenstockError(
            "EMISMATCH",
            f"{failure.text}: initialise it from one seed there, or load it (penstock.load)",
        )


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Make a number of the values' bits and places: the same rows in another order have another."""
    octets = values.detach().contiguous().view(-1).view(torch.uint8)
    octets = pad(octets, (0, -len(octets) % 8)) if len(octets) % 8 else octets
    octets = octets.clone() if octets.storage_offset() % 8 else octets
    words = octets.view(torch.int64)
    span = 1 + len(words) // _SUMS
    even = len(words) // span * span
    sums = torch.cat([words[:even].view(-1, span).sum(dim=1), words[even:]])
    places = torch.arange(len(sums), device=sums.device) * 2 + 1  # odd: no bit is lost
    return (sums * places).sum()


def check_meta(world: World, is_meta: bool) -> None:
    """Raise EMISMATCH on all ranks where some have the model on the meta device, and some not.

    Parameters
    ----------
    world : World
        The ranks; all of them call this alike.
    is_meta : bool
        Whether it is there on this rank.
    """
    everyones = world.all_gather(torch.tensor([is_meta], dtype=torch.uint8)).flatten()
    if (everyones != everyones[0]).any():
        raise PenstockError(
            "EMISMATCH",
            f"the model is on the meta device on rank {int(everyones.argmax())} and has values on "
            f"rank {int(everyones.argmin())}: build it alike on all ranks",
        )


def broadcast(world: World, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Give all ranks these parameters, and all buffers, as rank 0 has them.

    Parameters
    ----------
    world : World
        The ranks; all of them call this alike.
    model : nn.Module
        With parameters of the same names, shapes and dtypes on all ranks.
    parameters : dict of str and nn.Parameter
        Those of it that are to be the same.
    """
    if world.mesh is None:
        return
    _check_buffers(world, model)
    # Within each replica, then from the first one to the others.
    groups = [world.mesh.get_group(dim) for dim in world.ranks.dims]
    with torch.no_grad():
        for tensor in (*parameters.values(), *model.buffers()):
            own = local_of(tensor).detach()
            octets = own.contiguous().view(-1).view(torch.uint8)
            for group in (*groups, *(world.axes.replicas_of(tensor) if world.axes else ())):
                dist.broadcast(octets, group=group, group_src=0)
            own.copy_(octets.view(own.dtype).view(own.shape))


def _check_buffers(world: World, model: nn.Module) -> None:
    kinds = [(name, b.shape, b.dtype, b.device.type) for name, b in model.named_buffers()]
    digest = hashlib.sha256(repr(kinds).encode()).digest()
    everyones = world.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    for rank in range(world.size):
        if not torch.equal(everyones[rank], everyones[0]):
            raise PenstockError(
                "EMISMATCH",
                f"broadcast=True: the model has other buffers on rank {rank} than on rank 0 "
                "(names, shapes, dtypes or devices): build the same model on all ranks",
            )


# ---- failures -----------------------------------------------------------------------------------


class Failure(NamedTuple):
    """What failed on a rank."""

    rank: int
    text: str


def find_failure(world: World, failure: Exception | None) -> Failure | None:
    """Return what failed on the first rank where something did, the same on all ranks.

    Parameters
    ----------
    world : World
        The ranks; all of them call this alike.
    failure : Exception, optional
        What failed on this rank.
    """
    kind = "" if isinstance(failure, PenstockError) else f"{type(failure).__name__}: "
    text = f"{kind}{failure}".encode()[:_TEXT_BYTES] if failure else b""
    mine = torch.frombuffer(bytearray(text.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
    for rank, everyones in enumerate(world.all_gather(mine)):
        if everyones.any():
            return Failure(rank, bytes(everyones.tolist()).rstrip(b"\0").decode(errors="replace"))
    return None
