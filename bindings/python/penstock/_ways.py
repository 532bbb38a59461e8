"""Which blocks keep, offload or recompute their activations, all or some: by time saved a byte."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock._budget import Offer, choose

_SHARE = 0.8  # of what the link was measured to move: gathers, and what a job copies, need some
_LEAST_SAVED = 0.5  # of a recomputation: what an offload saves at least beside its waits
_BACKWARD = 2  # times of a forward that the backward takes beside recomputing
_GRAIN = 64 << 20  # bytes: what more may be kept is searched for by
_NONE: Mapping[int, Offer] = {}
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
class Block:
    """What a block can do other than recompute all.

    Attributes
    ----------
    keep : Offer
        What it keeps, and what its recomputation takes.
    select : Offer, optional
        What it saves selectively; None: that is not known, or nothing.
    leaves : bool
        Whether that can be offloaded.
    level : int
        Bytes that a step in which all blocks recompute uses at most until this one's backward
        begins, from its peak on: 0 or less.
    spared : int
        Nanoseconds that its recomputation takes less than its forward. Its backward takes twice a
        forward beside recomputing.
    """

    keep: Offer
    select: Offer | None = None
    leaves: bool = False
    level: int = 0
    spared: int = 0

    @property
    def forward(self) -> int:
        """The nanoseconds that its forward takes."""
        return self.keep.nanoseconds + self.spared

    @property
    def offers(self) -> list[Offer]:
        """What it can do on the device."""
        return [self.keep] if self.select is None else [self.keep, self.select]


@dataclass(frozen=True)
class Choice:
    """What blocks do, by their places; the others recompute all.

    Attributes
    ----------
    kept, selective, offloaded : tuple of int
        Blocks that keep their activations, that keep those which are dear to recompute, and that
        offload what they do not recompute.
    offloaded_selectively : tuple of int
        Those of the latter that recompute what is cheap to.
    size : int
        Bytes of the device's memory by which the step's peak is higher than with recomputing all:
        less than is kept, as what blocks keep is gone where gradients are there.
    nanoseconds : int
        What a pass saves by it.
    """

    kept: tuple[int, ...] = ()
    selective: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    offloaded_selectively: tuple[int, ...] = ()
    size: int = 0
    nanoseconds: int = 0


class Ways:
    """What a room is best used for: the same on all ranks for the same figures.

    Parameters
    ----------
    blocks : sequence of Block
        In the order of the model.
    link : Link, optional
        None: nothing can be offloaded.
    """

    def __init__(self, blocks: Sequence[Block], link: Link | None = None) -> None:
        self._blocks = blocks
        self._link = link
        self._offloads = [] if link is None else [_Offloads(b, link) for b in _leaving(blocks)]

    def choose(self, room: int) -> Choice:
        """Choose for so many bytes that a step's peak may be higher: what saves most."""
        best, low = self._keep(room), room
        high = sum(offer.size for block in self._blocks for offer in block.offers)
        while high - low > _GRAIN and any(block.level for block in self._blocks):
            middle = (low + high) // 2
            found = self._keep(middle)
            if found.size <= room:
                best, low = max(best, found, key=lambda choice: choice.nanoseconds), middle
            else:
                high = middle
        return best

    def _keep(self, room: int) -> Choice:
        """Choose for so many bytes that are kept."""
        ways = [self._offload(offloads, room) for offloads in self._offloads]
        found = [self._choice(self._fill(room)), *(way for way in ways if way is not None)]
        return max(found, key=lambda choice: choice.nanoseconds)  # the first of equal ones

    def _fill(self, room: int, offloaded: Collection[int] = ()) -> dict[int, Offer]:
        """Choose what blocks that are not offloaded do on the device."""
        offers = [[] if i in offloaded else block.offers for i, block in enumerate(self._blocks)]
        chosen = enumerate(choose(offers, room))
        return {i: offers[i][place] for i, place in chosen if place is not None}

    def _offload(self, offloads: _Offloads, room: int) -> Choice | None:
        """Offload what is worth it, as far as what is left of the room does not keep it anyway."""
        offloaded = dict(offloads.worth_it)
        window = _window(offloaded)
        if not offloaded or window > room:
            return None
        here = self._fill(room - window, offloaded)
        left = room - window - sum(offer.size for offer in here.values())
        for i, offer in reversed(offloads.worth_it.items()):
            if offer.size <= left:
                left -= offer.size
                here[i] = offloaded.pop(i)
        waited = offloads.waits(offloaded)
        return self._choice(here, offloaded, waited) if offloaded else None

    def _choice(
        self, here: dict[int, Offer], offloaded: Mapping[int, Offer] = _NONE, waited: int = 0
    ) -> Choice:
        def is_kept(i: int, offer: Offer) -> bool:
            return offer is self._blocks[i].keep

        saved = sum(offer.nanoseconds for offer in (*here.values(), *offloaded.values()))
        return Choice(
            kept=tuple(sorted(i for i, offer in here.items() if is_kept(i, offer))),
            selective=tuple(sorted(i for i, offer in here.items() if not is_kept(i, offer))),
            offloaded=tuple(sorted(offloaded)),
            offloaded_selectively=tuple(
                sorted(i for i, offer in offloaded.items() if not is_kept(i, offer))
            ),
            size=_window(offloaded) + self._rise(here),
            nanoseconds=saved - waited,
        )

    def _rise(self, here: Mapping[int, Offer]) -> int:
        """Return by how much the peak rises: what is kept is there until its block's backward."""
        kept = most = 0
        for i in sorted(here, key=lambda i: -self._blocks[i].level):
            kept += here[i].size
            most = max(most, kept + self._blocks[i].level)
        return most


def _window(offloaded: Mapping[int, Offer]) -> int:
    """Return what the device holds of them: what leaves, or comes back, beside the next one."""
    return max((offer.size for offer in offloaded.values()), default=0)


def _leaving(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Yield what blocks may offload: all that they keep, or what they save selectively."""
    yield [Block(block.keep, spared=block.spared) for block in blocks]
    if any(block.leaves and block.select is not None for block in blocks):
        yield blocks


class _Offloads:
    """Blocks that are worth an offload, selectively where that can be, by time saved a byte.

    Those come first whose copies hide beside what is listed before, so that they lie apart from
    each other where the link is slow; then those that save at least half beside what they have
    compute wait. The host has room for all of them.

    Attributes
    ----------
    worth_it : dict of int and Offer
        Blocks by their places.
    """

    def __init__(self, blocks: Sequence[Block], link: Link) -> None:
        self._link = link
        self._offers = [b.select if b.leaves and b.select else b.keep for b in blocks]
        # What is copied of each, and how long its forward takes.
        self._copies = [
            Offer(offer.size, block.forward)
            for offer, block in zip(self._offers, blocks, strict=True)
        ]
        self.worth_it = {i: self._offers[i] for i in self._find()}

    def waits(self, offloaded: Collection[int]) -> int:
        """Return what compute waits for copies of these."""
        return waits(self._copies, offloaded, self._link)

    def _find(self) -> list[int]:
        offers = self._offers
        by_worth = [i for i, offer in enumerate(offers) if offer.nanoseconds > 0 and offer.size > 0]
        by_worth.sort(key=lambda i: (-offers[i].nanoseconds / offers[i].size, i))
        found: list[int] = []
        waited, host = 0, self._link.host_bytes
        for least in (1.0, _LEAST_SAVED):
            for i in by_worth:
                if i in found or offers[i].size > host:
                    continue
                more = self.waits([*found, i])
                if more - waited <= (1 - least) * offers[i].nanoseconds:
                    found.append(i)
                    waited, host = more, host - offers[i].size
        return found


def waits(offers: Sequence[Offer], offloaded: Collection[int], link: Link) -> int:
    """Return the nanoseconds in a pass that compute waits for copies, as `Offloading` has it.

    Offers are what is copied of each block, and how long its forward takes.
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
