"""What a block's activations take, and how long it takes to recompute them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock._units import Unit
from penstock._values import tree_leaves

_GRAIN = 512  # bytes: what torch's allocators hand out is a multiple


def tensors_of(values: list[Any]) -> list[torch.Tensor]:
    """List the tensors among arguments."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Count what tensors have, as they are seen."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def there_anyway(
    inputs: list[torch.Tensor], unit: Unit, root: Unit
) -> Iterator[torch.UntypedStorage]:
    """Yield the storages that a call of a block may save and does not make.

    Those of its inputs, of its parameters, which are gathered, and the root's, and its buffers.
    """
    groups = [*unit.groups, *root.groups]
    parameters = (
        tensor for group in groups for parameter in group.parameters for tensor in parameter.whole
    )
    for tensor in (*inputs, *parameters, *unit.module.buffers()):
        for part in _parts_of(tensor):
            if part.layout is torch.strided:
                yield part.untyped_storage()


class Stopwatch:
    """The time of something: by the device's clock on GPUs, by the host's on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._end = self._mark()

    def stop(self) -> None:
        """End it."""
        self._end = self._mark()

    def nanoseconds(self) -> int:
        """Return the time; the device has come to its end."""
        if isinstance(self._begin, int):
            return self._end - self._begin
        return int(self._begin.elapsed_time(self._end) * 1e6)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def now() -> int:
    """Return the host's time in nanoseconds."""
    return time.perf_counter_ns()


class Use:
    """What one or several calls of a block have taken, of which no backward has been run.

    Attributes
    ----------
    inputs : int
        Bytes of the calls' arguments.
    kept : int
        Bytes that their checkpoints have dropped: the block would keep them without.
    watches : list of Stopwatch
        A recomputation each.
    """

    def __init__(self) -> None:
        self.inputs = 0
        self.kept = 0
        self.watches: list[Stopwatch] = []

    @contextmanager
    def metered(self, inputs: list[torch.Tensor], unit: Unit, root: Unit) -> Iterator[None]:
        """Count what a call within its checkpoint saves for its backward.

        What is there anyway is not counted; it is asked for once parameters are gathered.
        """
        # The checkpoint's own hooks, which drop what is saved; torch calls the innermost alone.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
        # By weak references: memory that the checkpoint has dropped comes back as another tensor's.
        seen: set[StorageWeakRef] = set()

        def note(tensor: torch.Tensor) -> Any:
            if not seen:
                seen.update(map(StorageWeakRef, there_anyway(inputs, unit, root)))
            for part in _parts_of(tensor):
                storage = part.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in seen:
                    seen.add(reference)
                    self.kept += -(-storage.nbytes() // _GRAIN) * _GRAIN
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(note, unpack):
            yield

    def timed(self, device: torch.device) -> Timing:
        """Time each recomputation."""
        return Timing(self, device)


def _parts_of(tensor: Any) -> list[torch.Tensor]:
    """Return what has the memory of a tensor: of one that wraps others, these."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts_of(getattr(tensor, name))]


class Timing:
    """A context that times what runs in it, as often as it is entered: a graph may be kept."""

    def __init__(self, use: Use, device: torch.device) -> None:
        self._use = use
        self._device = device

    def __enter__(self) -> None:
        self._use.watches.append(Stopwatch(self._device))

    def __exit__(self, *failure: object) -> None:  # torch ends a recomputation by an exception
        self._use.watches[-1].stop()
