"""Explain, compare and predict by saved plans: ``python -m penstock.plan explain|diff|predict``.

Works on the JSON that `penstock.Plan.save` writes, with the standard library alone; neither torch
nor the package's compiled extension is needed, but for predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

PathLike = str | Path

_FORMAT = 2


class PlanError(ValueError):
    """A file that holds no plan; the text names it and says what to do."""


@dataclass(frozen=True)
class Operation:
    """One operation of a recorded pass.

    Times are seconds; they do not count where operations are compared, and are 0 where they are not
    known: a pass that follows a plan is not timed, nor is one on a device without timed events.

    Attributes
    ----------
    kind : str
        ``"gather"`` (a use of the group begins), ``"release"`` (it ends), ``"reduce"``.
    group : str
        Name of the group.
    backward : bool
        Whether it was in the backward.
    nbytes : int
        Bytes gathered or reduced.
    reached : float
        When compute got there, since its first operation.
    waited : float
        How long it stood still there for the group.
    took : float
        How long this rank's part of the collective lasted: of the gather that this use was the
        first of, or the group's share, by bytes, of reductions. Time in which several ran is
        charged to each in equal parts.
    """

    kind: str
    group: str
    backward: bool
    nbytes: int
    reached: float = field(default=0.0, compare=False)
    waited: float = field(default=0.0, compare=False)
    took: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Gather:
    """A gather as it is predicted: seconds since the forward began."""

    start: float
    lands: float
    used: float

    @property
    def slack(self) -> float:
        """How long it is there before its use; where that is negative compute waits."""
        return self.used - self.lands


@dataclass(frozen=True)
class GroupForecast:
    """What becomes of a group by a plan.

    Attributes
    ----------
    name : str
        Of the group.
    nbytes : int
        Bytes gathered.
    keep : str
        From forward to backward: ``"near"`` (it stays, as the backward begins with it), ``"paid"``
        (it stays, within ``keep_bytes``), ``"too dear"`` (it is gathered again), ``"no need"``,
        ``"all"`` (everything stays) or ``"unused"``.
    gather_seconds, reduce_seconds : float
        What its collectives cost, by the curves of what was measured; 0: not known.
    forward, backward : Gather or None
        Its first gather in either; None: it has none, or no times are known.
    """

    name: str
    nbytes: int
    keep: str
    gather_seconds: float
    reduce_seconds: float
    forward: Gather | None
    backward: Gather | None

    @property
    def is_kept(self) -> bool:
        """Whether it stays gathered from forward to backward."""
        return self.keep in ("near", "paid", "all")


_REASONS = {
    "unused": "not used in the forward",
    "all": "stays: everything does",
    "no need": "not gathered again: no backward needs its values",
    "near": "stays: the backward begins with it",
    "paid": "stays within keep_bytes",
    "too dear": "gathered again: not within keep_bytes",
}
KEEPS = tuple(_REASONS)  # as penstock/zero.h numbers them


@dataclass(frozen=True)
class Draft:
    """A plan of the same recording that was not made.

    Attributes
    ----------
    prefetch_ahead, keep_bytes : int
        What it would be compiled with.
    peak_bytes : int
        Bytes of gathered groups that it needs.
    predicted_step, predicted_exposed : float
        As in `penstock.Plan`.
    """

    prefetch_ahead: int
    keep_bytes: int
    peak_bytes: int
    predicted_step: float
    predicted_exposed: float


@dataclass(frozen=True)
class SavedPlan:
    """A plan with the recording that it was compiled from; see `penstock.Plan`.

    Attributes
    ----------
    model : str
        Name of the model.
    rank, ranks : int
        Who recorded it, of how many.
    communicator : str
        As in `penstock.Stats`.
    stage : int
        Of ZeRO.
    """

    model: str
    rank: int
    ranks: int
    communicator: str
    stage: int
    training: bool
    prefetch_ahead: int
    prefetch_bytes: int
    keep_bytes: int
    kept_bytes: int
    peak_bytes: int
    lower_bound_bytes: int
    predicted_step: float
    predicted_exposed: float
    hash: int
    drafts: tuple[Draft, ...]
    groups: tuple[GroupForecast, ...]
    operations: tuple[Operation, ...]


# ---- files --------------------------------------------------------------------------------------


def save(plan: SavedPlan, path: PathLike) -> None:
    """Write a plan as JSON."""
    text = json.dumps({"penstock_plan": _FORMAT, **asdict(plan)}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load(path: PathLike) -> SavedPlan:
    """Read a plan that `penstock.Plan.save` has written.

    Its operations are what `penstock.compile` takes.
    """
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{path} is no JSON: {error}") from error
    version = saved.get("penstock_plan") if isinstance(saved, dict) else None
    if version != _FORMAT:
        raise PlanError(
            f"{path} holds no plan that this version reads (its penstock_plan is {version!r}, not "
            f"{_FORMAT}): give a file that penstock.Plan.save has written"
        )
    try:
        return _read_plan(saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} is damaged: {error!r}; save the plan again") from error


def _read_plan(saved: dict[str, Any]) -> SavedPlan:
    plain = {one.name: saved[one.name] for one in fields(SavedPlan)}
    plain["groups"] = tuple(_read_group(group) for group in saved["groups"])
    plain["drafts"] = tuple(Draft(**draft) for draft in saved["drafts"])
    plain["operations"] = tuple(Operation(**operation) for operation in saved["operations"])
    return SavedPlan(**plain)


def _read_group(saved: dict[str, Any]) -> GroupForecast:
    gathers = {
        side: None if saved[side] is None else Gather(**saved[side])
        for side in ("forward", "backward")
    }
    return GroupForecast(**{**saved, **gathers})


# ---- explaining ---------------------------------------------------------------------------------


def explain(plan: SavedPlan) -> str:
    """Say in words and tables what a plan does."""
    tables = (*_table(plan, "forward"), *_table(plan, "backward"), *_drafts(plan))
    return "\n".join([*_head(plan), *tables])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3f} MiB"


def _head(plan: SavedPlan) -> Iterator[str]:
    kind = "training" if plan.training else "evaluation"
    limit = f", at most {_mib(plan.prefetch_bytes)}" if plan.prefetch_bytes else ""
    yield (
        f"{plan.model}: {kind}, stage {plan.stage}, {plan.ranks} ranks over {plan.communicator}, "
        f"{plan.prefetch_ahead} groups ahead{limit}"
    )
    if plan.predicted_step:
        share = plan.predicted_exposed / plan.predicted_step
        yield (
            f"predicted step {_ms(plan.predicted_step)}, exposed communication "
            f"{_ms(plan.predicted_exposed)} ({share:.1%})"
        )
    else:
        yield "no prediction: the operations have no times; penstock.record takes them"
    peak, least = _mib(plan.peak_bytes), _mib(plan.lower_bound_bytes)
    yield f"peak of gathered groups {peak}, of any plan at least {least}"
    kept = sum(group.keep == "paid" for group in plan.groups)
    yield f"keep_bytes {_mib(plan.keep_bytes)}: {kept} groups with {_mib(plan.kept_bytes)} stay"


_TITLES = ("MiB", "start ms", "lands ms", "used ms", "slack")


def _table(plan: SavedPlan, side: str) -> Iterator[str]:
    width = max([len(group.name) for group in plan.groups], default=0)
    titles = "".join(f"{title:>11}" for title in _TITLES)
    yield f"\n{side:<{width}}{titles}"
    for group in plan.groups:
        gather = group.forward if side == "forward" else group.backward
        why = f"  {_REASONS[group.keep]}" if side == "backward" else ""
        yield f"{group.name:<{width}}{group.nbytes / 2**20:>11.3f}{_times(gather)}{why}".rstrip()


def _times(gather: Gather | None) -> str:
    if gather is None:
        return f"{'-':>11}" * 4
    times = (gather.start, gather.lands, gather.used)
    return "".join(f"{time * 1e3:>11.3f}" for time in times) + f"{gather.slack * 1e3:>+11.3f}"


def _drafts(plan: SavedPlan) -> Iterator[str]:
    """Say what other memory would cost and buy: those drafts that none of less memory beats."""
    fastest = float("inf")
    titles = f"{'step ms':>11}{'exposed ms':>11}{'ahead':>7}{'kept MiB':>11}"
    for draft in sorted(
        set(plan.drafts), key=lambda draft: (draft.peak_bytes, draft.predicted_step)
    ):
        is_plan = (draft.prefetch_ahead, draft.keep_bytes) == (plan.prefetch_ahead, plan.kept_bytes)
        if not draft.predicted_step or (draft.predicted_step >= fastest and not is_plan):
            continue
        if titles:
            yield f"\n{'memory MiB':>10}{titles}"
            titles = ""
        fastest = min(fastest, draft.predicted_step)
        yield (
            f"{draft.peak_bytes / 2**20:>10.3f}{draft.predicted_step * 1e3:>11.3f}"
            f"{draft.predicted_exposed * 1e3:>11.3f}{draft.prefetch_ahead:>7}"
            f"{draft.keep_bytes / 2**20:>11.3f}{'  this plan' if is_plan else ''}"
        )


# ---- comparing ----------------------------------------------------------------------------------


def diff(first: SavedPlan, second: SavedPlan) -> str:
    """Say in lines what the second plan does otherwise; nothing: they are the same."""
    return "\n".join([*_changed_fields(first, second), *_changed_groups(first, second)])


_SECONDS = ("predicted_step", "predicted_exposed")
_COMPARED = (
    *("model", "ranks", "communicator", "stage", "training", "prefetch_ahead", "prefetch_bytes"),
    *("keep_bytes", "kept_bytes", "peak_bytes", "lower_bound_bytes"),
)


def _changed_fields(first: SavedPlan, second: SavedPlan) -> Iterator[str]:
    for name in (*_COMPARED, *_SECONDS):
        before, after = getattr(first, name), getattr(second, name)
        if before == after:
            continue
        if name in _SECONDS:
            before, after = _ms(before), _ms(after)
        yield f"{name}: {before} -> {after}"


def _changed_groups(first: SavedPlan, second: SavedPlan) -> Iterator[str]:
    before = {group.name: group for group in first.groups}
    after = {group.name: group for group in second.groups}
    for name in [*before, *(name for name in after if name not in before)]:
        changes = list(_changes(before.get(name), after.get(name)))
        if changes:
            yield f"{name}: {', '.join(changes)}"


def _changes(before: GroupForecast | None, after: GroupForecast | None) -> Iterator[str]:
    if before is None or after is None:
        yield "only in the first" if after is None else "only in the second"
        return
    if before.nbytes != after.nbytes:
        yield f"{_mib(before.nbytes)} -> {_mib(after.nbytes)}"
    if before.keep != after.keep:
        yield f"{_REASONS[before.keep]} -> {_REASONS[after.keep]}"
    for side in ("forward", "backward"):
        yield from _moved(side, getattr(before, side), getattr(after, side))


def _moved(side: str, before: Gather | None, after: Gather | None) -> Iterator[str]:
    if before is not None and after is not None and before != after:
        yield f"{side} slack {_ms(before.slack)} -> {_ms(after.slack)}"


# ---- the command line ---------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock.plan", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("explain", help="what is gathered when, what stays, and why")
    one.add_argument("plan")
    one = commands.add_parser("diff", help="what the second plan does otherwise")
    one.add_argument("first")
    one.add_argument("second")
    one = commands.add_parser("predict", help="what a pass would take on other ranks and links")
    one.add_argument("plan")
    one.add_argument("--ranks", type=int, nargs="+", required=True)
    one.add_argument("--nodes", type=int, default=1, help="that the ranks lie on, evenly")
    one.add_argument(
        "--link", type=float, help="GB/s that a rank receives within its node; else as measured"
    )
    one.add_argument("--node-link", type=float, help="GB/s that a node receives from others")
    return parser


def _predict(options: argparse.Namespace) -> str:
    from penstock import _predict as tool  # wants the extension, and with it torch

    link, node_link = (
        None if value is None else value * 1e9 for value in (options.link, options.node_link)
    )
    clusters = [tool.Cluster(ranks, options.nodes, link, node_link) for ranks in options.ranks]
    return "\n".join(tool.table(load(options.plan), clusters))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "explain":
            print(explain(load(options.plan)))
        elif options.command == "predict":
            print(_predict(options))
        else:
            print(diff(load(options.first), load(options.second)) or "the same")
    except (PlanError, OSError) as error:
        print(f"penstock.plan: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from penstock.plan import main as run  # whose classes other modules know

    sys.exit(run())
