"""Selective checkpoints: outputs of matrix products and attention are saved, the rest is run anew.

What such a checkpoint saves is most of the time that a recomputation takes, and not most of the
bytes: norms, activation functions and rotary embeddings are as many tensors, and cost little.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from penstock._activations import Contexts
from penstock._compile import not_compiled
from penstock._values import tree_leaves

_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "linear", "convolution"),
    *("_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
_DROPOUT = "dropout_p"


def _find(names: tuple[str, ...]) -> list[Any]:
    """List the operators of these names that this torch has."""
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return [packet.default for packet in found if packet is not None]


def _place_of_dropout(op: Any) -> int:
    return [argument.name for argument in op._schema.arguments].index(_DROPOUT)


_SAVED = {*_find(_PRODUCTS), torch.ops.higher_order.flex_attention}
_SAVED_WITHOUT_DROPOUT = {op: _place_of_dropout(op) for op in _find(_ATTENTION)}


def is_saved(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether what an operator puts out is saved.

    What draws random numbers is run anew, all of it: so each draws those of the forward.
    """
    place = _SAVED_WITHOUT_DROPOUT.get(op)
    if place is None:
        return op in _SAVED
    return not (args[place] if place < len(args) else kwargs.get(_DROPOUT, 0.0))


@not_compiled
def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = is_saved(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Contexts:
    """Return what a call runs in, and what it is run anew in: torch's, where it is compiled."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return _make_modes()
    return Selection().contexts()


def _make_modes() -> tuple[Any, Any]:
    """Make torch's; they take operators of higher order as they take others."""
    modes: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    for mode in modes:
        mode.supports_higher_order_operators = True
    return modes


class Selection:
    """What a call that is not compiled has saved."""

    def __init__(self) -> None:
        self._saving, self._giving = _make_modes()

    def contexts(self) -> Contexts:
        """Return what the call runs in, and what it is run anew in."""
        return self._saving, _Rerun(self, self._giving)

    def tensors(self) -> list[torch.Tensor]:
        """List what is saved."""
        return [one.val for one in self._each() if isinstance(one.val, torch.Tensor)]

    def is_written(self) -> bool:
        """Whether something was written in place since: it is not what the operator put out."""
        return any(
            one.val._version != one.version for one in self._each() if one.version is not None
        )

    def take(self) -> dict[Any, list[Any]]:
        """Return what is saved by operators, in another dict: giving it out takes it away."""
        return {op: list(calls) for op, calls in self._saving.storage.items()}

    def put(self, saved: dict[Any, list[Any]]) -> None:
        """Save this and nothing else."""
        self._saving.storage.clear()
        self._saving.storage.update(saved)

    def _each(self) -> list[Any]:
        return tree_leaves(list(self._saving.storage.values()))


class _Rerun:
    """What a call is run anew in; where what it has saved is of no use, all of it is.

    That is so where it was written in place, and where another backward has had it: parts of a
    graph may have one each, and memory goes back as the first of them uses it. Under a graph that
    is kept it stays.
    """

    def __init__(self, selection: Selection, giving: AbstractContextManager[Any]) -> None:
        self._selection = selection
        self._giving = giving
        self._is_spent = False
        self._entered: AbstractContextManager[Any] = nullcontext()
        self._stays: dict[Any, list[Any]] = {}

    def __enter__(self) -> None:
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        is_useless = self._is_spent or self._selection.is_written()
        self._entered = nullcontext() if is_useless else self._giving
        self._stays = self._selection.take() if is_kept else {}
        self._is_spent |= not is_kept
        self._entered.__enter__()

    def __exit__(self, *failure: Any) -> None:  # torch ends a recomputation by an exception
        self._entered.__exit__(*failure)
        self._selection.put(self._stays)
        self._stays = {}
