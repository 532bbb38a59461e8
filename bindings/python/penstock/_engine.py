"""The engine of one sharded model: its ranks, units and forwards; which engines live."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from penstock import _C
from penstock._arguments import Options, check_model
from penstock._backward import Backward
from penstock._checkpoint import Checkpointed
from penstock._errors import PenstockError, refuse_copy
from penstock._frames import has_ended, module_call
from penstock._keeping import Keeping
from penstock._meta import Awaited
from penstock._native import move_shard, open_native
from penstock._offload import Offloading
from penstock._phases import Phases
from penstock._sharded import rows_unwatched
from penstock._structure import Structure
from penstock._units import Group, Parameter, Unit
from penstock._updates import Updater
from penstock._world import World, stream_of

_ATTRIBUTE = "_penstock_engine"
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
        1, 2 or 3: the one in force.
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
        self.input_dtype = options.used_dtype
        self.reference = weakref.ref(self)
        self.offloading = Offloading(self.reference)
        self.depth = 0  # forwards of units that run, inside each other
        self._outermost: FrameType | None = None  # the call of the first of them
        self.read: list[Unit] = []  # held because the root's forward, which runs, has read them
        self.sync = True  # whether backwards reduce
        self.broken_backwards = 0
        self.phases = Phases(units, world.roll.page)
        self.is_captured = False  # what runs becomes a part of a CUDA graph
        self._gradients_before: dict[int, bool] = {}  # by address: whether it may add to them
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
        world.roll.follow()
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
            None if gradient is None else rows_unwatched(gradient).untyped_storage().data_ptr()
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
        before = {address for address in self.gradient_addresses() if address is not None}
        self.native.begin_capture(stream.cuda_stream)
        outside, self.stream = self.stream, stream_of(self.world.device)
        self._gradients_before = {address: address in lasting for address in before}
        self.has_added = False
        self.is_captured = is_broken = True
        try:
            yield
            is_broken = False
        finally:
            self.is_captured = False
            self._gradients_before = {}
            self.stream = outside
            with suppress(PenstockError) if is_broken else nullcontext():
                self.native.end_capture()

    def add_to_captured(self) -> None:
        """Note to which gradients a backward within a capture adds; raise where it may not."""
        addresses, before = self.gradient_addresses(), self._gradients_before
        added = [before[address] for address in addresses if address in before]
        self.has_added |= bool(added)
        if not all(added):
            raise PenstockError(
                "EUNSUPPORTED",
                "its backward adds to gradients from before it that no captured call has made: "
                "call zero_grad() in the step",
            )

    def enter(self, unit: Unit, rows: torch.Tensor | None) -> None:
        """Begin a unit's forward, and hold the unit; the outermost forward begins a pass.

        `rows` as for `Unit.hold`.
        """
        is_root = unit is self.root and not self.runs(unit)
        if is_root or self.depth == 0 or has_ended(self._outermost):
            self._begin_forward()
            self._outermost = module_call()
        unit.hold(rows)
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
            self._thaw(thawed)
        for parameter in changed:
            parameter.full.requires_grad_(parameter.sharded.requires_grad)

    def _thaw(self, thawed: list[Parameter]) -> None:
        """Open another engine, with memory for the gradients of parameters that were frozen.

        All ranks come here alike: they have the same parameters to train.
        """
        if self.phases.is_on:
            raise PenstockError(
                "ESTATE",
                f"parameter {thawed[0].name!r} was unfrozen within penstock.trace, and another "
                "engine begins for it: unfreeze it before the trace",
            )
        eighth = next((p for p in thawed if p.dtype.itemsize == 1), None)
        if eighth is not None:
            raise PenstockError(
                "EUNSUPPORTED",
                f"parameter {eighth.name!r} is {eighth.dtype} and cannot be trained: "
                "freeze it again",
            )
        for parameter in thawed:
            parameter.trainable = True
        self.reopen(self.options.stage, "parameters were unfrozen")
        if self.keeping is not None:
            self.keeping.begin_anew()

    @property
    def may_reopen(self) -> bool:
        """Whether nobody would notice another engine: by a trace, a graph or rows that move."""
        self.native.drain()  # the latest backward may hold rows that it updates
        is_open = any(unit.pending for unit in self.units) or any(g.keeps for g in self.groups())
        return not is_open and not self.phases.is_on and self._count_users() <= self._users

    def reopen(self, stage: int, why: str) -> None:
        """Open another engine in the place of this one, as a pass is to begin.

        Parameters
        ----------
        stage : int
            Of the other one. All ranks come here alike, outside of traces.
        why : str
            What has moved the rows, for those who hold them.
        """
        try:
            self.drop_graphs()
            self.offloading.close()
            self.native.destroy()
            self.runtime.destroy()
            options = replace(self.options, stage=stage)
            self.runtime, self.native = open_native(self.name, options, self.world, self.units)
            self.runtime.follow(self.world.roll.pages)
            for group in self.groups():
                move_shard(self.native, group, why)
            for unit in self.units:
                unit.seal(self.native)
        except BaseException:
            self.close()
            raise
        self.stage = stage
        self.plans.clear()
        self._note_shards()

    def _note_shards(self) -> None:
        self._counted = [t for p in self._parameters for t in (p.sharded, p.local)]
        self._known_versions = self._versions()
        self._users = self._count_users()

    def _count_users(self) -> int:
        return sum(parameter.count_users() for parameter in self._parameters)

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
        self.offloading.close()
        try:
            self.native.destroy()
        finally:
            self.world.close()
            self.runtime.destroy()


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
        engine.phases.end_optimizer(optimizer, engine.is_captured)


def _close_all() -> None:
    with ExitStack() as engines:  # closes all of them, also where one raises
        for engine in _live:
            engines.callback(engine.close)


register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)
atexit.register(_close_all)
