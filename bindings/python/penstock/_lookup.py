"""Embeddings: the rows of their weight that a forward looks up.

Of a large table a rank reads few rows, and few rows of its gradient are not zero: where the
communicator can, these alone travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from penstock._units import Group, Unit

# Where more than a half is looked up all rows are gathered: on two H100 that took 1.45 ms for
# 131,072 rows of 8 KiB, by rows half of them 0.82, all of them 1.61 (bench gpu-pulls --only rows).
SHARE = 2


def is_table(group: Group) -> bool:
    """Whether uses of the group may name the rows that they read: it is one embedding's weight."""
    if not group.unit.forward_only or len(group.parameters) != 1 or group.extensions:
        return False
    parameter = group.parameters[0]
    module = group.unit.module
    return (
        type(module) is nn.Embedding
        and module.max_norm is None
        and parameter.divided is None
        and [place for place, _ in parameter.places] == [module]
    )


def rows_looked_up(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the numbers of all rows that this forward reads, which begins.

    Parameters
    ----------
    unit : Unit
        One whose group is a table.
    args, kwargs : tuple, dict
        The forward's arguments.

    Returns
    -------
    torch.Tensor, optional
        Of 64 bits, contiguous, on the device of the model; none where others may be read, or many.
    """
    indices = args[0] if args else kwargs.get("input")
    if type(indices) is not torch.Tensor or indices.dtype not in (torch.int64, torch.int32):
        return None
    table = unit.groups[0].parameters[0]
    if indices.device != table.local.device or indices.numel() * SHARE > table.shape[0]:
        return None
    if _may_see_more(unit.module) or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return indices.detach().to(torch.int64).contiguous()


def _may_see_more(module: nn.Module) -> bool:
    """Whether somebody else may read the weight, or change the arguments: one hook each is ours."""
    hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
    return hooks != (1, 1) or "forward" in module.__dict__
