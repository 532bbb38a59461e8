"""Look at saved plans: ``python -m penstock.plan explain|diff|draw|predict``.

Works on the JSON that `penstock.Plan.save` writes, with the standard library alone; neither torch
nor the package's compiled extension is needed, but for predictions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from penstock._picture_files import PictureError
from penstock._plan_draw import draw
from penstock._plans import (
    REASONS,
    Draft,
    Gather,
    GroupForecast,
    Operation,
    PlanError,
    SavedPlan,
    load,
    save,
)

__all__ = [
    "Draft",
    "Gather",
    "GroupForecast",
    "Operation",
    "PlanError",
    "SavedPlan",
    "diff",
    "draw",
    "explain",
    "load",
    "main",
    "save",
]

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
        why = f"  {REASONS[group.keep]}" if side == "backward" else ""
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
        yield f"{REASONS[before.keep]} -> {REASONS[after.keep]}"
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
    one = commands.add_parser("draw", help="a picture of the pass that it predicts, SVG or PNG")
    one.add_argument("plan")
    one.add_argument(
        "out", help="the file: PNG if its name ends in .png (wants resvg-py), else SVG"
    )
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
        elif options.command == "draw":
            draw(load(options.plan), options.out)
        elif options.command == "predict":
            print(_predict(options))
        else:
            print(diff(load(options.first), load(options.second)) or "the same")
    except (PlanError, PictureError, OSError) as error:
        print(f"penstock.plan: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
