"""Ranks: process groups for the engine's own use, and DTensors on the caller's."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from penstock._errors import PenstockError

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh


class World:
    """The ranks that a model is sharded over.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        The ranks; left out, all of ``torch.distributed``, or this process alone where that is not
        initialised.
    device : torch.device
        Where the shards lie.
    timeout : float
        Seconds after which an operation among the ranks counts as failed.
    """

    def __init__(self, process_group: Any, device: torch.device, timeout: float) -> None:
        self.device = device
        self.gather: Any = None
        self.reduce: Any = None
        self.mesh: DeviceMesh | None = None
        self.rank, self.size = 0, 1
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            return
        group: Any = process_group if process_group is not None else dist.group.WORLD
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise PenstockError("EINVAL", "this process is not a rank of the process group given")
        self.size = dist.get_world_size(group)
        self.mesh = DeviceMesh.from_group(group, device.type)
        # Operations run on threads of the engine, so they need queues that nobody else uses.
        self.gather, self.reduce = private_groups(group, self.rank, self.size, timeout)

    def close(self) -> None:
        """Give up the private process groups."""
        self.gather = self.reduce = None

    def as_sharded(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Wrap the rows of this rank as a tensor of the whole shape, where there are ranks."""
        if self.mesh is None:
            return local
        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(shape, stride, local.dtype)
        spec = DTensorSpec(self.mesh, (Shard(0),), tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a sharded tensor that lie on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def stream_of(device: torch.device) -> int:
    """Return the native handle of the stream that is current on a GPU; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


_made: defaultdict[str, int] = defaultdict(int)


def private_groups(group: Any, rank: int, size: int, timeout: float) -> tuple[Any, Any]:
    """Make the two gloo groups of one engine, of the same ranks as `group` (a collective)."""
    return _private_group(group, rank, size, timeout), _private_group(group, rank, size, timeout)


def _private_group(group: Any, rank: int, size: int, timeout: float) -> Any:
    """Make a gloo group of the same ranks that torch.distributed does not know.

    It ends with its last user, also when the caller's groups were destroyed before.
    """
    name = f"penstock/{group.group_name}/{_made[group.group_name]}"
    _made[group.group_name] += 1  # all ranks make the same groups, so they find the same names
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout))
    private = dist.ProcessGroup(store, rank, size)
    private._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    private._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    private._set_group_name(dist.GroupName(name))
    return private
