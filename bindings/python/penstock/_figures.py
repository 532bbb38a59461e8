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
        What a recomputation takes, or a forward where that is shorter: updates that run in the
        backward slow down what is beside them.
    backward : int
        Nanoseconds that its backward takes, with what is recomputed in it; 0: not known.
    level : int
        Bytes that were used at most until it was recomputed, from the step's peak on: 0 or less.
    """

    inputs: int = 0
    kept: int = 0
    nanoseconds: int = 0
    backward: int = 0
    level: int = 0

    def take(self, use: Use, peak: int) -> None:
        """Take a measured use for it, where it is as large as the largest one or larger.

        `peak` is that of the step, in bytes.
        """
        if use.inputs > self.inputs and not use.is_counted:
            return  # a larger one will come again, and count as one that has grown
        self.kept = max(self.kept, use.kept)
        times = _recomputing(use), _sum(use.backwards)
        level = min(use.peak - peak, 0)
        if use.inputs > self.inputs:
            self.inputs, (self.nanoseconds, self.backward) = use.inputs, times
            self.level = level
        elif use.inputs == self.inputs:
            self.level = max(self.level, level)
            self.nanoseconds = _less(self.nanoseconds, times[0])
            self.backward = _less(self.backward, times[1])

    @property
    def is_known(self) -> bool:
        """Whether it has been measured, its times too."""
        return min(self.inputs, self.kept, self.nanoseconds, self.backward) > 0

    def numbers(self) -> tuple[int, ...]:
        """Return them in the order in which they are made; the largest of all ranks is safe."""
        return astuple(self)


def _recomputing(use: Use) -> int:
    """Return what running all of it anew takes."""
    if len(use.recomputations) != len(use.forwards):
        return _sum(use.recomputations)
    return _less(_sum(use.recomputations), _sum(use.forwards))


def _sum(watches: Iterable[Stopwatch]) -> int:
    return sum(watch.nanoseconds() for watch in watches)


def _less(one: int, other: int) -> int:
    """Return the shorter time; 0 is none."""
    return min(one, other) or max(one, other)
