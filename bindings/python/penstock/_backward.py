"""The backwards of an engine: what holds units in them, reports gradients, and breaks them off."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NoReturn, Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.variable import Variable

from penstock import _C
from penstock._errors import PenstockError
from penstock._gradients import (
    call_hooks,
    give_up,
    offer_old_gradients,
    restore_gradients,
    show_gradients,
)
from penstock._phases import Phases
from penstock._units import Group, Parameter, Unit, Use
from penstock._updates import Updater, begin_updates

_logger = logging.getLogger("penstock")


class Passes(Protocol):
    """An engine, as far as its backwards ask and tell it."""

    name: str
    native: _C.Engine
    units: list[Unit]
    root: Unit
    phases: Phases
    updaters: weakref.WeakSet[Updater]
    sync: bool
    depth: int
    is_captured: bool
    broken_backwards: int

    def groups(self) -> list[Group]:
        """All groups."""

    def parameters(self) -> list[Parameter]:
        """All parameters."""

    def refuse_capture(self) -> None:
        """Raise an error inside somebody else's capture."""

    def refuse_stream(self, doing: str) -> None:
        """Raise an error on another stream than the engine's."""

    def add_to_captured(self) -> None:
        """Note that a backward within a capture may add to gradients."""


def _outside_transforms() -> AbstractContextManager[object]:
    """Leave torch.func's transforms, if any: tensors that are made here are the engine's own."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


class Backward:
    """The backwards of an engine, one at a time."""

    def __init__(self, engine: Passes) -> None:
        self._engine = engine
        self._running = False
        self._ending: weakref.ref[partial[None]] | None = None
        self._is_broken = False
        self._reduces = False
        self._held: list[Unit] = []

    def begin(self) -> None:
        """Begin a backward, unless one runs; it ends with autograd's outermost graph."""
        self._engine.refuse_capture()
        if self._running:
            if self._ending is None or self._ending() is None:
                self._refuse_broken()
            return
        self._engine.refuse_stream("runs a backward")
        self._engine.phases.begin("backward")
        self._running = True
        self._refuse_in_forward()
        if self._engine.is_captured:
            self._engine.add_to_captured()
        self._reduces = self._engine.sync
        groups = self._engine.groups()
        with self._breaking_off(), _outside_transforms():
            for group in groups:
                group.arrived.expected = sum([p.full.requires_grad for p in group.trainable])
                if not self._reduces:
                    group.keep_gradients()
            if self._reduces:
                offer_old_gradients(self._engine.native, groups)
            self._engine.native.begin_backward(self._reduces)
            if self._reduces and self._engine.updaters:
                begin_updates(self._engine.native, self._engine.updaters, groups)
        # Autograd calls it at the end, and drops it uncalled if the backward is broken off.
        ending = partial(self._end)
        self._ending = weakref.ref(ending, self._dropped)
        Variable._execution_engine.queue_callback(ending)

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """Break the backward off where something fails."""
        try:
            yield
        except BaseException:
            self.break_off()
            raise

    def _dropped(self, ending: weakref.ref[partial[None]]) -> None:
        """Show the shards again if that backward was broken off: its caller may look at them."""
        if self._running and ending is self._ending:
            self.break_off()
            self._held.clear()
            for unit in self._engine.units:
                unit.reset()

    def break_off(self) -> None:
        """Show the gradients of before, but for those that a failed backward has been added to.

        Those are given up: reductions on their way may still write to them, and what a part of a
        backward was added to is nobody's gradient.
        """
        if not self._running or self._is_broken:
            return
        self._is_broken = True
        self._engine.broken_backwards += 1
        groups = self._engine.groups()
        lost = [p.name for group in groups for p in give_up(self._engine.native, group)]
        restore_gradients(groups)
        if lost:
            _warn_of_lost(self._engine.name, lost)
        updated = [group for group in groups if self._engine.native.is_updated(group.index)]
        for updater in self._engine.updaters:
            updater.break_off({id(p.sharded) for group in updated for p in group.trainable})
        if updated:
            _logger.warning(
                "%s: a backward failed that updates parameters: some may be updated, some not",
                self._engine.name,
            )

    def _refuse_in_forward(self) -> None:
        if self._engine.depth > 0:
            raise PenstockError(
                "ESTATE",
                f"a backward inside the forward of the sharded model {self._engine.name} reached "
                "its parameters: use torch.autograd.grad with respect to inputs there, and call "
                "backward behind the forward; after a forward that was interrupted, run another",
            )

    def _refuse_broken(self) -> NoReturn:
        raise PenstockError(
            "ESTATE",
            f"a backward of the sharded model {self._engine.name} was broken off: "
            "run a forward before the next backward",
        )

    def reach(self, unit: Unit) -> None:
        """Note that the backward gets to a unit: hold it, if it needs its parameters."""
        if unit.forward_only and not unit.read_by_root:
            self.begin()
        else:
            self.hold(unit)
        if unit is self._engine.root:
            for other in self._engine.units:
                if other.read_by_root:
                    self.hold(other)

    def hold(self, unit: Unit) -> None:
        """Hold a unit until its gradients are there."""
        self.begin()
        if unit.in_backward:
            return
        self._engine.phases.begin_backward(unit)
        unit.in_backward = True
        unit.backward_task = torch._C._current_graph_task_id()
        self._held.append(unit)
        for group in unit.groups:
            group.complete = False
        unit.hold()

    def got_gradients(self, group: Group) -> None:
        """Take a group's gradients, which autograd has finished, once all of them are there."""
        self.begin()
        if group.arrived.count < group.arrived.expected:
            return
        if self._is_nested(group.unit):
            return
        self._report(group)
        group.complete = True
        if self._may_release(group.unit):
            self._release(group.unit)

    def reached_inputs(self, unit: Unit, use: Use) -> None:
        """End a use: the gradients of its inputs are there, nothing of its backward is left."""
        unit.active.discard(use)
        unit.pending.discard(use)
        if unit.active:
            return
        if not unit.pending:
            for group in unit.groups:
                if group.arrived.count:
                    self._report(group)
        if unit.in_backward and not unit.read_by_root:
            self._release(unit)

    def abandon(self) -> None:
        """Forget a backward that was broken off."""
        if not self._running:
            return
        self._running = self._is_broken = False
        self._held.clear()
        for group in self._engine.groups():
            group.old.clear()
            group.arrived.clear()
            group.arrived.expected = 0
            group.drop_gradients()

    def _may_release(self, unit: Unit) -> bool:
        if not unit.in_backward or unit.active:
            return False
        if unit is self._engine.root or (unit.read_by_root and unit.has_frozen):
            # Between the root's gradients lie the blocks, and checkpoints that are run anew: what
            # has no gradient, or one of another graph, may still be needed.
            return False
        return all(group.complete or group.arrived.expected == 0 for group in unit.groups)

    def _is_nested(self, unit: Unit) -> bool:
        """Whether a graph inside the backward's own runs, and the latter may use the unit, too.

        A reentrant checkpoint has such a graph, at the end of which gradients are there although
        others are still to come.
        """
        if unit is not self._engine.root and not unit.read_by_root:
            return False
        return unit.in_backward and unit.backward_task != torch._C._current_graph_task_id()

    def _release(self, unit: Unit) -> None:
        unit.in_backward = False
        self._held.remove(unit)
        unit.drop()
        self._engine.phases.end("backward", unit)

    def _report(self, group: Group) -> None:
        group.arrived.clear()
        if not self._reduces:
            return
        self._engine.native.gradients(group.index)
        if group.keeps:
            group.drop_gradients()

    def _end(self) -> None:
        with self._breaking_off(), _outside_transforms():
            self._finish()
        if self._reduces:
            call_hooks(self._engine.native, self._engine.parameters())
        self._engine.phases.end("backward")

    def _finish(self) -> None:
        self._engine.refuse_stream("ends a backward")
        groups = self._engine.groups()
        for group in groups:
            group.arrived.expected = 0
        for index in self._engine.native.unreported():
            self._report(groups[index])
        for unit in list(self._held):
            unit.active.clear()
            self._release(unit)
        self._engine.native.end_backward()
        if self._reduces:
            show_gradients(self._engine.native, groups)
            for updater in self._engine.updaters:
                updater.note_gradients()
        self._running = False


def _warn_of_lost(name: str, parameters: list[str]) -> None:
    more = f" and {len(parameters) - 5} more" if len(parameters) > 5 else ""
    _logger.warning(
        "%s: a backward failed when it had been added to the gradients of %s%s: these are None "
        "now. Call zero_grad() and begin the accumulation anew, on all ranks",
        name,
        ", ".join(parameters[:5]),
        more,
    )
