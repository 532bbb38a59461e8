"""What a block's activations take, and how long its backward and recomputations do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from penstock._budget import peak_of
from penstock._compile import not_compiled
from penstock._units import Unit
from penstock._values import tensors_of

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # forward, recomputation

_GRAIN = 512  # bytes: what torch's allocators hand out is a multiple
# Products of square matrices before what is measured: some tenth of a second of an H200's. They are
# half of the launches that CUDA queues.
_PRODUCTS, _WIDTH = 512, 4096


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


def begin_late(device: torch.device) -> None:
    """Have a GPU work a while before what is measured, which then waits for no host.

    It does not rest meanwhile: one that has runs faster for a while than one that trains.
    """
    if device.type != "cuda":
        return
    with _unseen(), suppress(torch.OutOfMemoryError):
        generator = torch.Generator(device).manual_seed(0)  # the model's draws go on as they were
        matrix = torch.randn(
            (_WIDTH, _WIDTH), generator=generator, dtype=torch.float16, device=device
        )
        product = torch.empty_like(matrix)
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix, out=product)


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide what runs inside from autograd, and from modes that count or change operators."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class Use:
    """What one or several calls of a block have taken, of which no backward has been run.

    Attributes
    ----------
    inputs : int
        Bytes of the calls' arguments.
    kept : int
        Bytes that they have saved, or that their checkpoints have dropped: the block would keep
        them without.
    is_counted : bool
        Whether that was counted.
    peak : int
        Bytes that torch had used at most when the last of them began to be recomputed.
    forwards, recomputations, backwards : list of Stopwatch
        One each: of the forward, of recomputing all, and of the backward with what is recomputed in
        it.
    """

    def __init__(self) -> None:
        self.inputs = 0
        self.kept = 0
        self.is_counted = True
        self.peak = 0
        self.forwards: list[Stopwatch] = []
        self.recomputations: list[Stopwatch] = []
        self.backwards: list[Stopwatch] = []


class Call:
    """A call of a block that is measured.

    Parameters
    ----------
    use : Use
        Takes what is measured.
    unit, root : Unit
        The block, and the root of its model.
    device : torch.device
        Whose clock counts.
    counts : bool
        Whether the bytes of what it saves are counted.
    """

    def __init__(
        self, use: Use, unit: Unit, root: Unit, device: torch.device, *, counts: bool
    ) -> None:
        self._use = use
        self._unit = unit
        self._root = root
        self._device = device
        self._counts = counts
        use.is_counted &= counts
        self._inputs: list[torch.Tensor] = []
        # By weak references: memory that the checkpoint has dropped comes back as another tensor's.
        self._seen: set[StorageWeakRef] = set()

    @not_compiled
    def begin(self, values: list[Any]) -> list[Any]:
        """Take its arguments; return those that it is to be called with.

        The first one that gets a gradient is behind a node whose backward ends the block's: what
        lies before may have to wait for its parameters.
        """
        self._use.forwards.append(Stopwatch(self._device))
        self._inputs = tensors_of(values)
        place = _first_with_gradient(values)
        if place is None:
            return values
        marked = values[place].view_as(values[place])
        if marked.grad_fn is None:  # within a transform of torch.func's
            return values
        _after(marked.grad_fn, self._use.backwards)
        return [*values[:place], marked, *values[place + 1 :]]

    @not_compiled
    def end(self, output: Any) -> None:
        """Take what it has returned: its backward begins once its parameters are there."""
        self._use.forwards[-1].stop()
        tensors = tensors_of(output)
        place = _first_with_gradient(tensors)
        if place is not None and tensors[place].grad_fn is not None:
            _before(tensors[place].grad_fn, self._use.backwards, self._device)
        self._inputs = []

    def contexts(self) -> Contexts:
        """Return what counts all that it saves within its checkpoint, and times running it anew."""
        counted = self.counted() if self._counts else nullcontext()
        return counted, Timing(self._use, self._device)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is saved for its backward, whether a checkpoint drops it or not."""
        # The checkpoint's own hooks, which drop what is saved; torch calls the innermost alone.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = (torch.Tensor.detach, _as_it_is) if hooks is None else hooks

        def note(tensor: torch.Tensor) -> Any:
            self.count([tensor])
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(note, unpack):
            yield

    @not_compiled
    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are saved, each memory once.

        What is there anyway is not counted; it is asked for once parameters are gathered.
        """
        if not self._seen:
            there = there_anyway(self._inputs, self._unit, self._root)
            self._seen.update(map(StorageWeakRef, there))
        for part in (part for tensor in tensors for part in _parts_of(tensor)):
            storage = part.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference not in self._seen:
                self._seen.add(reference)
                self._use.kept += -(-storage.nbytes() // _GRAIN) * _GRAIN


def _as_it_is(saved: Any) -> Any:
    return saved


def _first_with_gradient(values: list[Any]) -> int | None:
    """Return the place of the first tensor that gets a gradient: a block's activations, mostly."""
    places = (i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad)
    return next(places, None)


def _before(node: Any, watches: list[Stopwatch], device: torch.device) -> None:
    node.register_prehook(lambda gradients: watches.append(Stopwatch(device)))


def _after(node: Any, watches: list[Stopwatch]) -> None:
    def stop(*gradients: Any) -> None:
        if watches:
            watches[-1].stop()

    node.register_hook(stop)


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
        self._use.peak = peak_of(self._device)
        self._use.recomputations.append(Stopwatch(self._device))

    def __exit__(self, *failure: object) -> None:  # torch ends a recomputation by an exception
        self._use.recomputations[-1].stop()
