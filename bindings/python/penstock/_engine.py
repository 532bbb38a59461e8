"""The engine of one sharded model: its ranks, units and passes."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.variable import Variable
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from penstock import _C
from penstock._arguments import Options, check_model
from penstock._checkpoint import Checkpointed
from penstock._errors import PenstockError, refuse_copy
from penstock._frames import has_ended, module_call
from penstock._gradients import (
    call_hooks,
    give_up,
    offer_old_gradients,
    restore_gradients,
    show_gradients,
)
from penstock._keeping import Keeping
from penstock._meta import Awaited
from penstock._native import move_shard, open_native
from penstock._phases import Phases
from penstock._structure import Structure
from penstock._units import Group, Parameter, Unit, Use
from penstock._updates import Updater, begin_updates
from penstock._world import World, local_of, stream_of

_ATTRIBUTE = "_penstock_engine"
_logger = logging.getLogger("penstock")
_live: weakref.WeakSet[Engine] = weakref.WeakSet()


class GraphOwner(Protocol):
    """Who has CUDA graphs of an engine's passes."""

    def drop_graphs(self) -> None:
        """Destroy them: the engine ends, or another one takes its place."""


class Engine:
    """What Penstock knows of one sharded model.

    Parameters
    ----------
    model : nn.Module
        The root.
    world : World
        Its ranks.
    runtime, native
        The C runtime and engine.
    units : list of Unit
        The root first, then the others in the order of ``model.modules()``.
    options : Options
        As `shard` was called.
    checkpointed : list of Checkpointed
        Its blocks that recompute their activations, or may do so.
    keeping : Keeping, optional
        What decides which of them do; None: they were given by hand.

    Attributes
    ----------
    stage : int
        1, 2 or 3.
    optimizer_steps : int
        How often an optimizer of torch's has stepped some of its parameters.
    input_dtype : torch.dtype, optional
        Floating-point inputs of units are cast to it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        runtime: _C.Runtime,
        native: _C.Engine,
        units: list[Unit],
        options: Options,
        checkpointed: list[Checkpointed],
        keeping: Keeping | None,
    ) -> None:
        self.name = type(model).__name__
        self.world = world
        self.runtime = runtime
        self.native = native
        self.on_gpu = world.device.type == "cuda"
        self.stream = stream_of(world.device)
        self.closed = False
        self.units = units
        self.root = units[0]
        self.options = options
        self.checkpointed = checkpointed
        self.keeping = keeping
        self.awaited: Awaited | None = None  # of a model that was sharded without values
        self.optimizer_steps = 0
        self.stage = options.stage
        self.input_dtype = options.param_dtype
        self.reference = weakref.ref(self)
        self.depth = 0  # forwards of units that run, inside each other
        self._outermost: FrameType | None = None  # the call of the first of them
        self.read: list[Unit] = []  # held because the root's forward, which runs, has read them
        self.sync = True  # whether backwards reduce
        self.broken_backwards = 0
        self.phases = Phases(units, world.roll.page)
        self.is_captured = False  # what runs becomes a part of a CUDA graph
        self.gradients_before: dict[int, bool] = {}  # by address: whether it may add to them
        self.has_added = False  # to one of them, in the latest capture
        self.graph_owners: weakref.WeakSet[GraphOwner] = weakref.WeakSet()
        self.updaters: weakref.WeakSet[Updater] = weakref.WeakSet()  # of its parameters
        self.plans: dict[bool, object] = {}  # in force, for training and for evaluation
        self.backward = Backward(self)
        self._parameters = [p for group in self.groups() for p in group.parameters]
        self._note_shards()
        self._structure = Structure(model, is_sharded)
        self._ids = {id(p.sharded) for p in self._parameters}
        self.whole_ids = {id(p.full) for p in self._parameters}
        world.roll.follow(self.phases.where)
        runtime.follow(world.roll.pages)
        model.__dict__[_ATTRIBUTE] = self
        if keeping is not None:
            keeping.attach(self)
        _live.add(self)

    def groups(self) -> list[Group]:
        """All groups, in the order of registration."""
        return [group for unit in self.units for group in unit.groups]

    def parameters(self) -> list[Parameter]:
        """All parameters, in the order of registration."""
        return self._parameters

    def gradient_addresses(self) -> list[int | None]:
        """Return where the storage of each parameter's gradient lies; None: it has none."""
        # Ranks without rows of a parameter have a storage as well.
        gradients = [parameter.sharded.grad for parameter in self._parameters]
        return [
            None if gradient is None else local_of(gradient).untyped_storage().data_ptr()
            for gradient in gradients
        ]

    # ---- forward ------------------------------------------------------------------------------

    def refuse_capture(self) -> None:
        """Raise an error inside a CUDA-graph capture of somebody else's."""
        if self.on_gpu and not self.is_captured and torch.cuda.is_current_stream_capturing():
            raise PenstockError(
                "ESTATE",
                f"a sharded unit of {self.name} runs under CUDA-graph capture, which does not know "
                "of its communication: capture what lies inside of units or outside, or have "
                "penstock.step capture the whole step",
            )

    def refuse_stream(self, doing: str) -> None:
        """Raise an error unless the engine's stream is current: no other one waits for it."""
        if stream_of(self.world.device) != self.stream:
            raise PenstockError(
                "ESTATE",
                f"{self.name} {doing} on another CUDA stream than the one that was current at "
                "shard: train on that one",
            )

    @contextmanager
    def captured(self, stream: torch.cuda.Stream, lasting: Collection[int]) -> Iterator[None]:
        """Make passes inside of it parts of the graph that `stream` is captured into.

        It may add to gradients at the addresses in `lasting`: they are there in each launch.
        """
        outside, self.stream = self.stream, stream_of(self.world.device)
        before = {address for address in self.gradient_addresses() if address is not None}
        self.gradients_before = {address: address in lasting for address in before}
        self.has_added = False
        self.native.begin_capture(stream.cuda_stream)
        self.is_captured = is_broken = True
        try:
            yield
            is_broken = False
        finally:
            self.is_captured = False
            self.gradients_before = {}
            self.stream = outside
            with suppress(PenstockError) if is_broken else nullcontext():
                self.native.end_capture()

    def enter(self, unit: Unit) -> None:
        """Begin a unit's forward, and hold the unit; the outermost forward begins a pass."""
        is_root = unit is self.root and not self.runs(unit)
        if is_root or self.depth == 0 or has_ended(self._outermost):
            self._begin_forward()
            self._outermost = module_call()
        unit.hold()
        self.depth += 1  # last: a forward that failed to begin does not end

    def runs(self, unit: Unit) -> bool:
        """Whether a forward of the unit runs."""
        is_in_pass = self._outermost is not None and not has_ended(self._outermost)
        return is_in_pass and bool(unit.calls)

    def end_pass(self) -> None:
        """End the forward of a pass: the outermost unit's has ended."""
        self._outermost = None
        self.native.end_forward()
        if self._versions() != self._known_versions:
            raise PenstockError(
                "ESTATE",
                f"shards of {self.name} were written while its forward ran, which may have used "
                "values of before: write to them (a momentum encoder, say) before the forward",
            )

    def hold_for_root(self, unit: Unit) -> None:
        """Hold a unit until the root's forward, which uses it itself, and its backward are done."""
        if not self.root.calls:
            return
        unit.read_by_root = True
        if not unit.whole:
            unit.hold()
            self.read.append(unit)

    def drop_read(self) -> None:
        """End the uses of what the root's forward has read: it has ended."""
        for unit in self.read:
            unit.drop()
        self.read.clear()

    def _begin_forward(self) -> None:
        if self.closed:
            raise PenstockError("ESTATE", f"the sharded model {self.name} was closed")
        self.refuse_stream("runs")
        self.depth = 0
        self.read.clear()
        self.backward.abandon()
        for unit in self.units:
            unit.reset()
        for unit in self.units:
            unit.refuse_replaced()
        self.native.refuse_written()
        self._structure.refuse_added()
        if self.awaited is not None:
            self.awaited.refuse_missing(self.native)
            self.awaited = None
        self._check_shards()
        trains = torch.is_grad_enabled()
        if trains and self.keeping is not None:
            self.keeping.begin_pass()
        self.native.begin_forward(trains)

    def _check_shards(self) -> None:
        for parameter in self._parameters:
            parameter.refuse_changed()
        changed = [p for p in self._parameters if p.sharded.requires_grad != p.full.requires_grad]
        if changed:
            self._follow_requires_grad(changed)
        # The shards of a process alone are plain tensors, whose .data nobody counts writes to.
        if self.world.mesh is None or self._versions() != self._known_versions:
            self.updated()

    def _follow_requires_grad(self, changed: list[Parameter]) -> None:
        thawed = [p for p in changed if p.sharded.requires_grad and not p.trainable]
        if thawed:
            self._reopen(thawed)
        for parameter in changed:
            parameter.full.requires_grad_(parameter.sharded.requires_grad)

    def _reopen(self, thawed: list[Parameter]) -> None:
        """Open another engine, with memory for the gradients of parameters that were frozen.

        All ranks come here alike: they have the same parameters to train.
        """
        if self.phases.is_on:
            raise PenstockError(
                "ESTATE",
                f"parameter {thawed[0].name!r} was unfrozen within penstock.trace, and another "
                "engine begins for it: unfreeze it before the trace",
            )
        for parameter in thawed:
            if parameter.dtype.itemsize == 1:
                raise PenstockError(
                    "EUNSUPPORTED",
                    f"parameter {parameter.name!r} is {parameter.dtype} and cannot be trained: "
                    "freeze it again",
                )
            parameter.trainable = True
        try:
            self.drop_graphs()
            self.native.destroy()
            self.runtime.destroy()
            self.runtime, self.native = open_native(self.name, self.options, self.world, self.units)
            self.runtime.follow(self.world.roll.pages)
            for group in self.groups():
                move_shard(self.native, group)
            for unit in self.units:
                unit.seal(self.native)
        except BaseException:
            self.close()
            raise
        self.plans.clear()
        if self.keeping is not None:
            self.keeping.begin_anew()
        self._note_shards()

    def _note_shards(self) -> None:
        self._counted = [t for p in self._parameters for t in (p.sharded, p.local)]
        self._known_versions = self._versions()

    def _versions(self) -> int:
        """Return a number that grows with every in-place operation that torch counts."""
        return _C.sum_versions(self._counted)

    def drop_graphs(self) -> None:
        """Destroy the graphs that passes were captured into: NCCL ends only behind them."""
        for owner in list(self.graph_owners):
            owner.drop_graphs()

    # ---- the shards changed ---------------------------------------------------------------------

    def stepped(self) -> None:
        """Note that an optimizer has stepped parameters."""
        self.optimizer_steps += 1
        if self.keeping is not None:
            self.keeping.note_optimizer()
        self.updated()

    def updated(self) -> None:
        """Tell the engine that the shards have new values: gathered copies are stale."""
        self.refuse_stream("is updated")
        self._known_versions = self._versions()
        self.native.updated()

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the model's sharded parameters, as optimizers or modules have it."""
        return id(parameter) in self._ids or id(parameter) in self.whole_ids

    def owns_any(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds parameters of this model."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy(self.name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self.name)

    def close(self) -> None:
        """End the engine: threads, memory and private process groups are given back.

        In a child of fork, which has only copies of them, nothing happens.
        """
        _live.discard(self)
        if self.closed:
            return
        self.closed = True
        self.phases.close()
        self.backward.break_off()
        for unit in self.units:
            unit.reset()
        self.drop_graphs()
        try:
            self.native.destroy()
        finally:
            self.world.close()
            self.runtime.destroy()


# ---- backward -----------------------------------------------------------------------------------


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
    """The backwards of an engine, one at a time."""

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
            if self._ending is None or self._ending() is None:
                self._refuse_broken()
            return
        self._engine.refuse_stream("runs a backward")
        self._engine.phases.begin("backward")
        self._running = True
        self._refuse_in_forward()
        if self._engine.is_captured:
            self._note_gradients_before()
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
        groups = self._engine.groups()
        lost = [p.name for group in groups for p in give_up(self._engine.native, group)]
        restore_gradients(groups)
        if lost:
            _warn_of_lost(self._engine.name, lost)
        if any(self._engine.native.is_updated(group.index) for group in groups):
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

    def _note_gradients_before(self) -> None:
        before = self._engine.gradients_before
        addresses = self._engine.gradient_addresses()
        added = [before[address] for address in addresses if address in before]
        self._engine.has_added |= bool(added)
        if not all(added):
            raise PenstockError(
                "EUNSUPPORTED",
                "its backward adds to gradients from before it that no captured call has made: "
                "call zero_grad() in the step",
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


# ---- the engines that live ----------------------------------------------------------------------


def engine_of(model: nn.Module | None) -> Engine:
    """Find the engine of a sharded model.

    Parameters
    ----------
    model : nn.Module or None
        The model given to ``shard``, or one wrapped around it by ``torch.compile``; None: the only
        one that lives.

    Returns
    -------
    Engine
    """
    if model is None:
        return _only_engine()
    check_model(model)
    model = getattr(model, "_orig_mod", model)
    engine = model.__dict__.get(_ATTRIBUTE)
    if engine is None:
        raise PenstockError(
            "ESTATE", f"{type(model).__name__} is not sharded: call penstock.shard(model) first"
        )
    return engine


def _only_engine() -> Engine:
    engines = list(_live)
    if len(engines) == 1:
        return engines[0]
    names = ", ".join(sorted(engine.name for engine in engines)) or "none"
    raise PenstockError("EINVAL", f"say which model: {len(engines)} sharded models live ({names})")


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` was called on this very module."""
    return _ATTRIBUTE in module.__dict__


def engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    """Find the engines whose parameters an optimizer holds."""
    return [engine for engine in _live if engine.owns_any(optimizer)]


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine in engines_of(optimizer):
        engine.phases.begin("optimizer")


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine in engines_of(optimizer):
        engine.stepped()
        engine.phases.end_optimizer()


def _close_all() -> None:
    with ExitStack() as engines:  # closes all of them, also where one raises
        for engine in _live:
            engines.callback(engine.close)


register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)
atexit.register(_close_all)
