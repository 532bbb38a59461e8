"""The runtime of DeepCompile by hand: its functions, and operators under ``torch.ops.dc``.

    from penstock import dc

    dc.init(process_group, config, initial_reduce_bucket_size=100_000_000)
    dc.register_z3_param(ds_id=0, ds_shape=shape, ds_tensor=shard, grad_buffer=buffer,
                         persistent=False)
    dc.register_graph_z3(graph_id=0, ds_ids=[0])
    gathered = torch.ops.dc.allgather_param(shard, graph_id=0, ds_id=0)
    gathered = torch.ops.dc.wait_allgather(gathered, graph_id=0, ds_id=0)

The shared object with the operators is loaded by the first call of a function here. A gather that
is called with ``ds_id=`` has a gradient: where the shard requires one, the backward reduces it into
the parameter's buffer. Whoever trains with DeepSpeed needs nothing of this, but
`penstock.deepspeed.install`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from penstock import _operators
from penstock._errors import PenstockError
from penstock._tracing import Recording, own_path, recorded

_DEFAULTS: dict[str, Any] = {
    "double_buffer": True,
    "symmetric_memory": False,
    "free_activation_threshold": 10 * 1024 * 1024,
    "sync_before_reduce": False,
    "sync_after_reduce": False,
    "sync_before_allgather": False,
    "sync_after_allgather": False,
    "offload_activation_pin_memory": True,
}


def init(
    process_group: Any, config: Any = None, initial_reduce_bucket_size: int = 100_000_000
) -> None:
    """Begin with a new set of parameters and graphs; all ranks of the group call this alike.

    Parameters
    ----------
    process_group : ProcessGroup
        The ranks.
    config : mapping or object, optional
        ``double_buffer``, ``symmetric_memory``, ``free_activation_threshold`` (elements),
        ``sync_before_reduce``, ``sync_after_reduce``, ``sync_before_allgather``,
        ``sync_after_allgather`` and ``offload_activation_pin_memory``, as items or attributes;
        what a mapping leaves out has DeepSpeed's default.
    initial_reduce_bucket_size : int
        Elements of gradients that travel together.
    """
    native = _operators.load()
    _register_backend()
    native.init(process_group, _configuration(config), initial_reduce_bucket_size)


def _configuration(config: Any) -> Any:
    if config is not None and not isinstance(config, Mapping):
        return config
    given = dict(config or {})
    unknown = sorted(set(given) - set(_DEFAULTS))
    if unknown:
        raise PenstockError(
            "EINVAL", f"dc.init: config has no field {unknown[0]!r}; it has {', '.join(_DEFAULTS)}"
        )
    return SimpleNamespace(**{**_DEFAULTS, **given})


def _register_backend() -> None:
    """Let ``torch.compile(backend="deepspeed")`` run graphs with operators placed by hand."""
    from torch._dynamo import list_backends, register_backend

    if "deepspeed" not in list_backends(exclude_tags=()):
        register_backend(_run_as_captured, name="deepspeed")


def _run_as_captured(module: Any, inputs: Any) -> Any:
    # Whatever removes or moves what seems to have no effect would take the operators out of place.
    return module.forward


def cleanup() -> None:
    """End what `init` began: parameters, graphs, memory and communicators."""
    _operators.load().cleanup()


def reset() -> None:
    """Forget the graphs; parameters stay. To be called before they are compiled anew."""
    _operators.load().reset()


def trace(path: str | os.PathLike[str]) -> AbstractContextManager[Recording]:
    """Record what the current runtime does inside, as `penstock.trace` does for a sharded model.

    Parameters
    ----------
    path : str or path
        The file; ``{rank}`` in it becomes the rank, and has to be there where there are several.

    Returns
    -------
    context manager
        Of the recording, with methods ``start`` and ``stop``; it is the path of this rank's file.
    """
    native = _operators.load()
    own = own_path(path, native.rank(), native.world_size())
    return recorded(Recording(native, own, _synchronize, None))


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what is in flight belongs to the trace


# ---- registration --------------------------------------------------------------------------------


def register_z3_param(  # noqa: PLR0917 - DeepSpeed passes them by position
    ds_id: int,
    ds_shape: Sequence[int],
    ds_tensor: torch.Tensor,
    grad_buffer: torch.Tensor,
    persistent: bool = False,
    expected_grad_dtype: torch.dtype | None = None,
) -> None:
    """Register a parameter of which each rank holds a part; all ranks register alike.

    Parameters
    ----------
    ds_id : int
        Its number.
    ds_shape : sequence of int
        Its whole shape.
    ds_tensor : torch.Tensor
        This rank's part of the flat parameter: of ceil(elements / ranks) elements on each rank, the
        last ones padded.
    grad_buffer : torch.Tensor
        Where the reduced gradient of that part goes; empty for a frozen parameter.
    persistent : bool
        Whether it stays gathered.
    expected_grad_dtype : torch.dtype, optional
        To which gradients are cast before they travel; left out: as they come.
    """
    _operators.load().register_z3_param(
        ds_id, list(ds_shape), ds_tensor, grad_buffer, persistent, expected_grad_dtype
    )


def register_param(
    ds_id: int,
    ds_shape: Sequence[int],
    ds_tensor: torch.Tensor,
    grad_buffer: torch.Tensor,
    offset: int,
) -> None:
    """Register a whole parameter whose gradient is partitioned (stages 1 and 2).

    Parameters
    ----------
    ds_id, ds_shape, ds_tensor
        Its number, shape and value.
    grad_buffer : torch.Tensor
        Where this rank's part of the reduced gradient goes, flat; empty where it has none.
    offset : int
        Elements of the flat gradient before that part.
    """
    _operators.load().register_param(ds_id, list(ds_shape), ds_tensor, grad_buffer, offset)


def update_param_grad_buffer(ds_id: int, grad_buffer: torch.Tensor, offset: int) -> None:
    """Put another buffer in place of the one that `register_param` was given; it is zeroed."""
    _operators.load().update_param_grad_buffer(ds_id, grad_buffer, offset)


def register_graph_z1(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Register a graph of stage 1 with the parameters in it."""
    _operators.load().register_graph_z1(graph_id, list(ds_ids))


def register_graph_z2(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Register a graph of stage 2 with the parameters in it."""
    _operators.load().register_graph_z2(graph_id, list(ds_ids))


def register_graph_z3(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Register a graph of stage 3 with the parameters in it."""
    _operators.load().register_graph_z3(graph_id, list(ds_ids))


def set_persistent(ds_id: int) -> None:
    """Gather a parameter and keep it; after an update it is gathered again at the same address."""
    _operators.load().set_persistent(ds_id)


# ---- a step --------------------------------------------------------------------------------------


def start_forward() -> None:
    """Say that a forward begins."""
    _operators.load().start_forward()


def end_forward() -> None:
    """Say that a forward has ended."""
    _operators.load().end_forward()


def start_backward(update: bool) -> None:
    """Say that a backward begins.

    Parameters
    ----------
    update : bool
        Whether the optimizer runs after it; otherwise gradients accumulate.
    """
    _operators.load().start_backward(update)


def end_backward(deps: Any = None, graph_id: int = 0, release_reduce_buckets: bool = False) -> None:
    """Reduce what is left of a graph's gradients; then the buffers may be read.

    Parameters
    ----------
    deps : object
        What the reductions of the graph returned; only its place in a graph matters.
    graph_id : int
        The graph.
    release_reduce_buckets : bool
        Whether no backward follows in this step, so that the buckets' memory can go.
    """
    _operators.load()
    torch.ops.dc.end_backward.default(deps, graph_id, release_reduce_buckets)


def reduce_grad(grad_tensor: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
    """Hand over the gradient of a parameter; returns an empty tensor.

    Parameters
    ----------
    grad_tensor : torch.Tensor
        The whole gradient.
    graph_id, ds_id : int
        The graph, and the parameter in it.
    """
    _operators.load()
    return torch.ops.dc.reduce_grad.default(grad_tensor, graph_id, ds_id)


def free_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Free the memory of activations beyond the configured size, behind what reads them."""
    _operators.load()
    torch.ops.dc.free_tensors.default(list(tensors))


def invalidate_gathered_param(ds_id: int) -> None:
    """Forget what is gathered of a parameter: its next use gathers again."""
    _operators.load().invalidate_gathered_param(ds_id)


def clear_all_gathered_params() -> None:
    """Forget what is gathered of all parameters that are not persistent."""
    _operators.load().clear_all_gathered_params()


def enable_profiling(enable: bool, dry: bool = False) -> None:
    """While on, graphs may be run to measure them: gradients go nowhere.

    Parameters
    ----------
    enable : bool
        On or off.
    dry : bool
        Gather nothing: gathered parameters have shape and dtype, and no values. Left out, gathers
        are real, so that their times and memory are.
    """
    _operators.load().enable_profiling(enable, dry)


def is_profiling() -> bool:
    """Whether profiling is on."""
    return bool(_operators.load().is_profiling())
