"""What a model must be like to be sharded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import is_lazy

from penstock._arguments import refuse
from penstock._errors import PenstockError
from penstock._extension import has_hooks, why_no_hooks
from penstock._units import is_shared

Named = dict[str, nn.Parameter]


def find_parameters(model: nn.Module, ignored: Any) -> Named:
    """Find what is to be sharded; raise when that is nothing, or something cannot be.

    Parameters
    ----------
    model : nn.Module
        Not sharded yet.
    ignored : iterable of nn.Parameter, optional
        Parameters of it that are left alone.

    Returns
    -------
    dict of str and nn.Parameter
        All others.
    """
    kind = type(model).__name__
    found = dict(model.named_parameters())
    ids = _ids_of(kind, {id(parameter) for parameter in found.values()}, ignored)
    found = {name: parameter for name, parameter in found.items() if id(parameter) not in ids}
    if not found:
        but = " but those of ignored_params=" if ids else ""
        raise PenstockError("EINVAL", f"{kind} has no parameters{but}: there is nothing to shard")
    for name, parameter in found.items():
        problem = _problem(parameter)
        if problem:
            raise PenstockError("EINVAL", f"parameter {name!r} of {kind} {problem}")
    return found


def _ids_of(kind: str, known: set[int], ignored: Any) -> set[int]:
    if ignored is None:
        return set()
    is_several = isinstance(ignored, Iterable) and not isinstance(ignored, torch.Tensor)
    given = list(ignored) if is_several else []
    if not is_several or not all(isinstance(parameter, nn.Parameter) for parameter in given):
        refuse("ignored_params", type(ignored), "give parameters of the model, as a set")
    strangers = [parameter for parameter in given if id(parameter) not in known]
    if strangers:
        shape = tuple(strangers[0].shape)
        refuse("ignored_params", f"parameter of shape {shape}", f"{kind} does not have it")
    return {id(parameter) for parameter in given}


# The first that is so is said: what follows cannot be asked of all tensors.
_PROBLEMS: tuple[tuple[Callable[[nn.Parameter], bool], str], ...] = (
    (
        lambda p: isinstance(p, DTensor) and not _is_divided(p),
        "is a {kind} that is placed as {p.placements}: of DTensors, plain ones can be sharded that "
        "are divided (Shard) or the same (Replicate) along each axis of their mesh",
    ),
    (
        is_lazy,
        "is not initialised, as its module is a lazy one: run a forward before shard",
    ),
    (
        lambda p: has_hooks(p) and bool(why_no_hooks(p)),
        "is a {kind} that {why}",
    ),
    (
        lambda p: type(p) not in (nn.Parameter, DTensor) and not has_hooks(p),
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


def _is_divided(parameter: DTensor) -> bool:
    is_plain = type(parameter) is DTensor
    return is_plain and all(type(p) in (Shard, Replicate) for p in parameter.placements)


def _problem(parameter: nn.Parameter) -> str:
    text = next((text for is_so, text in _PROBLEMS if is_so(parameter)), "")
    if not text:
        return ""
    return text.format(p=parameter, kind=type(parameter).__name__, why=why_no_hooks(parameter))


def check_device(parameters: Named) -> torch.device:
    """Return the one device that all of these lie on; raise when there are several."""
    first_name, first = next(iter(parameters.items()))
    for name, parameter in parameters.items():
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


def check_no_optimizer(parameters: Named) -> None:
    """Raise when an optimizer holds some of these: it would go on with the old ones."""
    names = {id(parameter): name for name, parameter in parameters.items()}
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
    """List those that there are: each refers to its class."""
    kind = torch.optim.Optimizer
    found = (x for x in gc.get_referrers(*_with_subclasses(kind)) if issubclass(type(x), kind))
    return [x for x in found if hasattr(x, "param_groups")]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
