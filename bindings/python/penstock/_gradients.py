"""A backward: who has its gradients, what goes to the engine, and where the results go."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.variable import Variable
from torch.multiprocessing.reductions import StorageWeakRef

from penstock._engine import Engine, engine_of
from penstock._errors import PenstockError
from penstock._units import Group, Parameter, Unit
from penstock._world import as_sharded, local_of

if TYPE_CHECKING:
    from penstock._hooks import Use

_logger = logging.getLogger("penstock")


class _Ending:
    """Ends a backward when autograd calls it; autograd drops it uncalled if that is broken off."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()


def _outside_transforms() -> AbstractContextManager[object]:
    """Leave torch.func's transforms, if any: tensors that are made here are the engine's own."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


class Backward:
    """The backwards of an engine, one at a time.

    Parameters
    ----------
    engine : Engine
        Whose backwards.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = False
        self._ending: weakref.ref[_Ending] | None = None
        self._is_broken = False
        self._reduces = False
        self._held: list[Unit] = []

    def begin(self) -> None:
        """Begin a backward, unless one runs; it ends with autograd's outermost graph."""
        self._engine.refuse_capture()
        if self._running:
            self._check_running()
            return
        self._engine.refuse_stream("runs a backward")
        self._running = True
        self._refuse_in_forward()
        self._reduces = self._engine.sync
        with self._breaking_off(), _outside_transforms():
            for group in self._engine.groups():
                group.arrived.expected = sum(p.full.requires_grad for p in group.trainable)
                if self._reduces:
                    _offer_old_gradient(self._engine, group)
                else:
                    group.keep_gradients()
            self._engine.native.begin_backward(self._reduces)
        ending = _Ending(self._end)
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

    def _dropped(self, ending: weakref.ref[_Ending]) -> None:
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
        lost = [p.name for group in self._engine.groups() for p in _give_up(self._engine, group)]
        for group in self._engine.groups():
            _give_back(group)
        if lost:
            _warn_of_lost(self._engine, lost)

    def _refuse_in_forward(self) -> None:
        if self._engine.depth > 0:
            raise PenstockError(
                "ESTATE",
                f"a backward inside the forward of the sharded model {self._engine.name} reached "
                "its parameters: use torch.autograd.grad with respect to inputs there, and call "
                "backward behind the forward; after a forward that was interrupted, run another",
            )

    def _check_running(self) -> None:
        if self._ending is None or self._ending() is None:
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
        unit.in_backward = True
        unit.backward_task = torch._C._current_graph_task_id()
        self._held.append(unit)
        for group in unit.groups:
            group.complete = False
        unit.hold()

    def got_gradients(self, group: Group) -> None:
        """Take a group's gradients, which autograd has finished, once all of them are there."""
        self.begin()
        if len(group.arrived.indices) < group.arrived.expected:
            return
        if self._is_nested(group.unit):
            return
        self._report(group)
        group.complete = True
        if self._may_release(group.unit):
            self._release(group.unit)

    def reached_inputs(self, use: Use) -> None:
        """End a use: the gradients of its inputs are there, nothing of its backward is left."""
        unit = use.unit
        unit.active.discard(use)
        unit.pending.discard(use)
        if unit.active:
            return
        if not unit.pending:
            for group in unit.groups:
                if group.arrived.indices:
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
            group.arrived.indices.clear()
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

    def _report(self, group: Group) -> None:
        group.arrived.indices.clear()
        if not self._reduces:
            return
        sources = [_dense(parameter.full.grad) for parameter in group.parameters]
        group.drop_gradients()
        self._engine.native.gradients(group.index, sources)

    def _end(self) -> None:
        with self._breaking_off(), _outside_transforms():
            self._finish()
        if self._reduces:
            _call_hooks(self._engine)

    def _finish(self) -> None:
        self._engine.refuse_stream("ends a backward")
        groups = self._engine.groups()
        for group in groups:
            group.arrived.expected = 0
            if any(parameter.full.grad is not None for parameter in group.trainable):
                self._report(group)
        for unit in list(self._held):
            unit.active.clear()
            self._release(unit)
        self._engine.native.end_backward()
        if self._reduces:
            for group in groups:
                _show_gradient(self._engine, group)
        self._running = False


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or gradient.layout == torch.strided:
        return gradient
    return gradient.to_dense()


# ---- the flat gradient of a group ---------------------------------------------------------------
#
# It lives as long as some parameter's .grad shows a part of it: the engine has it during a backward
# only, and here is a weak reference. So zero_grad(set_to_none=True) frees it.
#
# While a backward runs that reduces, no shard has a .grad: what a graph puts there that uses shards
# themselves (a penalty over them) is a tensor of its own, and is added when the backward has ended.


@torch.no_grad()
def _show_gradient(engine: Engine, group: Group) -> None:
    flat = engine.native.take_gradient(group.index)
    if flat is not None:
        group.gradient = StorageWeakRef(flat.untyped_storage())
        for parameter in group.trainable:
            if parameter.sharded.requires_grad and engine.native.has_gradient(parameter.index):
                group.old.pop(parameter, None)  # is in it
                rows = flat.as_strided(*parameter.rows)
                like = local_of(parameter.sharded)
                _add_and_set(parameter, as_sharded(rows, parameter.layout, like))
    _give_back(group)


@torch.no_grad()
def _call_hooks(engine: Engine) -> None:
    for parameter in engine.parameters():
        hooks = parameter.sharded._post_accumulate_grad_hooks
        is_wanted = hooks and parameter.sharded.requires_grad
        if is_wanted and engine.native.has_gradient(parameter.index):
            for hook in list(hooks.values()):
                hook(parameter.sharded)


def _give_up(engine: Engine, group: Group) -> list[Parameter]:
    """Forget what was there before the backward if that has been added to it."""
    if not engine.native.has_written(group.index):
        return []
    lost = list(group.old)
    group.old.clear()
    return lost


def _warn_of_lost(engine: Engine, names: list[str]) -> None:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    _logger.warning(
        "%s: a backward failed when it had been added to the gradients of %s%s: these are None "
        "now. Call zero_grad() and begin the accumulation anew, on all ranks",
        engine.name,
        ", ".join(names[:5]),
        more,
    )


@torch.no_grad()
def _give_back(group: Group) -> None:
    """Show what was there before the backward, where it has brought nothing else."""
    for parameter, gradient in group.old.items():
        _add_and_set(parameter, gradient)
    group.old.clear()


def _add_and_set(parameter: Parameter, gradient: torch.Tensor) -> None:
    if parameter.sharded.grad is not None:
        gradient.add_(parameter.sharded.grad)
    parameter.sharded.grad = gradient


def _offer_old_gradient(engine: Engine, group: Group) -> None:
    """Let the next reduction add to the gradients that the parameters have, if any."""
    group.old = {p: p.sharded.grad for p in group.trainable if p.sharded.grad is not None}
    if not group.old:
        return
    _add_to(engine, group, [(p, local_of(gradient)) for p, gradient in group.old.items()])
    for parameter in group.old:
        parameter.sharded.grad = None


@torch.no_grad()
def _add_to(engine: Engine, group: Group, old: list[tuple[Parameter, torch.Tensor]]) -> None:
    flat = _flat_of(group, [gradient for _, gradient in old])
    if flat is None:
        flat = torch.zeros(group.gradient_elements, dtype=group.dtype, device=group.shard.device)
    shared = flat.untyped_storage()._cdata
    shown = {parameter for parameter, _ in old}
    for parameter, gradient in old:
        if gradient.untyped_storage()._cdata != shared:
            flat.as_strided(*parameter.rows).copy_(gradient)
    for parameter in group.trainable:
        if parameter not in shown:
            flat.as_strided(*parameter.rows).zero_()
    engine.native.set_gradient(group.index, flat)


def _flat_of(group: Group, gradients: list[torch.Tensor]) -> torch.Tensor | None:
    if group.gradient is None or group.gradient.expired():
        return None
    for gradient in gradients:
        storage = gradient.untyped_storage()
        if storage._cdata == group.gradient.cdata:
            return torch.empty(0, dtype=group.dtype, device=group.shard.device).set_(
                storage, 0, (group.gradient_elements,), (1,)
            )
    return None


@contextmanager
def no_sync(model: nn.Module | None = None) -> Iterator[None]:
    """Backwards in this context do not reduce: whole gradients stay on each rank.

    The first backward after it that reduces takes them along. Until then they are not in
    ``parameter.grad``, and ``zero_grad`` does not touch them. They add up in the more precise of
    the dtypes of gathering and of reducing. A backward that is broken off takes them with it: begin
    the accumulation anew.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out while only one lives.
    """
    engine = engine_of(model)
    before, engine.sync = engine.sync, False
    try:
        yield
    finally:
        engine.sync = before
