"""Plans that might be made of a recorded pass: what each takes, and which one is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock import _C
from penstock._arguments import Options
from penstock._budget import Offer, choose, readable

_LEAST = 1e-3  # of a pass: what memory has to save


@dataclass(frozen=True)
class Draft:
    """A plan that was not made.

    Attributes
    ----------
    prefetch_ahead : int
        Groups that are gathered ahead of their use.
    keep_bytes : int
        Bytes of groups that stay gathered from forward to backward, beside those.
    peak : int
        Bytes of gathered groups at most.
    nanoseconds : int
        Of a pass, as predicted; 0: no times are known.
    """

    prefetch_ahead: int
    keep_bytes: int
    peak: int
    nanoseconds: int

    def cost(self, first: Draft) -> int:
        """Return the bytes that it takes more than another one; negative: less."""
        return self.peak - first.peak

    def saved(self, first: Draft) -> int:
        """Return the nanoseconds by which its pass is shorter than that of another one."""
        return first.nanoseconds - self.nanoseconds

    def describe(self, first: Draft) -> str:
        """Say in a line what it does, and what that takes and saves beside another one."""
        return (
            f"{self.prefetch_ahead} groups are gathered ahead, and of others "
            f"{readable(self.keep_bytes)} stay gathered: {readable(self.cost(first))} more than "
            f"without, for a pass of {self.nanoseconds / 1e6:.2f} instead of "
            f"{first.nanoseconds / 1e6:.2f} ms"
        )


def make_drafts(
    native: _C.Engine, recording: _C.Recording, options: Options, room: int
) -> list[Draft]:
    """Draft plans of a recording that take different memory; all ranks call this alike.

    Parameters
    ----------
    native, recording
        The C engine, and a pass of its own with times.
    options : Options
        As `shard` was called: the first draft goes by them, and has no group stay.
    room : int
        Bytes that a plan may take more than that one.
    """
    budgets = options.prefetch_ahead, options.prefetch_bytes or 0, max(room, 0)
    return [
        Draft(found.prefetch_ahead, found.keep_bytes, found.peak_bytes, found.step_ns)
        for found in native.make_drafts(True, recording, budgets)
    ]


def choose_draft(
    drafts: Sequence[Draft], offers: Sequence[Offer], room: int
) -> tuple[Draft, list[int]]:
    """Choose a draft, and what else the room is for: what saves most together.

    Parameters
    ----------
    drafts : sequence of Draft
        The first one is there, and fits.
    offers : sequence of Offer
        As for `penstock._budget.choose`.
    room : int
        Bytes that all may take beside the first draft.

    Returns
    -------
    Draft
        Of those that save about as much the one that takes least.
    list of int
        Places of the offers that are taken beside it.
    """
    first = drafts[0]
    fitting = [draft for draft in drafts if draft is first or draft.cost(first) <= room]
    beside = {draft: choose(offers, room - draft.cost(first)) for draft in fitting}
    saved = {
        draft: draft.saved(first) + sum(offers[i].nanoseconds for i in beside[draft])
        for draft in fitting
    }
    limit = max(saved.values()) - _LEAST * first.nanoseconds
    good = (draft for draft in fitting if saved[draft] >= limit)
    best = min(good, key=lambda draft: (draft.peak, -saved[draft]))
    return best, beside[best]
