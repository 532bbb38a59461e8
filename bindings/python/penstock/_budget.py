"""What memory is left in a step, and what it buys: by time saved a byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Memory = str | int | float  # "auto", bytes, or a fraction of the device's

# Steps of one shape do not all take the same: a library's workspace comes late, a rank routes more
# tokens. And torch's allocator cannot use all that it has reserved: what is free lies in pieces
# (9.3 of 132 GiB where a step of an 8B model ran out of memory), which are measured where they can.
_MARGIN = 0.10  # of the device's memory, pieces included
_LEAST_MARGIN = 0.05  # beside measured pieces


@dataclass(frozen=True)
class Offer:
    """Something that takes memory and saves time: a block's activations that are kept, say.

    Attributes
    ----------
    size : int
        Bytes that it takes.
    nanoseconds : int
        What it saves.
    """

    size: int
    nanoseconds: int


def choose(offers: Sequence[Sequence[Offer]], budget: int) -> list[int | None]:
    """Choose one offer of each at most, by time saved a byte, as long as they fit.

    It goes from each offer to the one that saves most for each byte more. All ranks choose the same
    for the same figures.

    Parameters
    ----------
    offers : sequence of sequences of Offer
        What can be had instead of each other, in the order in which a step takes them: of those of
        equal worth the last are the best, as their memory comes back first.
    budget : int
        Bytes for all of them together.

    Returns
    -------
    list of int or None
        The place of what is chosen of each. What saves nothing is not chosen.
    """
    steps = [(_worth(step), i, step) for i, each in enumerate(offers) for step in _steps(each)]
    steps.sort(key=lambda step: step[:2], reverse=True)  # stable: of one place they are in order
    chosen: list[int | None] = [None] * len(offers)
    ended = set()
    for _, i, step in steps:
        if i in ended:
            continue
        if step.size <= budget:
            budget -= step.size
            chosen[i] = step.offer
        else:
            ended.add(i)
    return chosen


@dataclass(frozen=True)
class _Step(Offer):
    """What an offer takes and saves more than one before."""

    offer: int  # its place


def _worth(step: Offer) -> float:
    return step.nanoseconds / max(step.size, 1)


def _steps(offers: Sequence[Offer]) -> Iterator[_Step]:
    """Go from nothing to what saves most for each byte more, and on from there."""
    now = Offer(0, 0)
    while True:
        more = [
            _Step(offer.size - now.size, offer.nanoseconds - now.nanoseconds, i)
            for i, offer in enumerate(offers)
            if offer.nanoseconds > now.nanoseconds
        ]
        if not more:
            return
        best = max(more, key=lambda step: (_worth(step), -step.size))
        now = offers[best.offer]
        yield best


def readable(size: int) -> str:
    """Return a number of bytes with its unit."""
    unit, name = (2**20, "MiB") if size >= 2**20 else (2**10, "KiB")
    return f"{size / unit:.1f} {name}"


# ---- memory --------------------------------------------------------------------------------------


def begin_peak(device: torch.device) -> None:
    """Begin to measure how much memory is used at most; torch's own peak begins anew with it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def pieces_of(device: torch.device) -> int:
    """Return the bytes that torch had reserved beyond what it had allocated, at most of each.

    What a step makes of them shows where `release_pieces` came before `begin_peak`.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def peak_of(device: torch.device) -> int:
    """Return how many bytes torch has used at most since its peak began; on the CPU 0."""
    if device.type != "cuda":
        return 0
    # max_memory_allocated returns this too, in five times the time.
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])


def release_pieces(device: torch.device) -> None:
    """Give back what torch's allocator has cached: it is cut for steps that keep something else."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def left_at_peak(memory: Memory, device: torch.device, pieces: int) -> int:
    """Say how many bytes the use since `begin_peak` has left, at its peak; none: 0 or less.

    Parameters
    ----------
    memory : str, int or float
        "auto": all that the device has for torch, but for a margin of 10 %, or of 5 % beside the
        pieces if that is more. Bytes, or a fraction of the device's memory: what torch's allocator
        may hold at the peak, which Penstock's memory is a part of, and no more than with "auto". On
        the CPU, where nobody counts, bytes are left as they are.
    device : torch.device
        Whose memory it is.
    pieces : int
        Bytes that torch cannot use of what it has reserved.
    """
    if device.type != "cuda":
        return int(memory)
    free, total = torch.cuda.mem_get_info(device)
    # What torch has reserved and not allocated is free to torch, as far as it may go.
    most = free + torch.cuda.memory_reserved(device)
    most = min(most, int(torch.cuda.get_per_process_memory_fraction(device) * total))
    most -= max(int(_MARGIN * total), pieces + int(_LEAST_MARGIN * total))
    if memory != "auto":
        most = min(most, int(memory * total) if isinstance(memory, float) else int(memory))
    return most - torch.cuda.max_memory_allocated(device)
