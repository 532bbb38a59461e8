"""What a sharded model does where it is loaded, moved, copied or pickled as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock._engine import Engine
from penstock._errors import PenstockError
from penstock._units import Parameter
from penstock._world import as_sharded, local_of

Held = dict[str, Parameter]  # by attribute
Function = Callable[[torch.Tensor], torch.Tensor]


def install(engine: Engine) -> None:
    """Let the modules of a model know their sharded parameters.

    Parameters
    ----------
    engine : Engine
        The engine of the model.
    """
    held: dict[nn.Module, Held] = {engine.root.module: {}}
    for parameter in engine.parameters():
        for holder, attribute in parameter.places:
            held.setdefault(holder, {})[attribute] = parameter
    for module, parameters in held.items():
        module.register_load_state_dict_pre_hook(partial(_before_load, parameters))
        module.register_load_state_dict_post_hook(partial(_after_load, engine, parameters))
        is_root = module is engine.root.module
        of_subtree = engine.parameters() if is_root else list(parameters.values())
        module.__dict__["_apply"] = partial(_apply, module, parameters, of_subtree)


# ---- loading ------------------------------------------------------------------------------------


def _before_load(
    parameters: Held, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Take this rank's rows of whole tensors: torch copies no plain tensor to a DTensor."""
    for attribute, parameter in parameters.items():
        whole = state.get(prefix + attribute)
        if not isinstance(whole, torch.Tensor) or isinstance(whole, DTensor):
            continue
        if parameter.layout is not None and whole.shape == parameter.sharded.shape:
            rows = parameter.rows_of(whole).to(local_of(parameter.sharded), copy=True)
            state[prefix + attribute] = as_sharded(rows, parameter.layout)


@torch.no_grad()
def _after_load(engine: Engine, parameters: Held, module: nn.Module, incompatible: Any) -> None:
    """After a load with ``assign=True``: copy the module's new tensors into the shards."""
    for attribute, parameter in parameters.items():
        loaded = module._parameters.get(attribute)
        if loaded is None or loaded is parameter.sharded or loaded is parameter.full:
            continue
        _copy_rows(parameter, loaded)
        parameter.show(parameter.sharded)
    engine.updated()


def _copy_rows(parameter: Parameter, loaded: torch.Tensor) -> None:
    target = local_of(parameter.sharded)
    source = local_of(loaded)
    if source.shape == parameter.sharded.shape and source.shape != target.shape:
        source = parameter.rows_of(source)
    target.copy_(source)


# ---- moves and conversions ----------------------------------------------------------------------


def _apply(
    module: nn.Module,
    sharded: Held,
    of_subtree: list[Parameter],
    function: Function,
    recurse: bool = True,
) -> nn.Module:
    """In place of ``nn.Module._apply``: sharded parameters stay what they are, where they are.

    Where the function would have them otherwise it raises, before anything is changed.
    """
    for parameter in of_subtree:
        _refuse_conversion(parameter, function)
    held = module._parameters
    module._parameters = {name: p for name, p in held.items() if name not in sharded}
    try:
        return type(module)._apply(module, function, recurse)
    finally:
        held.update(module._parameters)
        module._parameters = held


@torch.no_grad()
def _refuse_conversion(parameter: Parameter, function: Function) -> None:
    rows = local_of(parameter.sharded)
    before = rows.new_empty([2] * rows.dim())
    after = function(before)
    is_same = after.dtype == before.dtype and after.stride() == before.stride()
    devices = (before.device, parameter.full.device)  # where it lies, and where it is whole
    if not is_same or not any(_is_same_device(after.device, device) for device in devices):
        raise PenstockError(
            "ESTATE",
            f"parameter {parameter.name!r} is sharded and cannot be moved or converted (here to "
            f"{after.dtype} on {after.device}): do that before penstock.shard(model), or say there "
            "on which device= a model from the meta device is to lie",
        )


def _is_same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.type == "cpu" or one.index == other.index)
