"""What ``print(model)`` says of a sharded model: a line for the model and for each unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from penstock._engine import Engine
from penstock._units import Group


def install(engine: Engine) -> None:
    """Let the units of a model say how they are sharded, behind what they say themselves.

    Parameters
    ----------
    engine : Engine
        The engine of the model.
    """
    for unit in engine.units:
        contents = ", ".join(map(_describe, unit.groups))
        of_module = unit.module.extra_repr
        unit.module.__dict__["extra_repr"] = partial(_append, of_module, engine, contents)


def _append(extra_repr: Callable[[], str], engine: Engine, contents: str) -> str:
    replicas = engine.world.ranks.replicas
    how = f"sharded: stage={engine.stage}, ranks={engine.world.size}"
    how += f", replicas={replicas}" if replicas > 1 else ""
    offloaded = "+".join(engine.options.offloaded)
    how += f", offload={offloaded}" if offloaded else ""
    how += ", keep_copies=True" if engine.options.keep_copies else ""
    line = f"{how}, parameters={contents}" if contents else how
    return "\n".join(text for text in (extra_repr(), line) if text)


def _describe(group: Group) -> str:
    gathered = "" if group.gather_dtype == group.dtype else f" as {_name(group.gather_dtype)}"
    return f"{len(group.parameters)} ({_name(group.dtype)}{gathered})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
