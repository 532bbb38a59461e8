"""Updates in a backward: optimizers that take gradients behind their reductions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from penstock import _C
from penstock._units import Group


class Updater(Protocol):
    """An optimizer, as a backward sees it."""

    def owned(self) -> list[torch.Tensor]:
        """Return the parameters that it would update there."""

    def prepare_updates(self, numbers: dict[int, int]) -> list[_C.AdamWUpdates]:
        """Begin a step of these parameters, by id: each one's number in the engine."""

    def refuse_backward(self) -> None:
        """Raise an error where another backward would be wrong."""

    def note_gradients(self) -> None:
        """Look at the gradients that a backward has left."""

    def break_off(self, updated: set[int]) -> None:
        """End a backward that has failed, and has updated these parameters, by id, already."""

    def need_gradients(self, why: str) -> None:
        """Take no more part in backwards."""


def begin_updates(
    native: _C.Engine, updaters: Collection[Updater], groups: Collection[Group]
) -> None:
    """Have the backward that begins update what it may, unless somebody needs the gradients.

    Parameters
    ----------
    native : _C.Engine
        In a backward that reduces.
    updaters : collection of Updater
        Of the model.
    groups : collection of Group
        All of its groups.
    """
    why = _why_late(groups)
    for updater in updaters:
        updater.refuse_backward()
        if why is not None:
            updater.need_gradients(why)
    owners = {id(parameter): updater for updater in updaters for parameter in updater.owned()}
    numbers: dict[Updater, dict[int, int]] = {updater: {} for updater in updaters}
    for group in groups:
        own = {id(parameter.sharded): parameter.index for parameter in group.trainable}
        if own.keys() <= owners.keys() and native.may_update(group.index):
            for key, number in own.items():
                numbers[owners[key]][key] = number
    updates = [
        u for updater, some in numbers.items() if some for u in updater.prepare_updates(some)
    ]
    if updates:
        native.update(updates)


def _why_late(groups: Collection[Group]) -> str | None:
    if any(group.old for group in groups):
        return "a backward adds to gradients of before"
    if any(p.sharded._post_accumulate_grad_hooks for group in groups for p in group.trainable):
        return "parameters have hooks that take gradients"
    return None
