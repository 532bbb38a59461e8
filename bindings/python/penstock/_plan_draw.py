"""A picture of the pass that a saved plan predicts."""

from __future__ import annotations

from collections.abc import Iterator

from penstock._picture_files import write_picture
from penstock._pictures import Group, Row, picture, time_text
from penstock._plans import Gather, PathLike, PlanError, SavedPlan
from penstock._trace_files import Slice

_Used = tuple[float, str, Gather]  # when compute asks for a group, in seconds


def draw(plan: SavedPlan, out: PathLike) -> None:
    """Draw a plan's gathers on the link, and compute, as it waits for them.

    A group that stays gathered has no gather, and its compute is that of the group before it.
    Reductions are not drawn. The picture is SVG, or PNG where the file's name ends in ``.png``, for
    which resvg-py has to be installed.

    Raises
    ------
    PlanError
        The plan was made without times.
    PictureError
        There is nothing that makes a PNG.
    OSError
        The file cannot be written.
    """
    if not plan.predicted_step:
        raise PlanError(
            "the plan was made without times, which penstock.record takes: draw another"
        )
    used = sorted(_uses(plan))
    step, exposed = plan.predicted_step * 1e6, plan.predicted_exposed * 1e6
    rows = [
        Row("compute", list(_compute(used, plan.predicted_step))),
        Row("link", [(_slice(name, g.start, g.lands), "gather") for _, name, g in _by_start(used)]),
    ]
    title = (
        f"{plan.prefetch_ahead} groups ahead, {plan.kept_bytes / 2**20:.1f} MiB stay gathered: "
        f"{time_text(exposed, step)} exposed communication"
    )
    head = f"{plan.model}, as its plan predicts: {time_text(step, step)}"
    write_picture(picture(head, [Group(title, rows)], 0.0, step), out)


def _uses(plan: SavedPlan) -> Iterator[_Used]:
    for group in plan.groups:
        for gather in (group.forward, group.backward):
            if gather is not None:
                yield gather.used, group.name, gather


def _by_start(used: list[_Used]) -> list[_Used]:
    return sorted(used, key=lambda use: use[2].start)


def _slice(name: str, begin: float, end: float) -> Slice:
    return Slice(name, begin * 1e6, end * 1e6, {})


def _compute(used: list[_Used], end: float) -> Iterator[tuple[Slice, str]]:
    """Yield compute from each use to the next one, and before it what it waits."""
    if not used:
        yield _slice("compute", 0.0, end), "compute"
        return
    until = [begin for begin, _, _ in used[1:]] + [end]
    for (begin, name, gather), next_begin in zip(used, until, strict=True):
        ready = min(max(begin, gather.lands), next_begin)
        if ready > begin:
            yield _slice(name, begin, ready), "exposed"
        yield _slice(name, ready, next_begin), "compute"
