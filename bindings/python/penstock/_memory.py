"""Memory of torch's allocator on GPUs, apart from what steps take and give back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache

import torch
from torch.cuda.memory import CUDAPluggableAllocator
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from penstock import _C

_SMALL = 1 << 20  # bytes: torch has other segments for what is no larger
_settled = WeakTensorKeyDictionary()  # the tensors that `set_apart` has been given


def segment_maker(device: torch.device) -> Callable[[int], torch.Tensor] | None:
    """Make what makes an engine's segments: tensors, each in a pool that it has for itself.

    They are in torch's figures (``torch.cuda.memory_allocated`` and its kin), and other processes
    can map them. Where memory runs out, torch's cache is freed first. What a tensor had goes back
    to the GPU when torch frees its cache.

    Parameters
    ----------
    device : torch.device
        Of the engine.

    Returns
    -------
    callable, optional
        From a number of bytes to a tensor that begins where its segment does; None on the CPU.
    """
    if device.type != "cuda":
        return None

    def make(size: int) -> torch.Tensor:
        # Of a pool that is in use torch would free nothing. Blocks are not split: a peer that maps
        # one finds it at the begin.
        with torch.cuda.device(device):
            pool = torch.cuda.MemPool(_exportable().allocator(), no_split=True)
        return _made_in(pool, device, lambda: torch.empty(size, dtype=torch.uint8, device=device))

    return make


class Lasting:
    """Memory for what outlives steps; it stays as long as what lies in it, and this object, do.

    What is made amid a step would lie in a segment that some activation has left, and a CUDA graph,
    whose memory is its own, could never have the rest of it.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, torch.cuda.MemPool] = {}

    def make(self, device: torch.device, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Have `allocate` make a tensor of the device there, on a GPU."""
        if device.type != "cuda":
            return allocate()
        if device not in self._pools:
            with torch.cuda.device(device):
                self._pools[device] = torch.cuda.MemPool()
        return _made_in(self._pools[device], device, allocate)


def set_apart(tensors: Iterable[torch.Tensor]) -> None:
    """Move what tensors hold out of segments that activations have left.

    A tensor is moved the first time or never: graphs that are captured behind it know where it
    lies. It stays where it is if memory runs out.

    Parameters
    ----------
    tensors : iterable of torch.Tensor
        On GPUs, of which nobody has views: sharded ones or not.
    """
    lasting = Lasting()
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.nbytes > _SMALL and tensor not in _settled:
            _settled[tensor] = True
            with suppress(torch.OutOfMemoryError):
                local.data = lasting.make(local.device, local.clone)


def _made_in(
    pool: torch.cuda.MemPool, device: torch.device, allocate: Callable[[], torch.Tensor]
) -> torch.Tensor:
    try:
        with torch.cuda.use_mem_pool(pool, device):
            return allocate()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # which torch does by itself outside of such pools only
        with torch.cuda.use_mem_pool(pool, device):
            return allocate()


@cache
def _exportable() -> CUDAPluggableAllocator:
    return CUDAPluggableAllocator(_C.__file__, "penstock_segment_alloc", "penstock_segment_free")
