"""What a model must be like to be sharded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from penstock._errors import PenstockError
from penstock._units import is_shared


def check_parameters(model: nn.Module) -> None:
    """Raise when the model has no parameters, or one that cannot be sharded."""
    kind = type(model).__name__
    parameters = dict(model.named_parameters())
    if not parameters:
        raise PenstockError("EINVAL", f"{kind} has no parameters: there is nothing to shard")
    for name, parameter in parameters.items():
        problem = _problem(parameter)
        if problem:
            raise PenstockError("EINVAL", f"parameter {name!r} of {kind} {problem}")


# The first that is so is said: what follows cannot be asked of all tensors.
_PROBLEMS: tuple[tuple[Callable[[nn.Parameter], bool], str], ...] = (
    (
        lambda p: isinstance(p, DTensor),
        "is a DTensor already: shard the plain model",
    ),
    (
        is_lazy,
        "is not initialised, as its module is a lazy one: run a forward before shard",
    ),
    (
        lambda p: type(p) is not nn.Parameter,
        "is a {kind}, which sharding would take apart: only a plain nn.Parameter can be sharded, "
        "so replace it by one before shard",
    ),
    (
        is_shared,
        "is in another sharded model too, which updates its shard alone: give each its own",
    ),
    (
        lambda p: bool(p._backward_hooks or p._post_accumulate_grad_hooks),
        "has hooks, which are not its shard's: use register_post_accumulate_grad_hook "
        "after penstock.shard(model)",
    ),
    (
        lambda p: p.device.type not in ("cpu", "cuda", "meta"),
        "is on {p.device}: only CPU and CUDA tensors can be sharded, and those without values on "
        "the meta device",
    ),
    (
        lambda p: p.dim() == 0,
        "is a scalar, and rows are what is sharded: give it the shape [1]",
    ),
    (
        lambda p: p.layout != torch.strided,
        "has the layout {p.layout}: only dense parameters can be sharded",
    ),
    (
        lambda p: p.is_complex(),
        "is {p.dtype}: complex parameters cannot be sharded",
    ),
)


def _problem(parameter: nn.Parameter) -> str:
    text = next((text for is_so, text in _PROBLEMS if is_so(parameter)), "")
    return text.format(p=parameter, kind=type(parameter).__name__) if text else ""


def check_device(model: nn.Module) -> torch.device:
    """Return the one device that all parameters lie on; raise when there are several."""
    first_name, first = next(model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.device != first.device:
            what_to_do = (
                "give all of them values before shard, or none: build the whole model on meta"
                if parameter.is_meta or first.is_meta
                else "move the model to one device before shard"
            )
            raise PenstockError(
                "EINVAL",
                f"parameter {name!r} is on {parameter.device} and {first_name!r} on "
                f"{first.device}: {what_to_do}",
            )
    return first.device


def check_no_optimizer(model: nn.Module) -> None:
    """Raise when an optimizer holds parameters of the model: it would go on with the old ones."""
    names = {id(p): name for name, p in model.named_parameters()}
    if not _holders(names):
        return
    gc.collect()  # what nobody uses any more does not count
    for optimizer, name in _holders(names):
        raise PenstockError(
            "ESTATE",
            f"optimizer {type(optimizer).__name__} holds parameter {name!r}, which sharding "
            "replaces: build optimizers after penstock.shard(model)",
        )


def _holders(names: dict[int, str]) -> list[tuple[torch.optim.Optimizer, str]]:
    return [
        (optimizer, names[id(parameter)])
        for optimizer in _optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    ]


def _optimizers() -> Iterable[torch.optim.Optimizer]:
    kind = torch.optim.Optimizer
    found = (x for x in gc.get_objects() if issubclass(type(x), kind))
    return [x for x in found if hasattr(x, "param_groups")]
