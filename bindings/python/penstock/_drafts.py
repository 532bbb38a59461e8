"""Plans that might be made of a recorded pass: what each takes, and which one is worth it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock import _C
from penstock._budget import readable
from penstock._plans import Draft
from penstock._units import Group
from penstock._ways import Choice, Ways

_LEAST = 1e-3  # of a pass: what memory has to save


def make_drafts(
    native: _C.Engine,
    recording: _C.Recording,
    prefetch_ahead: int,
    prefetch_bytes: int | None,
    room: int,
) -> list[Draft]:
    """Draft plans of a recording that take different memory; all ranks call this alike.

    Parameters
    ----------
    native, recording
        The C engine, and a pass of its own with times.
    prefetch_ahead : int
        Of the first draft, which has no group stay.
    prefetch_bytes : int, optional
        At most so many bytes gathered or in flight, of all drafts.
    room : int
        Bytes that groups which stay may take.
    """
    budgets = prefetch_ahead, prefetch_bytes or 0, max(room, 0)
    return [
        Draft(
            found.prefetch_ahead,
            found.keep_bytes,
            found.peak_bytes,
            found.step_ns / 1e9,
            found.exposed_ns / 1e9,
        )
        for found in native.make_drafts(True, recording, budgets)
    ]


def cost(draft: Draft, first: Draft) -> int:
    """Return the bytes that a draft takes more than another one; negative: less."""
    return draft.peak_bytes - first.peak_bytes


def choose_draft(drafts: Sequence[Draft], ways: Ways, room: int) -> tuple[Draft, Choice]:
    """Choose a draft, and what else the room is for: what saves most together.

    Parameters
    ----------
    drafts : sequence of Draft
        The first one is there, and fits.
    ways : Ways
        What the rest of the room is best used for.
    room : int
        Bytes that all may take beside the first draft.

    Returns
    -------
    Draft
        Of those that save about as much the one with most groups that stay, and of these the one
        that takes least: what need not travel leaves the link, and the memory's bandwidth, to
        others.
    Choice
        What blocks do beside it.
    """
    first = drafts[0]
    fitting = [draft for draft in drafts if draft is first or cost(draft, first) <= room]
    beside = {draft: ways.choose(room - cost(draft, first)) for draft in fitting}
    saved = {
        draft: first.predicted_step - draft.predicted_step + beside[draft].nanoseconds / 1e9
        for draft in fitting
    }
    limit = max(saved.values()) - _LEAST * first.predicted_step
    good = (draft for draft in fitting if saved[draft] >= limit)
    best = min(good, key=lambda draft: (-draft.keep_bytes, draft.peak_bytes, -saved[draft]))
    return best, beside[best]


def hold_whole(draft: Draft, native: _C.Engine, groups: Iterable[Group]) -> Draft:
    """Return what stage 2 does in place of a draft of stage 3, whose engine it is.

    It holds all parameters beside their shards; over "ce" those of the gathered dtype lie within.
    """
    holds_places = native.communicator() == "ce"
    total = 0
    for group in groups:
        layout = native.group_layout(group.index)
        lies_within = holds_places and group.gather_dtype == group.dtype
        total += layout.gathered_bytes - (layout.shard_bytes if lies_within else 0)
    return replace(draft, peak_bytes=total)


def describe(draft: Draft, first: Draft, saved: float, *, is_whole: bool) -> str:
    """Say in a line what a draft does, and what that takes and saves beside another one.

    `saved` are the seconds that what blocks do saves beside the draft; `is_whole` says that it is
    what `hold_whole` returns.
    """
    more, stays = cost(draft, first), f"of others {readable(draft.keep_bytes)} stay gathered"
    if is_whole:
        stays = "all stay, as in stage 2, which takes no more and gathers nothing twice"
    before, after = first.predicted_step * 1e3, (draft.predicted_step - saved) * 1e3
    return (
        f"{draft.prefetch_ahead} groups are gathered ahead, and {stays}: {readable(abs(more))} "
        f"{'less' if more < 0 else 'more'} than without, for a pass of {after:.2f} instead of "
        f"{before:.2f} ms"
    )
