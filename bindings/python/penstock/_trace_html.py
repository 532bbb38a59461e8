"""A report as a page that a browser opens from disk, without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from penstock._pictures import Group, Row
from penstock._trace_critical import KINDS, Part, critical_path
from penstock._trace_draw import drawn
from penstock._trace_exposed import CAUSES
from penstock._trace_files import PathLike, Slice, Trace, load_own, printable
from penstock._trace_kinds import COLORS, kind_of
from penstock._trace_links import linked
from penstock._trace_report import report_of
from penstock._trace_steps import find_step
from penstock._trace_text import cause_name, part_name

_MOST = 16  # rows of a table
_CAUSE_COLORS = {
    "memory_full": "#332288",  # darker than all others
    "late_rank": COLORS["exposed"],
    "moving": COLORS["gather"],
    "reduction_tail": COLORS["reduce"],
    "lane_busy": COLORS["copy"],
    "late_launch": COLORS["offload"],
    "waking": COLORS["update"],
    "optimizer": COLORS["compute"],
    "unknown": COLORS["other"],
}
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1b1b; --faint: #666666;
  --line: #dddddd; --back: #f6f6f4; }
@media (prefers-color-scheme: dark) { :root { --paper: #1d1f21; --ink: #e6e6e6; --faint: #a3a3a3;
  --line: #3a3d40; --back: #131415; } }
body { margin: 0 auto; padding: 1rem; max-width: 90rem; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; }
h1 { font-size: 1.4rem; margin: 0.5rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem;
  margin: 0 0 0.5rem; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 6px;
  padding: 1rem; margin: 1rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { color: var(--faint); font-weight: normal; text-align: left; vertical-align: bottom; }
th, td { padding: 0.15rem 1rem 0.15rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th.number, td.number { text-align: right; }
p, li { max-width: 60rem; } p { margin: 0.5rem 0; }
.note { color: var(--faint); font-size: 0.85rem; }
.bar { display: flex; height: 0.9rem; min-width: 12rem; } .bar i { display: block; }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.3rem; }
svg { display: block; }
svg > text { fill: var(--ink); } svg > path { stroke: var(--line); }
svg > rect:first-of-type { fill: var(--paper); }
"""

_Row = Sequence[str | float | int]


def write_html(path: PathLike, out: PathLike, step: int | None = None) -> None:
    """Write a report as one HTML file.

    Parameters
    ----------
    path
        A trace of one rank or a merged one.
    out
        The file to write.
    step
        The only step to sum up, as of :func:`report`; it is also the one that is drawn. None: the
        whole trace, and a picture of the step in the middle.

    Raises
    ------
    TraceError
        The file is no trace, or has no such step.
    OSError
        A file cannot be read or written.
    """
    trace = load_own(path)
    Path(out).write_text("\n".join(_page(trace, step)), encoding="utf-8")


def _page(trace: Trace, step: int | None) -> Iterator[str]:
    result = report_of(trace, step)
    name = _text(Path(trace.path).name)
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{name}</title><style>{_STYLE}</style></head><body><h1>{name}</h1>"
    for title, content in (
        ("What to do", _hints(result)),
        ("Critical path", _critical(result["critical_path"], len(result["steps"]))),
        ("Picture of a step", [_picture(trace, step)]),
        ("Exposed communication", _exposed(result)),
        ("Who comes last", _stragglers(result)),
        ("Steps", _steps(result)),
        ("Lanes", _lanes(result)),
        ("Longest tasks", _longest(result)),
    ):
        lines = list(content)
        if lines:
            yield f"<section><h2>{title}</h2>"
            yield from lines
            yield "</section>"
    yield "</body></html>\n"


# ---- its parts ----------------------------------------------------------------------------------


def _hints(result: dict[str, Any]) -> Iterator[str]:
    if result["hints"]:
        yield f"<ul>{''.join(f'<li>{_text(hint)}</li>' for hint in result['hints'])}</ul>"
    if result["overwritten"]:
        yield f"<p>The oldest {result['overwritten']:,} records were dropped.</p>"


def _steps(result: dict[str, Any]) -> Iterator[str]:
    rows = []
    for step in result["steps"]:
        ranks, path = step["ranks"], step["critical_path"]
        slowest = max(ranks, key=lambda rank: ranks[rank]["us"])
        exposed = [row["exposed_us"] for row in ranks.values()]
        longest = path["parts"][0] if path["parts"] else None
        rows.append(
            (
                step["step"],
                path["length_us"] / 1000,
                ranks[slowest]["us"] / 1000,
                f"rank {slowest}",
                min(exposed) / 1000,
                max(exposed) / 1000,
                part_name(longest) if longest else "",
                longest["us"] / 1000 if longest else "",
            )
        )
    titles = (
        "step",
        "on all ranks, ms",
        "slowest rank, ms",
        "",
        "least exposed, ms",
    )
    yield from _table((*titles, "most exposed, ms", "longest part of its path", "ms"), rows)


def _critical(path: dict[str, Any], steps: int) -> Iterator[str]:
    if not path["parts"]:
        return
    spent = ", ".join(f"rank {rank} {us / 1000:.1f} ms" for rank, us in path["ranks"].items())
    kinds = {
        kind: sum(part["us"] for part in path["parts"] if part["kind"] == kind) for kind in KINDS
    }
    sums = ", ".join(f"{kind} {us / 1000:.1f} ms" for kind, us in kinds.items() if us)
    of = "the step" if steps == 1 else f"a step, on average of {steps}"
    yield f"<p>{path['length_us'] / 1000:.1f} ms of {of}: {sums}. Spent on {spent}.</p>"
    rows = [
        (part["us"] / 1000, f"{part['us'] / path['length_us']:.1%}", part_name(part), part["kind"])
        for part in path["parts"]
    ]
    yield from _table(("ms", "share", "part", "kind"), rows)
    yield (
        '<p class="note">What the end of a step had to wait for: where compute waits, the path '
        "goes on with the collective, from there with the rank that came last to it, and with what "
        "that rank did before. Shorten what is on it; all else has time to spare.</p>"
    )


def _exposed(result: dict[str, Any]) -> Iterator[str]:
    groups = result["exposed"]["groups"]
    if not groups:
        return
    present = [cause for cause in CAUSES if any(cause in row["causes"] for row in groups)]
    longest = max(row["us"] for row in groups) or 1.0
    rows = [
        (
            row["group"],
            row["us"] / 1000,
            _Markup(_bar(row["causes"], longest)),
            *(row["causes"][cause] / 1000 if cause in row["causes"] else "" for cause in present),
        )
        for row in groups
    ]
    total = sum(row["us"] for row in groups) / 1000
    yield (
        f"<p>{total:.1f} ms of a rank on average, in all that is summed up, by what compute waited "
        "for and why.</p>"
    )
    names = [_Markup(f"{_key(_CAUSE_COLORS[cause])}{cause_name(cause)}") for cause in present]
    yield from _table(("waited for", "ms", "", *names), rows)
    told = "; ".join(f"{cause_name(cause)}: {CAUSES[cause]}" for cause in present)
    yield f'<p class="note">{told}.</p>'


def _bar(causes: dict[str, float], longest: float) -> str:
    pieces = "".join(
        f'<i style="width:{us / longest:.2%};background:{_CAUSE_COLORS[cause]}" '
        f'title="{cause_name(cause)}: {us / 1000:.3f} ms"></i>'
        for cause, us in causes.items()
    )
    return f'<div class="bar">{pieces}</div>'


def _stragglers(result: dict[str, Any]) -> Iterator[str]:
    late = result["exposed"]["late"]
    rows = [
        (f"rank {rank}", late[rank] / 1000, last["count"], last["behind_us"] / 1000)
        for rank, last in result["arrivals"]["last"].items()
        if last["count"]
    ]
    rows.sort(key=lambda row: -row[1])
    titles = ("", "compute waited for it, ms", "came last", "behind the one before (median), ms")
    yield from _table(titles, rows)


def _lanes(result: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            f"rank {rank}",
            name,
            f"{lane['busy_share']:.1%}",
            lane["busy_us"] / 1000,
            lane["count"],
            lane["bytes"] / 2**20,
        )
        for rank, row in result["ranks"].items()
        for name, lane in row["lanes"].items()
    ]
    yield from _table(("", "lane", "busy", "ms", "tasks", "MiB"), rows)


def _longest(result: dict[str, Any]) -> Iterator[str]:
    rows = [
        (row["name"], f"rank {row['rank']}", row["lane"], row["duration_us"] / 1000)
        for row in result["longest"]
    ]
    yield from _table(("task", "", "lane", "ms"), rows)


def _picture(trace: Trace, step: int | None) -> str:
    _, steps = find_step(trace, step)
    ranks = linked({rank: trace.of_rank(rank) for rank in trace.ranks})
    path = _path_group(critical_path(ranks, steps))
    return f'<div class="wide">{drawn(trace, step, path)}</div>'


def _path_group(parts: list[Part]) -> list[Group]:
    rows: dict[str, Row] = {}
    for part in parts:
        label = "moving" if part.rank is None else f"rank {part.rank}"
        name = part.name or part.kind
        kind = part.kind if part.rank is not None else kind_of(part.name, part.lane)
        bar = Slice(name, part.begin, part.end, {"kind": part.kind})
        rows.setdefault(label, Row(label, [])).bars.append(
            (bar, kind if kind in COLORS else "other")
        )
    ordered = sorted(rows.values(), key=lambda row: (row.label == "moving", row.label))
    return [Group("critical path over the ranks", ordered[:_MOST])] if rows else []


# ---- HTML ---------------------------------------------------------------------------------------


class _Markup(str):
    """Text that is HTML already."""


def _text(text: str) -> str:
    return text if isinstance(text, _Markup) else escape(printable(text))


def _key(color: str) -> str:
    return f'<span class="key" style="background:{color}"></span>'


def _table(titles: Sequence[str], rows: Sequence[_Row]) -> Iterator[str]:
    """Yield a table; columns of numbers are set to the right."""
    if not rows:
        return
    are_numbers = [any(_is_number(row[i]) for row in rows) for i in range(len(titles))]
    yield f'<div class="wide"><table><tr>{_cells("th", titles, are_numbers)}</tr>'
    for row in rows[:_MOST]:
        yield f"<tr>{_cells('td', row, are_numbers)}</tr>"
    yield "</table></div>"
    if len(rows) > _MOST:
        yield f'<p class="note">and {len(rows) - _MOST} more</p>'


def _is_number(cell: str | float | int) -> bool:
    return not isinstance(cell, str) or cell.endswith("%")


def _cells(tag: str, cells: Iterable[str | float | int], are_numbers: list[bool]) -> str:
    result = ""
    for cell, is_number in zip(cells, are_numbers, strict=True):
        text = f"{cell:,.2f}" if isinstance(cell, float) else cell
        text = f"{text:,}" if isinstance(text, int) else _text(text)
        result += f"<{tag}{' class=number' if is_number else ''}>{text}</{tag}>"
    return result
