"""The norm of gradients over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from penstock._errors import PenstockError
from penstock._world import local_of


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients of all ranks, on the device, by one all-reduce.

    Parameters
    ----------
    parameters : iterable of torch.Tensor
        That have gradients; each rank gives the same ones, and they lie on one device.

    Returns
    -------
    torch.Tensor
        A float32 number; infinite or NaN where a gradient is.
    """
    by_groups: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_groups[_ranks_of(parameter)].append(gradient_of(parameter))
    squares = None
    for groups, gradients in by_groups.items():
        filled = [gradient for gradient in gradients if gradient.numel() > 0]
        device = gradients[0].device
        own = torch.zeros((), device=device)
        if filled:
            norms = torch._foreach_norm(filled, 2, dtype=torch.float32)
            own = torch.stack(norms).square().sum()
        for group in groups:
            dist.all_reduce(own, group=group)
        squares = own if squares is None else squares + own
    return torch.zeros(()) if squares is None else squares.sqrt()


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the rows of the gradient that lie on this rank."""
    return local_of(parameter.grad)  # type: ignore[arg-type]


def _ranks_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return the groups, one an axis, of the ranks that have the other elements of a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    if any(placement.is_partial() for placement in parameter.placements):
        raise PenstockError(
            "EUNSUPPORTED",
            f"the norm of gradients that are placed as {parameter.placements}: use "
            "torch.nn.utils.clip_grad_norm_",
        )
    mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
    return tuple(mesh.get_group(dim) for dim, placed in placements if not placed.is_replicate())
