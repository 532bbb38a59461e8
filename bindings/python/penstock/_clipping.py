"""Clipping that the next step of penstock.AdamW does while it reads gradients."""

from __future__ import annotations

import torch
from torch import nn

from penstock._adamw import optimizers_of
from penstock._arguments import check_model, refuse
from penstock._errors import PenstockError
from penstock._norms import norm_of


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the norm of a model's gradients in the next step of its `penstock.AdamW`.

    The norm of all gradients of all ranks takes one read of them and one small all-reduce; the
    factor stays on the device, and the step multiplies gradients by it while it reads them.
    ``parameter.grad`` stays as it is.

    Parameters
    ----------
    model : nn.Module
        Its parameters are trained by one or several `penstock.AdamW`; all ranks call this alike.
    max_norm : float
        The norm that gradients have at most.

    Returns
    -------
    torch.Tensor
        The norm before clipping, on the device; `torch.nn.utils.clip_grad_norm_` returns the same.

    Raises
    ------
    PenstockError
        EINVAL: no `penstock.AdamW` holds a parameter of the model, or `max_norm` is no norm.

    Examples
    --------
    >>> loss.backward()
    >>> penstock.clip_grad_norm_(model, 1.0)
    >>> optimizer.step()
    """
    check_model(model)
    if not max_norm >= 0:
        refuse("max_norm", max_norm, "give a number that is not negative")
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    optimizers = optimizers_of(model)
    if not optimizers:
        raise PenstockError(
            "EINVAL",
            f"clip_grad_norm_: no penstock.AdamW holds parameters of {type(model).__name__}: build "
            "it after penstock.shard, or use torch.nn.utils.clip_grad_norm_",
        )
    with torch.no_grad():
        norm = norm_of(parameters)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for optimizer in optimizers:
        optimizer.gradient_norm, optimizer.gradient_factor = norm, factor
    return norm
