"""Put Penstock under torchtitan: `shard` takes the place of FSDP2 in a model's train spec.

    from penstock.torchtitan import convert
    register_train_spec("llama3", convert(get_train_spec("llama3")))

before the trainer is built is all that a program changes. It was proved with torchtitan 0.2.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, TypeVar

import torch
from torch import nn

from penstock._errors import PenstockError
from penstock._framework import Framework
from penstock._shard import shard

Spec = TypeVar("Spec")

_torchtitan = Framework("torchtitan", "0.2")
_NAME = "apply_fsdp"  # what a model's parallelize function calls for FSDP2


def convert(spec: Spec, **options: Any) -> Spec:
    """Make a train spec whose models `penstock.shard` shards, of one of torchtitan's.

    What comes before FSDP2 stays: tensor parallelism, activation checkpointing, compilation of
    blocks. ``[parallelism]`` and ``[training]`` of a job's configuration are meant as for FSDP2:
    shards and replicas, precision, and ``fsdp_reshard_after_forward``, which is stage 3, or 2 for
    "never". A job without shards trains as before.

    Parameters
    ----------
    spec : TrainSpec
        Of a language model: its parallelize function calls ``apply_fsdp``, and blocks are in
        ``model.layers``. It stays as it is.
    **options
        Of `shard`; they go before what the job's configuration says.

    Returns
    -------
    TrainSpec

    Raises
    ------
    PenstockError
        EMISMATCH: its parallelize function is another one than what this was proved with. Later,
        when a model is parallelized: EUNSUPPORTED for pipelines and experts over ranks of
        their own, and what `shard` itself raises.
    ImportError
        There is no torchtitan.
    """
    _torchtitan.warn_of_other_version(_torchtitan.load().__version__)
    parallelize = getattr(spec, "parallelize_fn", None)
    if not isinstance(parallelize, types.FunctionType) or _NAME not in parallelize.__globals__:
        raise PenstockError(
            "EMISMATCH",
            f"the parallelize function {parallelize!r} of this train spec calls no {_NAME!r}: give "
            f"a spec of {_torchtitan.proved}, or call penstock.shard in a function of yours",
        )
    ours = functools.partial(_apply_shard, options=options)
    parallelize_and_shard = types.FunctionType(
        parallelize.__code__,
        {**parallelize.__globals__, _NAME: ours},
        parallelize.__name__,
        parallelize.__defaults__,
        parallelize.__closure__,
    )
    parallelize_and_shard.__kwdefaults__ = parallelize.__kwdefaults__
    return dataclasses.replace(spec, parallelize_fn=parallelize_and_shard)  # type: ignore[type-var]


def _apply_shard(
    model: nn.Module,
    dp_mesh: Any,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    options: dict[str, Any],
    pp_enabled: bool = False,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
    ep_degree: int = 1,
    **of_experts: Any,
) -> None:
    """In place of what calls ``fully_shard``, with its arguments."""
    wishes = {
        "pipeline_parallel_degree": pp_enabled,
        "expert_parallel_degree": ep_degree > 1,
    }
    for wish in (wish for wish, is_wished in wishes.items() if is_wished):
        raise PenstockError(
            "EUNSUPPORTED",
            f"the job's configuration asks for {wish}, which penstock.shard has not under "
            "torchtitan: leave it out",
        )
    names = dp_mesh.mesh_dim_names
    dims = {"shard_dim": names[-1], "replicate_dim": names[0]} if len(names) > 1 else {}
    given = {
        "blocks": list(model.get_submodule("layers").children()),
        "stage": 2 if reshard_after_forward_policy == "never" else 3,
        "device": _device_of(dp_mesh),
        "mesh": dp_mesh,
        "param_dtype": param_dtype,
        "reduce_dtype": reduce_dtype,
        "offload": "parameters" if cpu_offload else None,
        **dims,
    }
    shard(model, **{**given, **options})
    model.register_forward_hook(functools.partial(_sum_gradients, dp_mesh.size()))


def _device_of(mesh: Any) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _sum_gradients(ranks: int, model: nn.Module, args: Any, output: torch.Tensor) -> None:
    """Have gradients be sums over the ranks: torchtitan divides losses by the tokens of all."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * ranks)
