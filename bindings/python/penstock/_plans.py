"""Plans as files: operations, forecasts, drafts. Needs neither torch nor the extension."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    known: a pass that follows a plan is not timed, but for the one that ``memory=`` of
    `penstock.shard` measures, nor is one on a device without timed events.

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
        How long it stood still there: for the group, or before a reduction until gradients of
        other groups had been read.
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


_KINDS = ("gather", "release", "reduce")  # as penstock/zero.h numbers them
Numbers = tuple[int, int, bool, int, int, int, int]  # an operation, as the extension has it


def to_numbers(op: Operation, groups: Mapping[str, int]) -> Numbers:
    """Return an operation as the extension takes it; it counts from 1 where compute got to."""
    reached, waited, took = (round(seconds * 1e9) for seconds in (op.reached, op.waited, op.took))
    kind, group = _KINDS.index(op.kind), groups[op.group]
    return kind, group, op.backward, op.nbytes, reached + 1, waited, took


def from_numbers(numbers: Numbers, names: Mapping[int, str]) -> Operation:
    """Return what the extension has recorded."""
    kind, group, backward, nbytes, reached, waited, took = numbers
    seconds = (max(reached - 1, 0) / 1e9, waited / 1e9, took / 1e9)
    return Operation(_KINDS[kind], names[group], backward, nbytes, *seconds)


@dataclass(frozen=True)
class Gather:
    """A gather as it is predicted.

    Attributes
    ----------
    start, lands, used : float
        When it begins, when its data is there, and when compute asks for it: seconds since the
        forward began.
    """

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
        ``"all"`` (everything stays), ``"rows"`` (each use gathers the rows that it reads) or
        ``"unused"``.
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


REASONS = {
    "unused": "not used in the forward",
    "all": "stays: everything does",
    "no need": "not gathered again: no backward needs its values",
    "near": "stays: the backward begins with it",
    "paid": "stays within keep_bytes",
    "too dear": "gathered again: not within keep_bytes",
    "rows": "by rows: each use gathers those that it reads",
}
KEEPS = tuple(REASONS)  # as penstock/zero.h numbers them


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
    """A plan with the recording that it was compiled from.

    What is not said here is as in `penstock.Plan`; ``groups`` are its ``forecasts``.

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
