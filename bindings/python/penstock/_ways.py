"""Which blocks keep their activations, offload or recompute them: by time saved a byte."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from penstock._budget import Offer, choose

_SHARE = 0.8  # of what the link was measured to move: gathers, and what a job copies, need some
_LEAST_SAVED = 0.5  # of a recomputation: what an offload saves at least beside its waits
_BACKWARD = 2  # times of a forward that the backward takes beside recomputing
_PROBE, _TIMES = 32 << 20, 8  # bytes that are copied to measure the link, and how often


@dataclass(frozen=True)
class Link:
    """What moves activations between a device and its host.

    Attributes
    ----------
    down, up : int
        Bytes a second to the host and back, while the other ranks of the host copy as well.
    host_bytes : int
        Of the host's memory that this rank may take.
    """

    down: int
    up: int
    host_bytes: int


@dataclass(frozen=True)
class Choice:
    """What blocks do, by their places; the others recompute.

    Attributes
    ----------
    kept, offloaded : tuple of int
        Blocks that keep their activations, and that offload them.
    size : int
        Bytes of the device's memory that this takes beside recomputing all.
    nanoseconds : int
        What a pass saves by it.
    """

    kept: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    size: int = 0
    nanoseconds: int = 0


class Ways:
    """What a room is best used for: the same on all ranks for the same figures.

    Parameters
    ----------
    offers : sequence of Offer
        A block each, in the order of the model: what it keeps, and what its recomputation takes.
        Its forward takes as long, and its backward twice that beside.
    link : Link, optional
        None: nothing can be offloaded.
    """

    def __init__(self, offers: Sequence[Offer], link: Link | None = None) -> None:
        self._offers = offers
        self._link = link
        self._worth_it = [] if link is None else _find_offloads(offers, link)

    def choose(self, room: int) -> Choice:
        """Choose for so many bytes of the device's memory: what saves most."""
        without = self._choice(choose(self._offers, room), [])
        offloading = self._offload(room)
        if offloading is None or offloading.nanoseconds <= without.nanoseconds:
            return without
        return offloading

    def _offload(self, room: int) -> Choice | None:
        """Offload what is worth it, as far as what is left of the room does not keep it anyway."""
        offloaded = list(self._worth_it)
        window = self._window(offloaded)
        if not offloaded or window > room:
            return None
        rest = [Offer(o.size, 0) if i in offloaded else o for i, o in enumerate(self._offers)]
        kept = choose(rest, room - window)
        left = room - window - sum(self._offers[i].size for i in kept)
        for i in reversed(self._worth_it):
            if self._offers[i].size <= left:
                left -= self._offers[i].size
                offloaded.remove(i)
                kept.append(i)
        return self._choice(kept, offloaded) if offloaded else None

    def _window(self, offloaded: list[int]) -> int:
        """Return what the device holds of them: what leaves, or comes back, beside the next one."""
        return max((self._offers[i].size for i in offloaded), default=0)

    def _choice(self, kept: list[int], offloaded: list[int]) -> Choice:
        offers = self._offers
        saved = sum(offers[i].nanoseconds for i in (*kept, *offloaded))
        if self._link is not None:
            saved -= waits(offers, offloaded, self._link)
        size = self._window(offloaded) + sum(offers[i].size for i in kept)
        return Choice(tuple(sorted(kept)), tuple(sorted(offloaded)), size, saved)


def _find_offloads(offers: Sequence[Offer], link: Link) -> list[int]:
    """List the blocks that are worth an offload, by time saved a byte.

    Those come first whose copies hide beside what is listed before, so that they lie apart from
    each other where the link is slow; then those that save at least half beside what they have
    compute wait. The host has room for all of them.
    """
    by_worth = [i for i, offer in enumerate(offers) if offer.nanoseconds > 0 and offer.size > 0]
    by_worth.sort(key=lambda i: (-offers[i].nanoseconds / offers[i].size, i))
    found: list[int] = []
    waited, host = 0, link.host_bytes
    for least in (1.0, _LEAST_SAVED):
        for i in by_worth:
            if i in found or offers[i].size > host:
                continue
            more = waits(offers, [*found, i], link)
            if more - waited <= (1 - least) * offers[i].nanoseconds:
                found.append(i)
                waited, host = more, host - offers[i].size
    return found


def waits(offers: Sequence[Offer], offloaded: Collection[int], link: Link) -> int:
    """Return the nanoseconds in a pass that compute waits for copies, as `Offloading` has it.

    An offloaded call ends when the copies of the one before have; in the backward those of one
    begin when the backward gets to the one behind it. The last one's stay on the device.
    """
    places = set(offloaded)
    time = copied = waited = 0
    for i, offer in enumerate(offers):
        time += offer.nanoseconds
        if i in places:
            waited += max(0, copied - time)
            time = max(time, copied)
            copied = time + _nanoseconds(offer.size, link.down)
    time = copied = 0
    in_order = sorted(places)
    before = dict(zip(in_order[1:], in_order, strict=False))
    for i in reversed(range(len(offers))):
        if i in places:
            waited += max(0, copied - time)
            time = max(time, copied)
            if i in before:
                copied = time + _nanoseconds(offers[before[i]].size, link.up)
        time += _BACKWARD * offers[i].nanoseconds
    return waited


def _nanoseconds(size: int, rate: int) -> int:
    return int(size / (_SHARE * rate) * 1e9)


def measure_link(device: torch.device, host_bytes: int) -> Link | None:
    """Measure what a GPU's copy engines move; None elsewhere, and where there is no memory for it.

    All ranks call this at once, so that those of a host share what it has.
    """
    if device.type != "cuda":
        return None
    try:
        there = torch.empty(_PROBE, dtype=torch.uint8, device=device)
        here = torch.empty(_PROBE, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None
    return Link(_rate(here, there), _rate(there, here), host_bytes)


def _rate(to: torch.Tensor, source: torch.Tensor) -> int:
    """Return the bytes a second of copies between a GPU and its host, behind one that is first."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    to.copy_(source, non_blocking=True)
    begin.record()
    for _ in range(_TIMES):
        to.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return int(_TIMES * _PROBE / begin.elapsed_time(end) * 1e3)
