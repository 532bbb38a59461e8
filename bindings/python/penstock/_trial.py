"""What recomputing takes as it will be done, all or selectively, as a step has shown."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock._budget import Offer
from penstock._checkpoint import Checkpointed
from penstock._figures import Figures

STEPS = 2  # of a trial: blocks are compiled anew in the first one, and measured in the other
_MOST_SPARED = 0.5  # of what recomputing takes: a clock that says more is wrong


@dataclass(frozen=True)
class Share:
    """What a block saves selectively, of what it keeps otherwise.

    Attributes
    ----------
    size : float
        Of the bytes.
    time : float
        Of the recomputation that keeping all saves.
    """

    size: float
    time: float

    def of(self, figures: Figures, spared: int) -> Offer:
        """Return it for a block of this kind, to whose backward it is much the same.

        Recomputing all spares so many nanoseconds.
        """
        saved = int(self.time * figures.nanoseconds) - spared
        return Offer(int(self.size * figures.kept), max(saved, 0))


def kind_of(block: Checkpointed) -> Hashable:
    """Return what blocks that are alike have in common."""
    parameters = (parameter for group in block.unit.groups for parameter in group.parameters)
    shapes = tuple((parameter.shape, parameter.trainable) for parameter in parameters)
    return type(block.unit.module), shapes


class Trial:
    """A step in which blocks recompute as they will, within what is compiled, and some selectively.

    Parameters
    ----------
    blocks : iterable of Checkpointed
        All of them.
    selective : dict of kind and Checkpointed
        One of each kind that is not known.
    end : int
        The number of the step that it ends with.

    Attributes
    ----------
    figures : dict of Checkpointed and Figures
        What is measured of them.
    """

    def __init__(
        self,
        blocks: Iterable[Checkpointed],
        selective: Mapping[Hashable, Checkpointed],
        end: int,
    ) -> None:
        self.end = end
        self.figures = {block: Figures() for block in blocks}
        self._selective = selective

    def shares(
        self, recomputed: Mapping[Checkpointed, Figures]
    ) -> Iterator[tuple[Hashable, Share | None]]:
        """Yield what was found of each kind, by what is known of recomputing all."""
        for kind, block in self._selective.items():
            yield kind, _share(self.figures[block], recomputed[block])

    def spared(
        self, recomputed: Mapping[Checkpointed, Figures], compiled: Iterable[Checkpointed]
    ) -> Iterator[tuple[Hashable, float]]:
        """Yield what need not be recomputed within compiled code, of recomputing around it.

        The last product's result, say, which no gradient needs.
        """
        selective = set(self._selective.values())
        kinds: dict[Hashable, list[Checkpointed]] = {}
        for block in compiled:
            figures = self.figures[block]
            is_alike = figures.backward > 0 and figures.inputs == recomputed[block].inputs
            if block not in selective and is_alike and recomputed[block].is_known:
                kinds.setdefault(kind_of(block), []).append(block)
        for kind, blocks in kinds.items():
            before, after = (
                sum(of[block].backward for block in blocks) for of in (recomputed, self.figures)
            )
            whole = sum(recomputed[block].nanoseconds for block in blocks)
            yield kind, min(max(0.0, (before - after) / whole), _MOST_SPARED)


def find_trial(
    figures: Mapping[Checkpointed, Figures], known: Mapping[Hashable, object], room: int
) -> dict[Hashable, Checkpointed]:
    """Choose a block of each kind that is not known, as long as all that they keep fits.

    It is the one in the middle: what others do has the same share in its backward as in most. Of
    blocks without a gradient of their inputs no time is known.
    """
    kinds: dict[Hashable, list[Checkpointed]] = {}
    for block, of_block in figures.items():
        if of_block.is_known:
            kinds.setdefault(kind_of(block), []).append(block)
    found: dict[Hashable, Checkpointed] = {}
    for kind, blocks in kinds.items():
        block = blocks[len(blocks) // 2]
        if kind not in known and figures[block].kept <= room:
            found[kind] = block
            room -= figures[block].kept
    return found


def _share(selective: Figures, recomputed: Figures) -> Share | None:
    """Compare two backwards of a block; None: a selective one saves nothing."""
    if not selective.kept or not selective.backward:
        return None
    grown = selective.inputs / recomputed.inputs  # steps may be of several sizes
    saved = recomputed.backward - selective.backward / grown
    if saved <= 0:
        return None
    size = selective.kept / grown / recomputed.kept
    return Share(size, min(1.0, saved / recomputed.nanoseconds))
