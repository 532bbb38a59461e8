"""Blocks whose activations lie in the host's memory from the forward to the backward.

What a call has saved for its backward, but for what is there anyway, is copied to the host behind
the call. The memory on the device goes back when the next such call has ended, which compute comes
to behind those copies: so a forward holds the activations of two calls at most, however far its
thread is ahead of the device. The last call's stay, as the backward begins with them. From there on
those of a call come back while the backward of the one behind it runs.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor

from penstock import _C
from penstock._activations import there_anyway
from penstock._budget import readable
from penstock._compile import not_compiled
from penstock._errors import PenstockError
from penstock._host_memory import host_share
from penstock._units import Unit
from penstock._values import tensors_of
from penstock._world import World, local_of, stream_of

_LEAST = 4096  # bytes: what is less is not worth a copy
_COUNTS = ("stores", "store_bytes", "loads", "load_bytes")
_Output = TypeVar("_Output")
_logger = logging.getLogger("penstock")


class Passes(Protocol):
    """An engine, as far as it is asked here."""

    name: str
    world: World
    runtime: _C.Runtime
    root: Unit
    stream: int


class Offloading:
    """What offloads the activations of an engine's blocks.

    Graphs hold it, into which the garbage collector does not look: it holds nothing of the model.

    Parameters
    ----------
    engine : weakref.ref of an engine
        Whose blocks they are.
    """

    def __init__(self, engine: weakref.ref[Any]) -> None:
        self._engine: Callable[[], Any] = engine  # it is there while a block of its model runs
        self._offload: _C.Offload | None = None
        self._last: weakref.ref[_Call] | None = None  # whose copies may be on their way
        self._newest: _C.Stored | None = None  # of what compute has not come behind
        self._near: list[weakref.ref[_Call]] = []  # that the backward has got to
        self._has_warned = False
        self._most_bytes: int | None = None
        self._before: Counter[str] = Counter()  # of counts: what they were at a reset

    @_disable_dynamo(recursive=False)
    def run(self, unit: Unit, forward: Callable[[], _Output], values: list[Any]) -> _Output:
        """Run a call of a block with these arguments, and offload what it saves."""
        saving = self._begin(unit, values)
        try:
            with torch.autograd.graph.saved_tensors_hooks(saving.pack, _unpack):
                output = forward()
        finally:
            saving.end()
        self._leave(saving, output)
        return output

    @not_compiled
    def _begin(self, unit: Unit, values: list[Any]) -> _Saving:
        return _Saving(_Call(self, self._last), self._engine(), unit, values)

    @not_compiled
    def _leave(self, saving: _Saving, output: Any) -> None:
        self._forget_near([])
        self._settle()
        call, kept = saving.call, saving.leaving(output)
        if not kept:
            return
        if self._offload is None:
            self._offload = _C.Offload(self._engine().runtime, self.most_bytes())
        for one in kept:
            self._newest = one.store(self._offload) or self._newest
        if any(one.stored is None for one in kept):
            self._warn_of_full()
        call.kept = [weakref.ref(one) for one in kept if one.stored is not None]
        self._last = weakref.ref(call)

    def _settle(self) -> None:
        """Have compute come behind all copies to the host; what they read is given up."""
        if self._newest is not None:
            self._newest.wait_store()  # they end in their order
            self._newest = None
        last = None if self._last is None else self._last()
        if last is not None:
            for kept in last.each():
                kept.let_go()

    def _warn_of_full(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s: the host has no more memory for activations (%s are there): what does not fit "
                "stays on the device",
                self._engine().name,
                readable(self.stats()["host_bytes"]),
            )

    def reach(self, call: _Call) -> None:
        """Note that the backward is at a call: it, and the one before it, come back."""
        if self._near and self._near[0]() is call:
            return
        if self._last is None or self._last() is not call:
            self._settle()
        before = None if call.before is None else call.before()
        near = [call] if before is None else [call, before]
        self._forget_near(near)
        self._near = [weakref.ref(one) for one in near]
        for one in near:
            for kept in one.each():
                kept.load()

    def _forget_near(self, but: list[_Call]) -> None:
        """Free what has come back: a graph that is kept may be used again."""
        for reference in self._near:
            call = reference()
            if call is not None and call not in but:
                for kept in call.each():
                    kept.forget()
        self._near = []

    def most_bytes(self) -> int:
        """Return the bytes of the host's memory that it may take, as when it was asked first."""
        if self._most_bytes is None:
            self._most_bytes = host_share(self._engine().world)
        return self._most_bytes

    def stats(self) -> Counter[str]:
        """Return counts of the copies, since `reset_stats`, and bytes of the host's memory."""
        now = Counter[str]() if self._offload is None else Counter(self._offload.stats())
        now.subtract(self._before)
        return now

    def reset_stats(self) -> None:
        """Begin to count anew; the host's peak stays."""
        self._before.update({name: self.stats()[name] for name in _COUNTS})

    def close(self) -> None:
        """Wait for its copies: the runtime ends. What is on the host is lost."""
        if self._offload is not None:
            self._offload.close()
        self._offload = None
        self._last, self._newest, self._near = None, None, []
        self._before.clear()


class _Call:
    """A call of a block: its storages that have left.

    Attributes
    ----------
    before : weakref.ref, optional
        The call that was offloaded before it.
    kept : list of weakref.ref
        Its storages, as long as its graph has them.
    """

    def __init__(self, offloading: Offloading, before: weakref.ref[_Call] | None) -> None:
        self._offloading = offloading
        self.before = before
        self.kept: list[weakref.ref[_Kept]] = []

    def reach(self) -> None:
        """Note that the backward needs it."""
        self._offloading.reach(self)

    def each(self) -> list[_Kept]:
        """List the storages that its graph still has."""
        found = (reference() for reference in self.kept)
        return [one for one in found if one is not None]


class _Kept:
    """A storage that a call has saved.

    Attributes
    ----------
    here : Tensor, optional
        A tensor on it, as long as it is on the device.
    stored : Stored, optional
        It on the host, once it is there.
    """

    def __init__(self, call: _Call, tensor: torch.Tensor) -> None:
        self._call = call
        self.here: torch.Tensor | None = tensor.detach()
        self.stored: _C.Stored | None = None
        self._version = 0
        self._loaded: Any = None  # a tensor on what has come back, or is to come
        self._has_come = False

    @property
    def version(self) -> int:
        """How often it was written in place, as long as anybody may have written what is saved."""
        return self._version if self.here is None else self.here._version

    def store(self, offload: _C.Offload) -> _C.Stored | None:
        """Copy it to the host; None: that has no memory for it."""
        if self.here is not None:
            self.stored = offload.store(self.here)
        return self.stored

    def let_go(self) -> None:
        """Give up the memory on the device: it is on the host, and compute is behind the copy."""
        if self.here is not None:
            self._version, self.here = self.here._version, None

    def load(self) -> None:
        """Begin to copy it back, unless it is here or does so."""
        if self.here is None and self._loaded is None and self.stored is not None:
            self._loaded, self._has_come = self.stored.load(), False

    def forget(self) -> None:
        """Free what has come back."""
        self._loaded = None

    def storage(self) -> torch.UntypedStorage:
        """Return it, or what has come back of it, for compute to read."""
        self._call.reach()
        if self.here is not None:
            return self.here.untyped_storage()
        self.load()
        if self.stored is not None and not self._has_come:
            self.stored.wait_load()
            self._has_come = True
        found: torch.UntypedStorage = self._loaded.untyped_storage()
        return found


class _Saving:
    """Takes what a call saves, while it runs."""

    def __init__(self, call: _Call, engine: Passes, unit: Unit, values: list[Any]) -> None:
        self.call = call
        self._device = engine.world.device
        self._stream = engine.stream
        # Once parameters are gathered; graphs hold this object, too.
        self._find_there = lambda: there_anyway(tensors_of(values), unit, engine.root)
        self._there: set[int] | None = None  # storages
        self._kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()

    @not_compiled
    def pack(self, tensor: torch.Tensor) -> _Packed:
        if type(tensor) is DTensor:
            return _Divided(self.pack(tensor._local_tensor), tensor)
        if not self._may_leave(tensor):
            return _Held(tensor)
        if self._there is None:
            self._there = {storage._cdata for storage in self._find_there()}
        place = tensor.untyped_storage()._cdata
        if place in self._there:
            return _Held(tensor)
        kept = self._kept.get(place)
        if kept is None:
            kept = self._kept[place] = _Kept(self.call, tensor)
        return _Saved(kept, tensor)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        """Whether it is plain memory of the device, which compute reads on the engine's stream."""
        return (
            type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() >= _LEAST
            and stream_of(self._device) == self._stream
        )

    @not_compiled
    def end(self) -> None:
        """Let go of the model: the call has ended."""
        self._find_there = lambda: iter(())

    def leaving(self, output: Any) -> list[_Kept]:
        """List what the call has saved, but for what it has returned, which others hold."""
        dense = [one for one in tensors_of(output) if one.layout is torch.strided]
        outputs = {local_of(one).untyped_storage()._cdata for one in dense}
        return [kept for place, kept in self._kept.items() if place not in outputs]


class _Saved:
    """A tensor that was saved, as it lies on its storage."""

    def __init__(self, kept: _Kept, tensor: torch.Tensor) -> None:
        self._kept = kept
        self._version = kept.version
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._lies = tensor.storage_offset(), tensor.size(), tensor.stride()

    def unpack(self) -> torch.Tensor:
        storage = self._kept.storage()
        _refuse_written(self._kept.version != self._version)
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._lies)


class _Held:
    """A tensor that was saved and stays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # an output that is held itself would hold its graph
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        _refuse_written(self._tensor._version != self._version)
        return self._tensor


class _Divided:
    """A DTensor that was saved."""

    def __init__(self, local: _Packed, tensor: DTensor) -> None:
        self._local = local
        self._spec = tensor._spec

    def unpack(self) -> torch.Tensor:
        return DTensor(self._local.unpack(), self._spec, requires_grad=False)


_Packed = _Saved | _Held | _Divided  # what autograd has in place of a tensor that it has saved


@not_compiled
def _unpack(saved: _Packed) -> torch.Tensor:
    return saved.unpack()


def _refuse_written(is_written: bool) -> None:
    """Raise what torch raises by itself where nobody takes what is saved."""
    if is_written:
        raise PenstockError(
            "ESTATE",
            "a tensor that a block with offloaded activations has saved for its backward was "
            "modified by an inplace operation behind that: do it out of place",
        )
