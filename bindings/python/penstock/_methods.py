"""Methods that use a unit's parameters as its forward does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any

from torch import nn

from penstock._arguments import refuse
from penstock._engine import Engine
from penstock._hooks import after_forward, before_forward
from penstock._units import Unit

Found = tuple[Unit, str]


def find_methods(names: Any, units: list[Unit]) -> list[Found]:
    """Find the units that have methods of these names; raise where one is nobody's.

    Parameters
    ----------
    names : str or iterable of str
        As `shard` was called.
    units : list of Unit
        Those of the model.

    Returns
    -------
    list of (Unit, str)
    """
    wanted = [names] if isinstance(names, str) else names
    if not isinstance(wanted, Iterable):
        refuse("forward_methods", names, "give names of methods, as 'generate'")
    found = [(name, [unit for unit in units if _has(unit.module, name)]) for name in wanted]
    for name, having in found:
        if not having:
            refuse("forward_methods", names, f"{name!r} is no method of the model or of a block")
    return [(unit, name) for name, having in found for unit in having]


def _has(module: nn.Module, name: Any) -> bool:
    return isinstance(name, str) and callable(getattr(type(module), name, None))


def install(engine: Engine, found: list[Found]) -> None:
    """Let methods run as forwards of the units that have them.

    Parameters
    ----------
    engine : Engine
        The engine of the model.
    found : list of (Unit, str)
        As `find_methods` returned them.
    """
    for unit, name in found:
        method = getattr(unit.module, name)
        # It can be asked for its signature as before.
        wrapped = update_wrapper(partial(run_as_forward, engine, unit, method), method)
        unit.module.__dict__[name] = wrapped


def run_as_forward(
    engine: Engine, unit: Unit, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a method between what happens before and after a forward of its unit."""
    if engine.runs(unit):
        return method(*args, **kwargs)
    marked = before_forward(engine, unit, unit.module, args, kwargs)
    args, kwargs = (args, kwargs) if marked is None else marked
    try:
        output = method(*args, **kwargs)
    except BaseException:
        after_forward(engine, unit, unit.module, args, None)
        raise
    copied = after_forward(engine, unit, unit.module, args, output)
    return output if copied is None else copied
