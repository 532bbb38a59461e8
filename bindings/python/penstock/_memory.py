"""Memory of engines on GPUs that torch's allocator counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.cuda.memory import CUDAPluggableAllocator

from penstock import _C


def segment_maker(device: torch.device) -> Callable[[int], torch.Tensor] | None:
    """Make what makes an engine's segments: tensors of a pool that the engine has for itself.

    They are in torch's figures (``torch.cuda.memory_allocated`` and its kin), and other processes
    can map them. Where memory runs out, torch's cache is freed first. The pool's memory goes
    back to the GPU when the last tensor and the maker are gone.

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
    # Blocks are not split: a peer that maps one finds it at the begin.
    pool = torch.cuda.MemPool(_exportable().allocator(), no_split=True)

    def allocate(size: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool, device):
            return torch.empty(size, dtype=torch.uint8, device=device)

    def make(size: int) -> torch.Tensor:
        try:
            return allocate(size)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # which torch does by itself outside of such pools only
            return allocate(size)

    return make


@cache
def _exportable() -> CUDAPluggableAllocator:
    return CUDAPluggableAllocator(_C.__file__, "penstock_segment_alloc", "penstock_segment_free")
