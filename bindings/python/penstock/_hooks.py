"""Hooks on modules: they detect when a unit is used, in the forward and in the backward.

A unit is held while its forward runs, and again from the moment its outputs' gradients are there
until its own gradients are done. Inside a backward (a checkpointed forward is run anew there, and
may be stopped half-way) the end of a forward ends nothing: only gradients do.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock import _C
from penstock._compile import not_compiled
from penstock._engine import Engine
from penstock._errors import PenstockError
from penstock._lookup import rows_looked_up
from penstock._units import Group, Parameter, Unit, Use
from penstock._values import tensors_of, tree_flatten

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PLAIN = (torch.Tensor, int, float, str, type(None))  # holds no further tensors
_MIXED = (
    ". Plain parameters beside activations that are DTensors fail so, too: name their module in "
    "the plan of parallelize_module"
)


class _Inputs(torch.autograd.Function):
    """Identity; its backward runs when everything of the unit's backward has run.

    The autograd engine takes the youngest ready node first, and this one is older than all nodes
    of the unit.
    """

    @staticmethod
    def forward(
        ctx: Any, engine: weakref.ref[Engine], use: Use, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.use = engine, use
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _reached_inputs(ctx.engine, ctx.use)
        return (None, None, *gradients)

    @staticmethod
    def jvp(ctx: Any, engine: None, use: None, *tangents: torch.Tensor | None) -> Any:
        return tuple(None if x is None else x.view_as(x) for x in tangents)


def install(engine: Engine) -> None:
    """Put the hooks on the model.

    Parameters
    ----------
    engine : Engine
        The engine of the model.
    """
    for unit in engine.units:
        unit.module.register_forward_pre_hook(
            partial(before_forward, engine, unit), prepend=True, with_kwargs=True
        )
        unit.module.register_forward_hook(partial(after_forward, engine, unit), always_call=True)
    _watch_root(engine)
    _watch_reads(engine)
    for group in engine.groups():
        # Weakly: the garbage collector does not see what such a hook holds.
        group.arrived = _C.Arrived(partial(_got_gradients, engine.reference, weakref.ref(group)))
        for parameter in group.parameters:
            if parameter.divided is None:
                _share_hooks(parameter)
            parameter.watch(group.arrived)  # behind that: in place of what torch calls


def _share_hooks(parameter: Parameter) -> None:
    """Make hooks that a forward registers on the whole parameter those of the shard."""
    hooks: OrderedDict[int, Any] = OrderedDict()
    parameter.sharded._post_accumulate_grad_hooks = hooks
    parameter.full._post_accumulate_grad_hooks = hooks


def _watch_root(engine: Engine) -> None:
    """Notice when a module with parameters of the root is called outside of the root's forward."""
    if engine.world.mesh is None:  # this process alone has whole parameters always
        return
    root = engine.root
    for module in _holders(root) - {root.module}:
        module.register_forward_pre_hook(partial(_refuse_outside, root), prepend=True)


def _refuse_outside(root: Unit, module: nn.Module, args: Any) -> None:
    if not root.whole:
        names = (name for name, inner in root.module.named_modules() if inner is module)
        name = next(names, type(module).__name__)  # it may have been taken out
        raise PenstockError(
            "ESTATE",
            f"module {name!r} of the sharded {type(root.module).__name__} was called outside of "
            "the model's own forward, in which alone its parameters are whole: call the model, "
            "not a part of it, or name the method by shard(..., forward_methods=)",
        )


# ---- forward ------------------------------------------------------------------------------------


@not_compiled
def before_forward(
    engine: Engine,
    unit: Unit,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Arguments | None:
    """Gather a unit's parameters; return its arguments if they are not to be the same."""
    engine.refuse_capture()
    use = Use(unit, recomputed=torch._C._current_graph_task_id() != -1)
    engine.phases.begin_forward(unit, use.recomputed, engine.is_captured)
    if use.recomputed and engine.depth > 0:
        engine.hold_for_root(unit)
    elif use.recomputed:
        engine.backward.hold(unit)
    else:
        engine.enter(unit, rows_looked_up(unit, args, kwargs) if unit.is_table else None)
    unit.calls.append(use)
    marks = torch.is_grad_enabled()
    if engine.input_dtype is None and not marks:
        return None
    is_plain = not kwargs and all(isinstance(x, _PLAIN) for x in args)
    leaves, make = (list(args), _as_arguments) if is_plain else tree_flatten((args, kwargs))
    if engine.input_dtype is not None:
        leaves = [_cast(engine.input_dtype, x) for x in leaves]
    is_marked = marks and _mark_inputs(engine, use, leaves, is_plain)
    # What stays as it is stays the caller's own: a block may write to a list, such as a cache.
    return make(leaves) if is_marked or engine.input_dtype is not None else None


def _as_arguments(leaves: list[Any]) -> Arguments:
    return tuple(leaves), {}


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    is_cast = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_cast else leaf


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    leaves, make = tree_flatten(value)
    return make([function(x) if isinstance(x, torch.Tensor) else x for x in leaves])


def _mark_inputs(engine: Engine, use: Use, leaves: list[Any], is_plain: bool) -> bool:
    """Put the inputs that get gradients behind nodes that report when the backward reaches them."""
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if is_plain and len(where) == 1 and type(leaves[where[0]]) is torch.Tensor:
        leaves[where[0]] = _mark_input(engine, use, leaves[where[0]])
        return True
    if not where or torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # torch.func's transforms do not support _Inputs
    use.has_inputs = True
    marked = _Inputs.apply(engine.reference, use, *(leaves[i] for i in where))
    for i, tensor in zip(where, marked, strict=True):
        leaves[i] = tensor
    use.begin = leaves[where[0]].grad_fn._sequence_nr()
    return True


def _mark_input(engine: Engine, use: Use, tensor: torch.Tensor) -> torch.Tensor:
    """Mark the only input that gets a gradient: the node of a view is cheaper than `_Inputs`."""
    use.has_inputs = True
    marked, use.begin = _C.mark(tensor, partial(_reached_inputs, engine.reference, use))
    use.marked = weakref.ref(marked), marked._version
    return marked


@not_compiled
def after_forward(
    engine: Engine, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Any:
    """Release a unit's parameters; return its output if that is not to be the same."""
    if not unit.calls:  # the forward never began: gathering failed
        return None
    use = unit.calls.pop()
    tensors = tensors_of(output)
    given = _make_given(engine, unit, output, tensors)
    if given is not output:
        tensors = tensors_of(given)
    if use.marked is not None:
        reference, version = use.marked
        marked = reference()  # an argument, and so still there
        # Changed in place, it has another node, and no hook runs when the backward reaches it:
        # what has frozen parameters is held until the end, as its last gradients are not its end.
        is_same = marked is not None and marked._version == version
        use.has_inputs = is_same or unit.has_frozen
        use.marked = None
    if torch.is_grad_enabled():
        _watch_outputs(engine, unit, use, tensors)
    if not use.recomputed:
        _end_forward(engine, unit, output)
    kind = "recompute" if use.recomputed else "forward"
    engine.phases.end(kind, unit, stays=output is None)  # None: it has failed, or been stopped
    return None if given is output else given


def _make_given(engine: Engine, unit: Unit, output: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy parameters in an output, and cast that of the model, if it is to be cast."""
    if _is_any_parameter(engine, tensors):
        output = _map_tensors(partial(_copy_parameter, engine), output)
    dtype = engine.options.output_dtype
    if dtype is not None and unit is engine.root and not unit.calls:
        output = _map_tensors(partial(_cast, dtype), output)
    return output


def _end_forward(engine: Engine, unit: Unit, output: Any) -> None:
    engine.depth -= 1  # first: what follows may raise
    if output is None and engine.depth == 0:
        _explain(engine, sys.exc_info()[1])
    if unit is engine.root and not unit.calls:
        if output is not None:
            # The root is used at both ends of a pass: so its backward comes first, and its
            # gradients are reduced last. (No output: it failed, or has no backward.)
            unit.hold()
            unit.drop()
        engine.drop_read()
    unit.drop()
    if engine.depth == 0:
        engine.end_pass()


def _explain(engine: Engine, failure: BaseException | None) -> None:
    """Say what torch means where a forward has failed as it took a shard for the whole."""
    if isinstance(failure, RuntimeError) and "mixed torch.Tensor and DTensor" in str(failure):
        failure.args = (
            f"{failure}\nA parameter of the sharded {engine.name} was used outside of its block's "
            "forward, in which alone it is whole: use it there, or in a method of the block that "
            "shard(..., forward_methods=) names; or let the module that uses it have it as an "
            "attribute too, before penstock.shard(model): what several modules share is whole for "
            f"all of them{_MIXED if engine.world.axes is not None else ''}",
        )


def _is_any_parameter(engine: Engine, tensors: list[torch.Tensor]) -> bool:
    """Whether one of them is a whole parameter, or a view of one."""
    for tensor in tensors:
        base = tensor._base
        if id(tensor if base is None else base) in engine.whole_ids:
            return True
    return False


def _copy_parameter(engine: Engine, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a parameter that a forward returns: its memory is released when the forward ends."""
    return tensor.clone() if _is_any_parameter(engine, [tensor]) else tensor


def _watch_outputs(engine: Engine, unit: Unit, use: Use, outputs: list[torch.Tensor]) -> None:
    watched = False
    for output in outputs:
        if output.requires_grad and not output.is_leaf:  # hooks on a leaf would pile up
            shown = output if output._base is None else _behind_view(use, output)
            _C.call_before(shown, partial(_before_backward, engine.reference, use))
            watched = True
    if watched and use.has_inputs and not use.recomputed:
        unit.pending.add(use)


def _behind_view(use: Use, output: Any) -> torch.Tensor:
    """Return what a view shows, if the forward has made that.

    A view that is changed in place has another node, and nobody gets to the old one.
    """
    base = output._base
    if base.grad_fn is None:
        return output
    is_older = base.grad_fn._sequence_nr() <= use.begin
    return output if is_older else base


# ---- reads by the root ---------------------------------------------------------------------------
#
# The modules beside the blocks are units of their own, gathered while they run. The model's own
# forward may use their parameters without calling them (logits from an embedding's weight, a loss
# that takes the head's): the unit is then held until the model's forward, and its backward, end.


class _Reads(dict[str, Any]):
    """A module's parameters; reading one while its unit is not gathered holds the unit."""

    def __init__(self, parameters: dict[str, Any], engine: Engine, unit: Unit) -> None:
        super().__init__(parameters)
        self._engine = engine
        self._unit = unit

    def __getitem__(self, name: str) -> Any:
        if not self._unit.whole:
            _read(self._engine, self._unit)
        return super().__getitem__(name)


def _watch_reads(engine: Engine) -> None:
    """Detect reads of parameters of the units beside the blocks."""
    for unit in engine.units:
        if unit.beside_blocks:
            for module in _holders(unit):
                module._parameters = _Reads(module._parameters, engine, unit)


def _holders(unit: Unit) -> set[nn.Module]:
    parameters = (parameter for group in unit.groups for parameter in group.parameters)
    return {module for parameter in parameters for module, _ in parameter.places}


@not_compiled
def _read(engine: Engine, unit: Unit) -> None:
    if engine.root.in_backward:  # the model's forward is run anew
        unit.read_by_root = True
        engine.backward.hold(unit)
    else:
        engine.hold_for_root(unit)


# ---- backward -----------------------------------------------------------------------------------


# A model may hold its outputs, whose graph holds these hooks, which the garbage collector does not
# see: so they hold nothing of the model.


def _parts_of(reference: weakref.ref[Engine], use: Use) -> tuple[Engine, Unit]:
    engine, unit = reference(), use.unit()
    if engine is None or unit is None:
        raise PenstockError(
            "ESTATE",
            "a backward reached a sharded model that is gone: keep the model until its backwards "
            "are done",
        )
    return engine, unit


@not_compiled
def _before_backward(reference: weakref.ref[Engine], use: Use) -> None:
    engine, unit = _parts_of(reference, use)
    if engine.depth > 0:  # autograd.grad in a forward
        engine.hold_for_root(unit)
        return
    if use.has_inputs:
        unit.active.add(use)
    engine.backward.reach(unit)


@not_compiled
def _reached_inputs(reference: weakref.ref[Engine], use: Use) -> None:
    engine, unit = _parts_of(reference, use)
    if engine.depth == 0:
        engine.backward.reached_inputs(unit, use)


@not_compiled
def _got_gradients(
    engine_reference: weakref.ref[Engine], group_reference: weakref.ref[Group]
) -> None:
    engine, group = engine_reference(), group_reference()
    if engine is not None and group is not None:
        engine.backward.got_gradients(group)
