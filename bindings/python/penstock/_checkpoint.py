"""Blocks whose activations are recomputed in the backward, by torch's own checkpointing.

A checkpoint lies around a block's call, hooks and all, as one that is written by hand does: so a
forward that is run anew is noticed like any other one. In a block that is compiled it lies around
what is compiled instead: so the compiler recomputes what gradients need, and no more. A block that
offloads its activations is called in a context of `Offloading` at the same place.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint, noop_context_fn

from penstock._compile import not_compiled
from penstock._offload import Offloading
from penstock._units import Unit

_ATTRIBUTE = "_penstock_checkpointed"
_WITHIN = "_penstock_checkpoint_within"  # whether this call's checkpoint is its forward's
_logger = logging.getLogger("penstock")

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # forward, recomputation


class Way(Enum):
    """What becomes of the activations of a call until its backward."""

    KEEP = 0
    RECOMPUTE = 1
    OFFLOAD = 2


class Plan(Protocol):
    """Who decides what is recomputed, a call at a time."""

    is_decided: bool
    """Whether it has measured what it decides by."""

    def recomputes(self, block: Checkpointed, values: list[Any]) -> bool:
        """Tell whether a call of the block with these arguments is to be run anew."""

    def contexts(self, block: Checkpointed, values: list[Any]) -> Contexts | None:
        """Return what such a call runs in, and what it is run anew in, if anything."""


class Checkpointed:
    """A block as its checkpoint sees it.

    Attributes
    ----------
    unit : Unit
        The block.
    plan : Plan, optional
        Who decides; None: it was decided by hand.
    recomputes : bool
        Whether its activations are recomputed.
    offloads : bool
        Whether those that are not are offloaded.
    offloading : Offloading
        What does that.
    """

    def __init__(self, unit: Unit, plan: Plan | None = None, *, offloads: bool = False) -> None:
        self.unit = unit
        self.plan = plan
        self.recomputes = not offloads
        self.offloads = offloads
        self.offloading: Offloading
        self._has_warned = False

    @not_compiled
    def way_of(self, values: list[Any]) -> Way:
        """Tell what is to be done about this call's activations here."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return Way.KEEP
        if self._is_within_another():
            return Way.KEEP
        if self.recomputes if self.plan is None else self.plan.recomputes(self, values):
            return Way.RECOMPUTE
        # torch.func's transforms save no tensors that have memory.
        is_plain = torch._C._functorch.peek_interpreter_stack() is None
        return Way.OFFLOAD if self.offloads and is_plain else Way.KEEP

    @not_compiled
    def contexts(self, values: list[Any]) -> Contexts | None:
        """Return what a call runs in, and what it is run anew in, if anything."""
        return None if self.plan is None else self.plan.contexts(self, values)

    @property
    def is_compiled(self) -> bool:
        """Whether the checkpoint may lie within what is compiled.

        What is measured until it is decided is of one that lies around the call.
        """
        module = self.unit.module
        return (
            module._compiled_call_impl is not None
            and "forward" not in vars(module)  # in place of that of the class
            and (self.plan is None or self.plan.is_decided)
        )

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
        module.__dict__[_WITHIN] = False
        object.__setattr__(module, "__class__", classes[kind])  # wrappers forward what is set


def _derive(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call(self.__dict__[_ATTRIBUTE], partial(kind.__call__, self), args, kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__[_WITHIN]:
            return kind.forward(self, *args, **kwargs)
        # By names of its own, which may be those of torch's options.
        run = partial(kind.forward, **kwargs) if kwargs else kind.forward
        return checkpoint(run, self, *args, use_reentrant=False)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"__call__": call, "forward": forward}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(names))


@_disable_dynamo(recursive=False)
def _call(
    block: Checkpointed, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    values = [*args, *kwargs.values()]
    way = block.way_of(values)
    contexts = block.contexts(values) if way is Way.RECOMPUTE else None
    is_within = way is Way.RECOMPUTE and contexts is None and block.is_compiled
    block.unit.module.__dict__[_WITHIN] = is_within
    if way is Way.OFFLOAD:
        return block.offloading.run(block.unit, partial(run, *args, **kwargs), values)
    if is_within or way is Way.KEEP:
        return run(*args, **kwargs)

    # All by position: torch takes the device, whose random numbers it draws anew, from those alone.
    def forward(*values: Any) -> Any:
        positional, named = values[: len(args)], values[len(args) :]
        return run(*positional, **dict(zip(names, named, strict=True)))

    names = tuple(kwargs)
    around = noop_context_fn if contexts is None else lambda: contexts
    return checkpoint(forward, *values, use_reentrant=False, context_fn=around)
