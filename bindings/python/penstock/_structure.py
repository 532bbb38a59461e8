"""The modules of a model and where they have parameters, so that what is added later is noticed."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from penstock._errors import PenstockError


class Structure:
    """What a model was made of when it was sharded.

    Parameters
    ----------
    model : nn.Module
        The root.
    is_sharded : callable
        Whether a module was sharded by itself.
    """

    def __init__(self, model: nn.Module, is_sharded: Callable[[nn.Module], bool]) -> None:
        self._model = model
        self._places = {
            (id(module), attribute)
            for module in model.modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        }
        self._is_sharded = is_sharded
        self._note()

    def refuse_added(self) -> None:
        """Raise if the model has got a parameter that is not sharded: no rank would know another's.

        Modules without parameters may come, and any may go.
        """
        if self._is_as_noted():
            return
        self._look("", self._model)
        self._note()

    def _note(self) -> None:
        self._modules = list(self._model.modules())
        self._children = [dict(module._modules) for module in self._modules]
        self._counts = [len(module._parameters) for module in self._modules]
        self._absent = [
            (module, attribute)
            for module in self._modules
            for attribute, parameter in module._parameters.items()
            if parameter is None
        ]

    def _is_as_noted(self) -> bool:
        """Compare without a walk, which would take longer than all else at the begin of a pass."""
        return (
            [module._modules for module in self._modules] == self._children
            and [len(module._parameters) for module in self._modules] == self._counts
            and all(module._parameters.get(name) is None for module, name in self._absent)
        )

    def _look(self, prefix: str, module: nn.Module) -> None:
        for attribute, parameter in module._parameters.items():
            if parameter is not None and (id(module), attribute) not in self._places:
                raise PenstockError(
                    "ESTATE",
                    f"parameter {prefix + attribute!r} was added after shard, so that each rank "
                    "would train it alone: add it before penstock.shard(model)",
                )
        for name, child in module.named_children():
            if not self._is_sharded(child):
                self._look(f"{prefix}{name}.", child)
