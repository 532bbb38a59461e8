"""What a report says to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock._trace_critical import KINDS
from penstock._trace_files import printable

_MOST = 3  # of what a line names
_MOST_GROUPS = 8


def format_report(result: dict[str, Any]) -> str:
    """Lay out what :func:`report` returned as a table for people."""
    lines: list[str] = []
    for rank, row in result["ranks"].items():
        lines += _rank_lines(rank, row)
    lines += _critical_lines(result["critical_path"], result["steps"])
    lines += _exposed_lines(result["exposed"])
    lines += _arrival_lines(result["arrivals"], result["exposed"]["late"])
    if result["longest"]:
        lines.append("longest tasks:")
    for row in result["longest"]:
        where = printable(f"rank {row['rank']} {row['lane']}")
        name = printable(row["name"])
        lines.append(f"  {_ms(row['duration_us']):>13}  {where:<24} {name}")
    if result["overwritten"]:
        lines.append(f"oldest dropped, {result['overwritten']} records: record for a shorter time")
    lines += [f"hint: {hint}" for hint in result["hints"]]
    return "\n".join(lines)


def _rank_lines(rank: int, row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"rank {rank}: {_ms(row['span_us'])}, exposed communication "
        f"{_ms(row['exposed_us'])} ({row['exposed_share']:.1%})"
    )
    if row["steps"]:
        yield (
            f"  {row['steps']} steps, each {_ms(row['step_us'])} (median), exposed "
            f"{_ms(row['exposed_step_us'])}"
        )
    if row["graphs"]:
        yield f"  {row['graphs']} of them CUDA graphs: what is in them a trace does not show"
    for name, lane in row["lanes"].items():
        yield (
            f"  {printable(name):<24} busy {lane['busy_share']:>6.1%} {_ms(lane['busy_us']):>15}"
            f" {lane['count']:>8} tasks {lane['bytes']:>16,} bytes"
        )


def _critical_lines(path: dict[str, Any], steps: list[dict[str, Any]]) -> Iterator[str]:
    if not path["parts"]:
        return
    of = f"step {steps[0]['step']}" if len(steps) == 1 else f"a step, on average of {len(steps)}"
    yield f"critical path of {of}: {_ms(path['length_us'])}"
    spent = sorted(path["ranks"].items(), key=lambda item: -item[1])
    on = ", ".join(f"rank {rank} {_ms(us)}" for rank, us in spent[:_MOST])
    yield f"  spent on {on}{_others(spent[_MOST:])}"
    for kind in KINDS:
        parts = [part for part in path["parts"] if part["kind"] == kind]
        if parts:
            longest = ", ".join(f"{part_name(part)} {_ms(part['us'])}" for part in parts[:_MOST])
            total = _ms(sum(part["us"] for part in parts))
            yield f"  {kind:<12} {total:>13}: {longest}{_others(parts[_MOST:])}"


def _others(rest: Sequence[Any]) -> str:
    return f" and {len(rest)} more" if rest else ""


def part_name(part: dict[str, Any]) -> str:
    """Name a part of a critical path."""
    rank = "" if part["rank"] is None else f"rank {part['rank']} "
    lane = f"{part['lane']} of " if part["lane"] else ""
    return printable(f"{rank}{lane}{part['name']}")


def _exposed_lines(exposed: dict[str, Any]) -> Iterator[str]:
    if exposed["groups"]:
        yield "exposed communication by what was waited for, of a rank on average:"
    for row in exposed["groups"][:_MOST_GROUPS]:
        causes = sorted(row["causes"].items(), key=lambda cause: -cause[1])
        told = ", ".join(f"{cause_name(cause)} {_ms(us)}" for cause, us in causes)
        yield f"  {printable(row['group']):<24} {_ms(row['us']):>13}: {told}"
    if rest := exposed["groups"][_MOST_GROUPS:]:
        yield f"  {len(rest)} more {_ms(sum(row['us'] for row in rest)):>31}"


def cause_name(cause: str) -> str:
    """Name a cause of exposed communication as people do."""
    return cause.replace("_", " ")


def _arrival_lines(arrivals: dict[str, Any], late: dict[int, float]) -> Iterator[str]:
    if arrivals["lanes"]:
        yield "collectives, of a rank on average:"
    for name, lane in arrivals["lanes"].items():
        yield (
            f"  {printable(name):<24} {lane['count']:>8}: waiting for the last rank "
            f"{_ms(lane['waiting_us'])}, moving {_ms(lane['moving_us'])}"
        )
    total = sum(lane["count"] for lane in arrivals["lanes"].values())
    for rank, last in arrivals["last"].items():
        if last["count"]:
            yield (
                f"  rank {rank} came last to {last['count']} of {total}, "
                f"{_ms(last['behind_us'])} (median) behind the one before it; compute "
                f"waited {_ms(late[rank])} for it"
            )


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f} ms"
