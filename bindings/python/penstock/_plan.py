"""Record a training step, look at it, compile it to a plan, and run steps by that plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import nn

from penstock._arguments import check_bytes, check_count, check_flag, check_stage, refuse
from penstock._engine import Engine, engine_of
from penstock._errors import PenstockError

_KINDS = ("gather", "release", "reduce")


@dataclass(frozen=True)
class Operation:
    """One operation of a recorded pass.

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
    """

    kind: str
    group: str
    backward: bool
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What compiling a recording yields; the same on all ranks.

    Attributes
    ----------
    operations : tuple of Operation
        What it was compiled from.
    groups, uses : int
        Groups, and uses of them, in a pass.
    peak_bytes, lower_bound_bytes : int
        Bytes of gathered groups that the plan needs, and the least that any plan could need.
    hash : int
        Of order, sizes and offsets.
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
    _engine: Engine = field(repr=False, compare=False)

    @contextmanager
    def execute(self) -> Iterator[Plan]:
        """Run the passes that begin in this context by this plan.

        One that differs from it is noticed, counted (``stats().deviations``) and runs on by the
        plan of an earlier path that it fits, or without.
        """
        engine = self._engine
        if engine.plans.get(self.training) != self:
            _compile(engine, self)
        engine.native.set_replay(True)
        yield self


@contextmanager
def record(model: nn.Module | None = None) -> Iterator[None]:
    """Run the passes that begin in this context without a plan; the last one is kept.

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
    names = {group.index: group.name for group in engine.groups()}
    return [
        Operation(_KINDS[kind], names[group], backward, nbytes)
        for kind, group, backward, nbytes in engine.native.recorded(training)
    ]


def compile(
    model: nn.Module | None = None,
    *,
    recorded_ops: Sequence[Operation],
    zero_stage: int | None = None,
    prefetch_ahead: int = 2,
    prefetch_bytes: int | None = None,
    training: bool = True,
) -> Plan:
    """Compile recorded operations to a plan; all ranks call this alike.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out while only one lives.
    recorded_ops : sequence of Operation
        From `get_recorded_ops`.
    zero_stage : int, optional
        The stage that the plan is for; must be the model's.
    prefetch_ahead : int
        How many groups are gathered ahead of their use.
    prefetch_bytes : int, optional
        At most so many bytes gathered or in flight; left out: no limit.
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
    check_flag("training", training)
    _check_operations(recorded_ops)
    if zero_stage is not None:
        check_stage("zero_stage", zero_stage)
    if zero_stage is not None and zero_stage != engine.stage:
        raise PenstockError(
            "EINVAL",
            f"zero_stage={zero_stage}: {engine.name} was sharded with stage={engine.stage}",
        )
    draft = Plan(
        tuple(recorded_ops), prefetch_ahead, prefetch_bytes or 0, training, 0, 0, 0, 0, 0, engine
    )
    return _compile(engine, draft)


def _check_operations(recorded_ops: Sequence[Operation]) -> None:
    is_list = isinstance(recorded_ops, Sequence)
    if not is_list or not all(isinstance(op, Operation) for op in recorded_ops):
        refuse("recorded_ops", recorded_ops, "give what penstock.get_recorded_ops(model) returned")


def _compile(engine: Engine, plan: Plan) -> Plan:
    numbers = {group.name: group.index for group in engine.groups()}
    unknown = {op.group for op in plan.operations} - set(numbers)
    if unknown:
        raise PenstockError("EINVAL", f"{engine.name} has no group {sorted(unknown)[0]!r}")
    operations = [
        (_KINDS.index(op.kind), numbers[op.group], op.backward, op.nbytes) for op in plan.operations
    ]
    result = engine.native.compile(
        plan.training, operations, plan.prefetch_ahead, plan.prefetch_bytes
    )
    compiled = replace(
        plan,
        groups=result.groups,
        uses=result.uses,
        peak_bytes=result.peak_bytes,
        lower_bound_bytes=result.lower_bound_bytes,
        hash=result.hash,
    )
    engine.plans[plan.training] = compiled
    return compiled
