"""What is read of a unit outside of its own forward.

The modules beside the blocks are units of their own, whole while they run. The model's own forward
may use their parameters without calling them (logits from an embedding's weight, a loss that takes
the head's): then they are whole from there until the model's forward, and its backward, are done.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._compile import _disable_dynamo

from penstock._engine import Engine
from penstock._units import Unit


class _Reads(dict[str, Any]):
    """A module's parameters; reading one while its unit is not whole tells the engine."""

    def __init__(self, parameters: dict[str, Any], engine: Engine, unit: Unit) -> None:
        super().__init__(parameters)
        self._engine = engine
        self._unit = unit

    def __getitem__(self, name: str) -> Any:
        if not self._unit.whole:
            _read(self._engine, self._unit)
        return super().__getitem__(name)


def watch(engine: Engine) -> None:
    """Notice what the model reads of the units beside its blocks.

    Parameters
    ----------
    engine : Engine
        The engine of the model.
    """
    for unit in engine.units:
        if unit.beside_blocks:
            for module in _holders(unit):
                module._parameters = _Reads(module._parameters, engine, unit)


def _holders(unit: Unit) -> set[nn.Module]:
    parameters = (parameter for group in unit.groups for parameter in group.parameters)
    return {module for parameter in parameters for module, _ in parameter.places}


@_disable_dynamo
def _read(engine: Engine, unit: Unit) -> None:
    if engine.root.in_backward:  # the model's forward is run anew
        unit.read_by_root = True
        engine.backward.hold(unit)
    else:
        engine.hold_for_root(unit)
