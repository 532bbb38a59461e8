"""Record a training step, look at it, compile it to a plan, and run steps by that plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from penstock import _C
from penstock._arguments import check_bytes, check_count, check_flag, check_stage, refuse
from penstock._drafts import make_drafts
from penstock._engine import Engine, engine_of
from penstock._errors import PenstockError
from penstock._plans import (
    KEEPS,
    Draft,
    Gather,
    GroupForecast,
    Operation,
    PathLike,
    SavedPlan,
    from_numbers,
    save,
    to_numbers,
)


@dataclass(frozen=True)
class Plan:
    """What compiling a recording yields; the same on all ranks.

    Attributes
    ----------
    operations : tuple of Operation
        What it was compiled from.
    prefetch_ahead, prefetch_bytes : int
        As given to `penstock.compile`; 0 bytes: no limit.
    groups, uses : int
        Groups, and uses of them, in a pass.
    peak_bytes, lower_bound_bytes : int
        Bytes of gathered groups that the plan needs, and the least that any plan could need.
    hash : int
        Of order, sizes and offsets.
    keep_bytes, kept_bytes : int
        Bytes of groups that may stay gathered from forward to backward, as the ranks agreed, and
        those that do beside the ones that are near.
    predicted_step, predicted_exposed : float
        Seconds of such a pass, forward and backward, and in which compute waits for communication,
        simulated by the times of the operations; 0 where these have none.
    forecasts : tuple of GroupForecast
        Of each group; see `penstock.plan.GroupForecast`.
    drafts : tuple of Draft
        What plans for training would take and save with other memory; see `penstock.plan.Draft`.
    """

    operations: tuple[Operation, ...]
    prefetch_ahead: int
    prefetch_bytes: int
    training: bool
    groups: int
    uses: int
    peak_bytes: int
    lower_bound_bytes: int
    hash: int
    keep_bytes: int
    kept_bytes: int
    predicted_step: float
    predicted_exposed: float
    forecasts: tuple[GroupForecast, ...] = field(repr=False)
    drafts: tuple[Draft, ...] = field(repr=False)
    _engine: Engine = field(repr=False, compare=False)

    @contextmanager
    def execute(self) -> Iterator[Plan]:
        """Run the passes that begin in this context by this plan.

        One that differs from it is noticed, counted (``stats().deviations``) and runs on by the
        plan of an earlier path that it fits, or without.
        """
        engine = self._engine
        if engine.plans.get(self.training) != self:
            budgets = self.prefetch_ahead, self.prefetch_bytes, self.keep_bytes
            _compile(engine, self.training, self.operations, budgets)
        engine.native.set_replay(True)
        yield self

    def save(self, path: PathLike) -> None:
        """Write the plan and its recording as JSON, for ``python -m penstock.plan``.

        Parameters
        ----------
        path : str or Path
            The file. Ranks that share a folder take a name each, or one of them saves alone.
        """
        engine = self._engine
        of_plan = {name: getattr(self, name) for name in _SAVED}
        save(
            SavedPlan(
                model=engine.name,
                rank=engine.world.ranks.part,
                ranks=engine.world.ranks.parts,
                communicator=engine.native.communicator(),
                stage=engine.stage,
                groups=self.forecasts,
                drafts=self.drafts,
                **of_plan,
            ),
            path,
        )


_SAVED = (
    *("training", "prefetch_ahead", "prefetch_bytes", "keep_bytes", "kept_bytes", "peak_bytes"),
    *("lower_bound_bytes", "predicted_step", "predicted_exposed", "hash", "operations"),
)


@contextmanager
def record(model: nn.Module | None = None) -> Iterator[None]:
    """Run the passes that begin in this context without a plan; the last one is kept, with times.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out while only one lives.
    """
    engine = engine_of(model)
    engine.native.set_replay(False)
    try:
        yield
    finally:
        engine.native.set_replay(True)


def get_recorded_ops(model: nn.Module | None = None, *, training: bool = True) -> list[Operation]:
    """List the operations of the last complete pass.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out while only one lives.
    training : bool
        The last pass with a backward; False: the last evaluation.

    Returns
    -------
    list of Operation
    """
    check_flag("training", training)
    engine = engine_of(model)
    if engine.on_gpu:
        torch.cuda.synchronize(engine.world.device)  # or the last times were not known
    names = {group.index: group.name for group in engine.groups()}
    return [from_numbers(numbers, names) for numbers in engine.native.recorded(training)]


def compile(
    model: nn.Module | None = None,
    *,
    recorded_ops: Sequence[Operation],
    zero_stage: int | None = None,
    prefetch_ahead: int = 2,
    prefetch_bytes: int | None = None,
    keep_bytes: int = 0,
    training: bool = True,
) -> Plan:
    """Compile recorded operations to a plan; all ranks call this alike.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out while only one lives.
    recorded_ops : sequence of Operation
        From `get_recorded_ops`, or of a saved plan (`penstock.plan.load`). Their times are agreed
        on by all ranks: the longest of compute, and the collectives of the rank that has waited
        least for others.
    zero_stage : int, optional
        The stage that the plan is for; must be the model's.
    prefetch_ahead : int
        How many groups are gathered ahead of their use.
    prefetch_bytes : int, optional
        At most so many bytes gathered or in flight; left out: no limit.
    keep_bytes : int
        Bytes of groups that stay gathered from forward to backward, in stage 3, beside those that
        are gathered ahead: those whose gathers take longest a byte. The smallest of all ranks.
    training : bool
        For passes with a backward; False: for evaluations.

    Returns
    -------
    Plan
        In force from the next pass on; see `Plan.execute`.
    """
    engine = engine_of(model)
    check_count("prefetch_ahead", prefetch_ahead, 0)
    check_bytes("prefetch_bytes", prefetch_bytes)
    check_count("keep_bytes", keep_bytes, 0, 2**63 - 1)
    check_flag("training", training)
    _check_operations(recorded_ops)
    if zero_stage is not None:
        check_stage("zero_stage", zero_stage)
    asked = engine.options.stage
    if zero_stage is not None and zero_stage not in (asked, engine.stage):
        raise PenstockError(
            "EINVAL", f"zero_stage={zero_stage}: {engine.name} was sharded with stage={asked}"
        )
    budgets = prefetch_ahead, prefetch_bytes or 0, keep_bytes
    return _compile(engine, training, tuple(recorded_ops), budgets)


def _check_operations(recorded_ops: Sequence[Operation]) -> None:
    is_list = isinstance(recorded_ops, Sequence)
    if not is_list or not all(isinstance(op, Operation) for op in recorded_ops):
        refuse("recorded_ops", recorded_ops, "give what penstock.get_recorded_ops(model) returned")


def _compile(
    engine: Engine, training: bool, operations: tuple[Operation, ...], budgets: tuple[int, int, int]
) -> Plan:
    numbers = {group.name: group.index for group in engine.groups()}
    unknown = {op.group for op in operations} - set(numbers)
    if unknown:
        raise PenstockError("EINVAL", f"{engine.name} has no group {sorted(unknown)[0]!r}")
    recording = _C.Recording([to_numbers(op, numbers) for op in operations])
    result = engine.native.compile(training, recording, budgets)
    forecast = engine.native.forecast(training)
    plan = Plan(
        operations=operations,
        prefetch_ahead=budgets[0],
        prefetch_bytes=budgets[1],
        training=training,
        groups=result.groups,
        uses=result.uses,
        peak_bytes=result.peak_bytes,
        lower_bound_bytes=result.lower_bound_bytes,
        hash=result.hash,
        keep_bytes=forecast.keep_bytes,
        kept_bytes=forecast.kept_bytes,
        predicted_step=forecast.step_ns / 1e9,
        predicted_exposed=forecast.exposed_ns / 1e9,
        forecasts=_forecasts(engine, training),
        drafts=tuple(_drafts(engine, recording, budgets[:2])) if training else (),
        _engine=engine,
    )
    engine.plans[training] = plan
    return plan


def _drafts(engine: Engine, recording: _C.Recording, limits: tuple[int, int]) -> list[Draft]:
    everything = sum(engine.native.group_layout(g.index).gathered_bytes for g in engine.groups())
    return make_drafts(engine.native, recording, *limits, everything)


def _forecasts(engine: Engine, training: bool) -> tuple[GroupForecast, ...]:
    native = engine.native
    return tuple(
        _forecast(group.name, native.group_forecast(training, group.index))
        for group in engine.groups()
    )


def _forecast(name: str, found: _C.GroupForecast) -> GroupForecast:
    return GroupForecast(
        name,
        found.bytes,
        KEEPS[found.keep],
        found.gather_ns / 1e9,
        found.reduce_ns / 1e9,
        _gather(found.forward),
        _gather(found.backward),
    )


def _gather(found: _C.GatherForecast) -> Gather | None:
    if not found.lands_ns:
        return None
    return Gather(found.start_ns / 1e9, found.lands_ns / 1e9, found.used_ns / 1e9)
