"""Models that are sharded on the meta device: where their shards lie, and until they have values.

Rows without values have all their bits set, which is NaN in any floating-point dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock import _C
from penstock._agree import check_equal_along_axes, find_failure
from penstock._arguments import refuse
from penstock._errors import PenstockError
from penstock._units import Parameter
from penstock._world import World

_UNSET = 255  # a byte


def choose_device(device: Any, lies_on: torch.device) -> torch.device:
    """Return where the shards of a model are to lie.

    Parameters
    ----------
    device : torch.device, str, int or None
        As `shard` was called.
    lies_on : torch.device
        Where the model is: elsewhere than on the meta device, its shards stay there.
    """
    if lies_on.type != "meta":
        if device is not None and _named(device) != lies_on:
            refuse("device", device, f"the model is on {lies_on}: move it before shard")
        return lies_on
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _named(device)


def _named(device: Any) -> torch.device:
    """Return the device with its number, where it has one."""
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        refuse("device", device, f"give a torch.device or its name ({error})")
    if named.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if named.type != "cuda" or (named.index or 0) >= count:
        refuse(
            "device",
            device,
            f"shards lie on 'cpu' or on one of the GPUs, of which here are {count}",
        )
    return torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)


@torch.no_grad()
def unset(rows: torch.Tensor) -> None:
    """Mark rows as without values."""
    rows.detach().view(torch.uint8).fill_(_UNSET)


class Awaited:
    """The values that a model has to get before its first forward.

    Parameters
    ----------
    world : World
        The ranks.
    model : nn.Module
        The root.
    parameters : list of Parameter
        Sharded, and without values yet.
    """

    def __init__(self, world: World, model: nn.Module, parameters: list[Parameter]) -> None:
        self._world = world
        self._model = model
        self._versions = {parameter: _version(parameter) for parameter in parameters}

    def refuse_missing(self, native: _C.Engine) -> None:
        """Raise on all ranks, which call this alike, where a rank has not got all values."""
        if self._world.size > 1:
            native.drain()  # no collective of the engine's is on its way
        text = self._missing_parameters() or self._missing_buffers()
        failure = find_failure(self._world, PenstockError("ESTATE", text) if text else None)
        if failure is not None:
            raise PenstockError("ESTATE", failure.text)
        check_equal_along_axes(self._world, {p.name: p.sharded for p in self._versions})

    def _missing_parameters(self) -> str:
        names = [p.name for p, version in self._versions.items() if not _has_values(p, version)]
        if not names:
            return ""
        more = f", and {len(names) - 1} more have none" if len(names) > 1 else ""
        return (
            f"parameter {names[0]!r} of {type(self._model).__name__} has no values yet{more}: it "
            "was sharded on the meta device. Load it (penstock.load, load_state_dict) or "
            "initialise it (reset_parameters, init_weights) before its first forward"
        )

    def _missing_buffers(self) -> str:
        for name, buffer in self._model.named_buffers():
            if buffer.is_meta:
                return (
                    f"buffer {name!r} of {type(self._model).__name__} is on the meta device yet: "
                    "assign a tensor to it; or, before anything is loaded, call "
                    f"model.to_empty(device={str(self._world.device)!r}), which empties all "
                    "buffers, and initialise them"
                )
        return ""


def _version(parameter: Parameter) -> int:
    return parameter.sharded._version + parameter.local._version


@torch.no_grad()
def _has_values(parameter: Parameter, unset_version: int) -> bool:
    """Whether it was written; of a process alone, torch does not count writes to ``.data``."""
    rows = parameter.local.detach()
    if _version(parameter) != unset_version or rows.numel() == 0:
        return True
    return int(rows.view(torch.uint8).amin()) != _UNSET
