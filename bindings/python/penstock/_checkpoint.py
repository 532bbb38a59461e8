"""Blocks whose activations are recomputed in the backward, by torch's own checkpointing.

All of them are, or all but what `_selective` saves. A checkpoint lies around a block's call, hooks
and all, as one that is written by hand does: so a forward that is run anew is noticed like any
other one. In a block that is compiled it lies around what is compiled instead: so the compiler
recomputes what gradients need, and no more. A block that offloads its activations is called in a
context of `Offloading` at the same place.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint, noop_context_fn

from penstock import _selective
from penstock._activations import Call
from penstock._compile import not_compiled
from penstock._offload import Offloading
from penstock._units import Unit

_ATTRIBUTE = "_penstock_checkpointed"
_WITHIN = "_penstock_checkpoint_within"  # what this call's forward is to do about it
_logger = logging.getLogger("penstock")


class Way(Enum):
    """What a call saves for its backward: all, nothing, or what is dear to recompute."""

    KEEP = 0
    RECOMPUTE = 1
    SELECT = 2


class Plan(Protocol):
    """Who decides what is recomputed, a call at a time."""

    @property
    def recomputes_within(self) -> bool:
        """Whether what recomputes all of a compiled block lies within what is compiled."""

    def way_of(self, block: Checkpointed, values: list[Any]) -> Way:
        """Tell what a call of the block with these arguments is to save."""

    def measured(self, block: Checkpointed, way: Way) -> Call | None:
        """Return what measures that call, if it is to be measured."""


class Checkpointed:
    """A block as its checkpoint sees it.

    Attributes
    ----------
    unit : Unit
        The block.
    plan : Plan, optional
        Who decides; None: it was decided by hand.
    way : Way
        What its calls save.
    offloads : bool
        Whether that is offloaded.
    offloading : Offloading
        What does that.
    """

    def __init__(
        self, unit: Unit, way: Way, plan: Plan | None = None, *, offloads: bool = False
    ) -> None:
        self.unit = unit
        self.way = way
        self.plan = plan
        self.offloads = offloads
        self.offloading: Offloading
        self._has_warned = False

    @property
    def recomputes(self) -> bool:
        """Whether all of its activations are recomputed."""
        return self.way is Way.RECOMPUTE

    @not_compiled
    def way_of(self, values: list[Any]) -> tuple[Way, bool]:
        """Tell what this call is to save, and whether that is offloaded."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return Way.KEEP, False
        if self._is_within_another():
            return Way.KEEP, False
        way = self.way if self.plan is None else self.plan.way_of(self, values)
        # torch.func's transforms save no tensors that have memory.
        is_plain = torch._C._functorch.peek_interpreter_stack() is None
        if way is Way.SELECT and not is_plain:
            way = Way.RECOMPUTE
        offloads = self.offloads and is_plain and way is not Way.RECOMPUTE
        if offloads and not self.is_compiled:
            way = Way.KEEP  # what a selective checkpoint has saved shows in compiled code alone
        return way, offloads

    @not_compiled
    def measured(self, way: Way) -> Call | None:
        """Return what measures such a call, if it is to be measured."""
        return None if self.plan is None or way is Way.KEEP else self.plan.measured(self, way)

    @property
    def is_compiled(self) -> bool:
        """Whether the checkpoint may lie within what is compiled."""
        module = self.unit.module
        return (
            module._compiled_call_impl is not None
            and "forward" not in vars(module)  # in place of that of the class
        )

    def lies_within(self, way: Way) -> bool:
        """Whether this call's checkpoint does."""
        if way is Way.KEEP or not self.is_compiled:
            return False
        return way is Way.SELECT or self.plan is None or self.plan.recomputes_within

    def _is_within_another(self) -> bool:
        """Whether the model checkpoints it itself, and it would be recomputed twice."""
        module = self.unit.module
        # How layers of `transformers` say that they do so in their own call.
        is_within = bool(getattr(module, "gradient_checkpointing", False)) and module.training
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        is_within |= hooks is not None and _is_of_checkpoint(hooks[0])
        if is_within and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "block %r is checkpointed by the model itself, which goes on; checkpoint= and "
                "offload= of penstock.shard do nothing for it",
                self.unit.name,
            )
        return is_within


def _is_of_checkpoint(pack: Any) -> bool:
    return getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.")


def install(blocks: Iterable[Checkpointed], offloading: Offloading) -> None:
    """Put checkpoints around calls of these blocks: their classes are derived from."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}  # one a kind, as they are compiled a kind
    for block in blocks:
        block.offloading = offloading
        module = block.unit.module
        kind = type(module)
        if kind not in classes:
            classes[kind] = _derive(kind)
        module.__dict__[_ATTRIBUTE] = block
        module.__dict__[_WITHIN] = Way.KEEP
        object.__setattr__(module, "__class__", classes[kind])  # wrappers forward what is set


def _derive(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call(self.__dict__[_ATTRIBUTE], partial(kind.__call__, self), args, kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        way = self.__dict__[_WITHIN]
        if way is Way.KEEP:
            return kind.forward(self, *args, **kwargs)
        # By names of its own, which may be those of torch's options.
        run = partial(kind.forward, **kwargs) if kwargs else kind.forward
        if way is Way.RECOMPUTE:
            return checkpoint(run, self, *args, use_reentrant=False)
        around = _selective.contexts
        return checkpoint(run, self, *args, use_reentrant=False, context_fn=around)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"__call__": call, "forward": forward}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(names))


@_disable_dynamo(recursive=False)
def _call(
    block: Checkpointed, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    values = [*args, *kwargs.values()]
    way, offloads = block.way_of(values)
    measured = block.measured(way)
    is_within = block.lies_within(way)
    block.unit.module.__dict__[_WITHIN] = way if is_within else Way.KEEP
    if offloads:
        return block.offloading.run(block.unit, partial(run, *args, **kwargs), values)
    if way is Way.KEEP:
        return run(*args, **kwargs)

    # All by position: torch takes the device, whose random numbers it draws anew, from those alone.
    def forward(*values: Any) -> Any:
        positional, named = values[: len(args)], values[len(args) :]
        return run(*positional, **dict(zip(names, named, strict=True)))

    names = tuple(kwargs)
    if measured is not None:
        return _measure(measured, way, is_within, forward, values)
    if is_within:
        return run(*args, **kwargs)
    around = _selective.contexts if way is Way.SELECT else noop_context_fn
    return checkpoint(forward, *values, use_reentrant=False, context_fn=around)


@_disable_dynamo(recursive=False)
def _measure(
    measured: Call, way: Way, is_within: bool, forward: Callable[..., Any], values: list[Any]
) -> Any:
    """Call a block that recomputes, all or selectively, and measure it."""
    values = measured.begin(values)
    if is_within:
        with measured.counted():
            output = forward(*values)
    elif way is Way.RECOMPUTE:
        output = checkpoint(forward, *values, use_reentrant=False, context_fn=measured.contexts)
    else:
        selection = _selective.Selection()
        output = checkpoint(forward, *values, use_reentrant=False, context_fn=selection.contexts)
        measured.count(selection.tensors())
    measured.end(output)
    return output
