"""What is known of blocks: figures that were measured, which all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from penstock._activations import Stopwatch, Use


@dataclass
class Figures:
    """The largest uses of a block that were measured; agreed on when it is decided.

    Attributes
    ----------
    inputs, kept : int
        Bytes of its arguments, and of the activations that it would keep.
    nanoseconds : int
        What a recomputation takes.
    backward : int
        Nanoseconds that its backward takes, with what is recomputed in it; 0: not known.
    """

    inputs: int = 0
    kept: int = 0
    nanoseconds: int = 0
    backward: int = 0

    def take(self, use: Use) -> None:
        """Take a measured use for it, where it is as large as the largest one or larger."""
        self.kept = max(self.kept, use.kept)
        times = _sum(use.recomputations), _sum(use.backwards)
        if use.inputs > self.inputs:
            self.inputs, (self.nanoseconds, self.backward) = use.inputs, times
        elif use.inputs == self.inputs:
            self.nanoseconds = _less(self.nanoseconds, times[0])
            self.backward = _less(self.backward, times[1])

    def numbers(self) -> tuple[int, int, int, int]:
        """Return them in the order in which they are made."""
        return astuple(self)


def _sum(watches: Iterable[Stopwatch]) -> int:
    return sum(watch.nanoseconds() for watch in watches)


def _less(one: int, other: int) -> int:
    """Return the shorter time; 0 is none."""
    return min(one, other) or max(one, other)
