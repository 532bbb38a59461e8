"""What a saved plan's pass would take on other ranks, nodes and links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch  # noqa: F401 - whose libraries the extension wants

from penstock import _C
from penstock._plans import Operation, PlanError, SavedPlan, to_numbers


@dataclass(frozen=True)
class Cluster:
    """Ranks that a pass is predicted for.

    Attributes
    ----------
    ranks, nodes : int
        How many; the ranks lie evenly on the nodes.
    link : float, optional
        Bytes a second that a rank receives from the others of its node; None: as measured.
    node_link : float, optional
        Bytes a second that a node receives from the others; only of use where there are several.
    """

    ranks: int
    nodes: int = 1
    link: float | None = None
    node_link: float | None = None

    def seconds(self, nbytes: int, link: float) -> float:
        """Return what a gather takes: between the nodes first, then within them; or a reduction."""
        local = self.ranks // self.nodes
        between = nbytes * (self.nodes - 1) / self.nodes
        within = nbytes * (local - 1) / local / (self.link or link)
        return within + (between / self.node_link if self.node_link else 0.0)


def check(plan: SavedPlan, cluster: Cluster) -> None:
    """Raise PlanError for what nothing can be predicted for."""
    if cluster.ranks < 1 or cluster.nodes < 1 or cluster.ranks % cluster.nodes:
        raise PlanError(
            f"{cluster.ranks} ranks do not lie evenly on {cluster.nodes} nodes: give --ranks and "
            "--nodes that do"
        )
    if cluster.nodes > 1 and not cluster.node_link:
        raise PlanError("several nodes want --node-link, in GB/s that a node receives")
    if cluster.link is None and not any(op.took for op in plan.operations):
        raise PlanError(
            "the plan's recording has no times of collectives (of one rank alone nothing moves): "
            "give --link, in GB/s that a rank receives"
        )


def predict(plan: SavedPlan, cluster: Cluster) -> _C.Forecast:
    """Simulate the plan's pass on other ranks: compute as it was measured, collectives scaled.

    A collective's time is in proportion to the bytes that a rank receives from others over the link
    within a node, and behind them those that a node receives from other nodes.
    """
    check(plan, cluster)
    names = {group.name: index for index, group in enumerate(plan.groups)}
    by_rows = {group.name for group in plan.groups if group.keep == "rows"}
    scaled = [
        replace(op, took=_scaled(op, plan, cluster, op.group in by_rows)) for op in plan.operations
    ]
    recording = _C.Recording([to_numbers(op, names) for op in scaled])
    groups = [
        (*_bytes_of(plan, group.name), group.keep not in ("no need", "rows"), group.keep == "rows")
        for group in plan.groups
    ]
    budgets = plan.prefetch_ahead, plan.prefetch_bytes, plan.keep_bytes
    return _C.predict(plan.training, plan.stage, recording, groups, budgets)


def _bytes_of(plan: SavedPlan, group: str) -> tuple[int, int]:
    """Return the bytes of a group that are gathered, and those that are reduced."""
    gathered, reduced = (
        max(
            (op.nbytes for op in plan.operations if op.group == group and op.kind == kind),
            default=0,
        )
        for kind in ("gather", "reduce")
    )
    return gathered, reduced


def _scaled(op: Operation, plan: SavedPlan, cluster: Cluster, by_rows: bool) -> float:
    """Return what a collective takes there; a gather that was none is none.

    How much of a table `by_rows` travelled is not known, but that others have a part of it.
    """
    if op.kind == "release" or (not op.took and plan.ranks > 1):
        return 0.0
    others = (plan.ranks - 1) / plan.ranks
    if by_rows and op.kind == "gather":
        return op.took * (cluster.ranks - 1) / cluster.ranks / others if others else 0.0
    received = op.nbytes * others
    return cluster.seconds(op.nbytes, received / op.took if op.took else 1.0)


def table(plan: SavedPlan, clusters: Iterable[Cluster]) -> Iterator[str]:
    """Say in lines what a pass takes on each of them."""
    yield f"{'ranks':>6}{'nodes':>6}{'step ms':>11}{'exposed ms':>11}{'':>8}"
    for cluster in clusters:
        found = predict(plan, cluster)
        share = found.exposed_ns / found.step_ns if found.step_ns else 0.0
        yield (
            f"{cluster.ranks:>6}{cluster.nodes:>6}{found.step_ns / 1e6:>11.3f}"
            f"{found.exposed_ns / 1e6:>11.3f}{share:>8.1%}"
        )
