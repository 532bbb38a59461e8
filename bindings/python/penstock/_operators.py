"""The shared object with the operators of the namespace `dc`: loaded once, when it is first wanted.

A process holds one library of that name, DeepSpeed's own or this one.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from penstock._errors import PenstockError

_OBJECT = "penstock._dc"
_further: list[Any] = []  # keeps the further overloads alive


def loaded() -> bool:
    """Whether the operators are those of Penstock."""
    return _OBJECT in sys.modules


def load() -> Any:
    """Load the operators.

    Returns
    -------
    module
        With the runtime's functions.
    """
    if not loaded():
        if "dc::allgather_param" in torch._C._dispatch_get_all_op_names():
            raise PenstockError(
                "ESTATE",
                "DeepSpeed's own operators of the namespace dc are loaded in this process, which "
                "can hold one library of that name only: call penstock.deepspeed.install(), or use "
                "penstock.dc, before the first engine is compiled",
            )
        importlib.import_module(_OBJECT)
    if not _further:
        _further.append(_define_further_overloads())
    return sys.modules[_OBJECT]


# ---- further overloads ---------------------------------------------------------------------------
#
# The operators' own schemas call a parameter's number `id`, or have two arguments of that name. By
# hand one writes ds_id=, graph_id=, and leaves out what a graph has one value for.


class _Gather(torch.autograd.Function):
    """A gather whose gradient is the reduction."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, graph_id: int, ds_id: int, dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.graph_id, ctx.ds_id = graph_id, ds_id
        return torch.ops.dc.allgather_param.default(shard, graph_id, ds_id, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        torch.ops.dc.reduce_grad.default(gradients[0], ctx.graph_id, ctx.ds_id)
        return None, None, None, None


def _allgather_param(
    a: torch.Tensor, graph_id: int, *, ds_id: int, dtype: torch.dtype | None = None
) -> Any:
    return _Gather.apply(a, graph_id, ds_id, dtype)


def _wait_allgather(a: torch.Tensor, graph_id: int, *, ds_id: int) -> Any:
    # Not through the operator's output: autograd takes an operator without a formula for one that
    # cuts the graph, and this one returns its argument.
    torch.ops.dc.wait_allgather.default(a.detach(), graph_id, ds_id)
    return a


def _release_param(a: torch.Tensor, graph_id: int, *, ds_id: int, n_users: int) -> Any:
    torch.ops.dc.release_param.default(a.detach(), graph_id, ds_id, n_users)
    return a


def _reduce_grad(a: torch.Tensor, graph_id: int, *, ds_id: int) -> Any:
    return torch.ops.dc.reduce_grad.default(a, graph_id, ds_id)


def _end_backward(*, graph_id: int, release_reduce_buckets: bool = False) -> None:
    torch.ops.dc.end_backward.default(None, graph_id, release_reduce_buckets)


def _end_backward_behind(deps: Any, graph_id: int) -> None:
    torch.ops.dc.end_backward.default(deps, graph_id, False)


def _moving(name: str) -> Any:
    operator = getattr(torch.ops.dc, name).default
    return lambda a, *, graph_id, id: operator(a, graph_id, id)


def _define_further_overloads() -> Any:
    library = torch.library.Library("dc", "FRAGMENT")
    further = {
        "allgather_param.ds_id(Tensor a, int graph_id, *, int ds_id, ScalarType? dtype=None)"
        " -> Tensor": _allgather_param,
        "wait_allgather.ds_id(Tensor(a) a, int graph_id, *, int ds_id) -> Tensor(a)": (
            _wait_allgather
        ),
        "release_param.ds_id(Tensor(a) a, int graph_id, *, int ds_id, int n_users)"
        " -> Tensor(a)": _release_param,
        "reduce_grad.ds_id(Tensor a, int graph_id, *, int ds_id) -> Tensor": _reduce_grad,
        "end_backward.graph_id(*, int graph_id, bool release_reduce_buckets=False) -> ()": (
            _end_backward
        ),
        "end_backward.deps(Any deps, int graph_id) -> ()": _end_backward_behind,
    }
    for name in ("offload_tensor", "wait_offload", "reload_tensor", "wait_reload"):
        further[f"{name}.graph_id(Tensor a, *, int graph_id, int id) -> Tensor"] = _moving(name)
    for schema, implementation in further.items():
        library.define(schema)
        library.impl(schema.split("(")[0], implementation, "CompositeImplicitAutograd")
    return library
