"""The flat gradient of a group: what a backward adds to, and what parameters show of it.

It lives as long as some parameter's .grad shows a part of it: the engine has it during a backward
only, and the group has a weak reference. So zero_grad(set_to_none=True) frees it. One rank alone
has none before a backward adds to gradients: until then they are those that autograd has made.

While a backward runs that reduces, no shard has a .grad: what a graph puts there that uses shards
themselves (a penalty over them) is a tensor of its own, and is added when the backward has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import _C
from penstock._units import Group, Parameter
from penstock._world import as_sharded, local_of

# ---- before a backward --------------------------------------------------------------------------


@torch.no_grad()
def offer_old_gradients(native: _C.Engine, groups: Iterable[Group]) -> None:
    """Let the next reductions add to the gradients that the parameters have, if any."""
    for group in groups:
        group.old = {p: g for p in group.trainable if (g := p.sharded.grad) is not None}
        if group.old:
            _add_to(native, group, [(p, local_of(gradient)) for p, gradient in group.old.items()])
        for parameter in group.old:
            parameter.sharded.grad = None


def _add_to(native: _C.Engine, group: Group, old: list[tuple[Parameter, torch.Tensor]]) -> None:
    flat = _flat_of(group, [gradient for _, gradient in old])
    if flat is None:
        shard = group.shard
        flat = torch.zeros(
            group.gradient_elements,
            dtype=group.dtype,
            device=shard.device,
            pin_memory=shard.is_pinned(),
        )
    shared = flat.untyped_storage()._cdata
    shown = {parameter for parameter, _ in old}
    for parameter, gradient in old:
        if gradient.untyped_storage()._cdata != shared:
            rows = flat.as_strided(*parameter.rows).copy_(gradient)
            group.old[parameter] = _as_gradient(parameter, rows)  # frees the other one
    for parameter in group.trainable:
        if parameter not in shown:
            flat.as_strided(*parameter.rows).zero_()
    native.set_gradient(group.index, flat)


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


# ---- after it -----------------------------------------------------------------------------------


@torch.no_grad()
def show_gradients(native: _C.Engine, groups: Iterable[Group]) -> None:
    """Make each parameter's .grad its part of what the backward has reduced."""
    have = native.have_gradients()
    for group, (flat, kept) in zip(groups, native.take_gradients(), strict=True):
        rows_of = dict(zip(group.parameters, kept, strict=False))  # none: updated behind reductions
        if flat is not None:
            group.gradient = StorageWeakRef(flat.untyped_storage())
            rows_of = {p: flat.as_strided(*p.rows) for p in group.trainable}
        for parameter, rows in rows_of.items():
            if have[parameter.index] and parameter.sharded.requires_grad:
                group.old.pop(parameter, None)  # is in it
                _add_and_set(parameter, _as_gradient(parameter, rows))
        _restore(group)


def _as_gradient(parameter: Parameter, rows: torch.Tensor) -> torch.Tensor:
    return as_sharded(rows, parameter.layout, parameter.local)


@torch.no_grad()
def call_hooks(native: _C.Engine, parameters: Iterable[Parameter]) -> None:
    """Call the users' hooks of the parameters that have got a gradient."""
    have = native.have_gradients()
    for parameter in parameters:
        hooks = parameter.sharded._post_accumulate_grad_hooks
        if hooks and have[parameter.index] and parameter.sharded.requires_grad:
            for hook in list(hooks.values()):
                hook(parameter.sharded)


def give_up(native: _C.Engine, group: Group) -> list[Parameter]:
    """Forget what was there before the backward if that has been added to it; return whose."""
    if not native.has_written(group.index):
        return []
    lost = list(group.old)
    group.old.clear()
    return lost


@torch.no_grad()
def restore_gradients(groups: Iterable[Group]) -> None:
    """Make each .grad what it was before the backward, for parameters without a new gradient."""
    for group in groups:
        _restore(group)


def _restore(group: Group) -> None:
    for parameter, gradient in group.old.items():
        _add_and_set(parameter, gradient)
    group.old.clear()


def _add_and_set(parameter: Parameter, gradient: torch.Tensor) -> None:
    if parameter.sharded.grad is not None:
        gradient.add_(parameter.sharded.grad)
    parameter.sharded.grad = gradient
