"""The engine of one sharded model: its ranks, units and passes."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock import _C
from penstock._arguments import check_model
from penstock._errors import PenstockError
from penstock._native import move_shard, open_native
from penstock._options import Options
from penstock._structure import Structure
from penstock._units import Group, Parameter, Unit
from penstock._world import World, local_of, stream_of

if TYPE_CHECKING:
    from penstock._gradients import Backward
    from penstock._plan import Plan

_ATTRIBUTE = "_penstock_engine"
_live: weakref.WeakSet[Engine] = weakref.WeakSet()


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

    Attributes
    ----------
    stage : int
        1, 2 or 3.
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
    ) -> None:
        self.name = type(model).__name__
        self.world = world
        self.runtime = runtime
        self.native = native
        self.stream = stream_of(world.device)
        self.closed = False
        self.units = units
        self.root = units[0]
        self.options = options
        self.stage = options.stage
        self.input_dtype = options.param_dtype
        self.depth = 0  # forwards of units that run, inside each other
        self.read: list[Unit] = []  # held because the root's forward, which runs, has read them
        self.sync = True  # whether backwards reduce
        self.broken_backwards = 0
        self.is_traced = False
        self.plans: dict[bool, Plan] = {}  # in force, for training and for evaluation
        self.backward: Backward
        self._parameters = [p for group in self.groups() for p in group.parameters]
        self._note_shards()
        self._structure = Structure(
            model, (place for p in self._parameters for place in p.places), is_sharded
        )
        self._ids = {id(p.sharded) for p in self._parameters}
        self.whole_ids = {id(p.full) for p in self._parameters}
        model.__dict__[_ATTRIBUTE] = self
        _live.add(self)

    def groups(self) -> list[Group]:
        """All groups, in the order of registration."""
        return [group for unit in self.units for group in unit.groups]

    def parameters(self) -> list[Parameter]:
        """All parameters, in the order of registration."""
        return self._parameters

    # ---- forward ------------------------------------------------------------------------------

    def refuse_capture(self) -> None:
        """Raise an error inside a CUDA-graph capture: what a hook does is in no graph."""
        if self.world.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise PenstockError(
                "ESTATE",
                f"a sharded unit of {self.name} runs under CUDA-graph capture, and its "
                "communication cannot be captured: capture what lies inside of units, or outside",
            )

    def refuse_stream(self, doing: str) -> None:
        """Raise an error unless the engine's stream is current: no other one waits for it."""
        if stream_of(self.world.device) != self.stream:
            raise PenstockError(
                "ESTATE",
                f"{self.name} {doing} on another CUDA stream than the one that was current at "
                "shard: train on that one",
            )

    def enter(self, unit: Unit) -> None:
        """Note that a unit's forward begins; the outermost one begins a pass."""
        if unit is self.root or self.depth == 0:
            self._begin_forward()
        self.depth += 1

    def leave(self) -> None:
        """Note that a unit's forward has ended."""
        self.depth -= 1
        if self.depth > 0:
            return
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
            unit.refuse_written()
        self._structure.refuse_added()
        self._look_at_shards()
        self.native.begin_forward(torch.is_grad_enabled())

    def _look_at_shards(self) -> None:
        changed = []
        for parameter in self._parameters:
            sharded = parameter.sharded
            local = local_of(sharded)
            if local is not parameter.local or local.data_ptr() != parameter.address:
                _refuse_moved(parameter)
            if sharded.requires_grad != parameter.full.requires_grad:
                changed.append(parameter)
            if sharded._backward_hooks:
                _refuse_hooks(parameter)
        if changed:
            self._follow_requires_grad(changed)
        # The shards of a process alone are plain tensors, whose .data nobody counts writes to.
        if self.world.mesh is None or self._versions() != self._known_versions:
            self.updated()

    def _follow_requires_grad(self, changed: list[Parameter]) -> None:
        thawed = [p for p in changed if p.sharded.requires_grad and not p.trainable]
        if thawed:
            self._make_room(thawed)
        for parameter in changed:
            parameter.full.requires_grad_(parameter.sharded.requires_grad)

    def _make_room(self, thawed: list[Parameter]) -> None:
        """Open another engine, which has room for the gradients of parameters that were frozen.

        All ranks come here alike: they have the same parameters to train.
        """
        if self.is_traced:
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
            self.native.destroy()
            self.runtime.destroy()
            self.runtime, self.native = open_native(self.name, self.options, self.world, self.units)
            for group in self.groups():
                move_shard(self.native, group)
            for unit in self.units:
                unit.seal(self.native)
        except BaseException:
            self.close()
            raise
        self.plans.clear()
        self._note_shards()

    def _note_shards(self) -> None:
        self._counted = [t for p in self._parameters for t in (p.sharded, p.local)]
        self._known_versions = self._versions()

    def _versions(self) -> int:
        """Return a number that grows with every in-place operation that torch counts."""
        return sum([tensor._version for tensor in self._counted])

    # ---- the shards changed ---------------------------------------------------------------------

    def updated(self) -> None:
        """Tell the engine that the shards have new values: gathered copies are stale."""
        self.refuse_stream("is updated")
        self._known_versions = self._versions()
        self.native.updated()

    def owns_any(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds parameters of this model."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def take_loaded(self, module: nn.Module) -> None:
        """After a load with ``assign=True``: copy the module's new tensors into the shards."""
        for parameter in self.parameters():
            for holder, attribute in parameter.places:
                loaded = module._parameters.get(attribute) if holder is module else None
                if loaded is None or loaded is parameter.sharded or loaded is parameter.full:
                    continue
                _copy_rows(parameter, loaded)
                parameter.show(parameter.sharded)
        self.updated()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copy(self.name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(self.name)

    def close(self) -> None:
        """End the engine: threads, memory and private process groups are given back.

        In a child of fork, which has only copies of them, nothing happens.
        """
        _live.discard(self)
        if self.closed:
            return
        self.closed = True
        self.backward.break_off()
        for unit in self.units:
            unit.reset()
        try:
            self.native.destroy()
        finally:
            self.world.close()
            self.runtime.destroy()


def _refuse_moved(parameter: Parameter) -> None:
    raise PenstockError(
        "ESTATE",
        f"parameter {parameter.name!r} was moved or converted after shard: do that (to, half, ...) "
        "before penstock.shard(model)",
    )


def _refuse_copy(name: str) -> NoReturn:
    raise PenstockError(
        "EUNSUPPORTED",
        f"{name} is sharded: neither it nor a module of it can be copied (deepcopy, AveragedModel) "
        "or pickled (torch.save). Copy the model before penstock.shard, and shard the copy as "
        "well; save the state_dict()",
    )


def _refuse_hooks(parameter: Parameter) -> None:
    raise PenstockError(
        "EUNSUPPORTED",
        f"parameter {parameter.name!r} has a hook of register_hook, and there is no gradient of "
        "one backward to call it with: use register_post_accumulate_grad_hook, which is called "
        "when .grad is there",
    )


def _copy_rows(parameter: Parameter, loaded: torch.Tensor) -> None:
    target = local_of(parameter.sharded)
    source = local_of(loaded)
    if source.shape == parameter.shape and source.shape != target.shape:
        source = parameter.rows_of(source)
    target.copy_(source)


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


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine in list(_live):
        if engine.owns_any(optimizer):
            engine.updated()


def _close_all() -> None:
    for engine in list(_live):
        engine.close()


register_optimizer_step_post_hook(_after_optimizer_step)
atexit.register(_close_all)
