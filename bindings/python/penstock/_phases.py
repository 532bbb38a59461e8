"""Steps, forwards, backwards and the parts that blocks have in them: where the training is."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

import torch

from penstock import _C
from penstock._page import PHASES
from penstock._units import Unit

_NUMBERS = {kind: number for number, kind in enumerate(PHASES)}


class Phases:
    """What the training thread does: known to whoever asks, and told to a runtime's trace, if any.

    A profiler that is attached to the process is shown it as it begins and ends; a step to where
    the next one begins.

    A slice is written when it ends, so that a pass that fails leaves none open.

    Parameters
    ----------
    units : list of Unit
        The root first, whose forward is the model's.
    page : Page
        Of this rank: says to others where the training is.
    """

    def __init__(self, units: list[Unit], page: _C.Page) -> None:
        self._root = units[0]
        self._numbers: dict[Unit | None, int] = {unit: i for i, unit in enumerate(units)}
        self._page = page
        page.name_units([unit.name for unit in units])
        self._unit: Unit | None = None  # of the place
        self._number = 0  # of the step
        self._has_stepped = False  # an optimizer, in it
        self._runtime: _C.Runtime | None = None
        self._began: dict[tuple[str, Unit | None], int] = {}
        self._steps = 0
        self._step_began: int | None = None
        self._step_ended: int | None = None  # when an optimizer has stepped last
        self._stepped: set[int] = set()  # parameters, by id, since the step began
        self._steer: Callable[[int, bool], None]
        self._is_shown = _C.is_profiled()
        self._ranges: dict[tuple[str, Unit | None], int] = {}  # that a profiler shows

    @property
    def is_on(self) -> bool:
        """Whether somebody is told."""
        return self._runtime is not None

    def reach(self, kind: str, unit: Unit | None = None, is_behind: bool = False) -> None:
        """Note that the training is in, or behind, something of this kind, or a unit's part."""
        self._unit = unit
        self._page.reach(self._number, self._numbers.get(unit, 0), _NUMBERS[kind], is_behind)

    def start(self, runtime: _C.Runtime, steer: Callable[[int, bool], None]) -> None:
        """Tell a runtime from here on.

        `steer` is called between steps, with the number of the next one and whether that begins
        now: behind the step of the optimizers that have all parameters, and before each step.
        """
        self._runtime = runtime
        self._steer = steer
        self._steps = 0
        self._step_began = self._step_ended = None

    def stop(self) -> None:
        """Tell nobody any more."""
        self._runtime = None
        self._began.clear()

    def begin(self, kind: str, unit: Unit | None = None) -> None:
        """Begin a slice; one of the same kind and unit that has not ended is forgotten."""
        self.reach(kind, unit)
        if self._is_shown:
            self._show(kind, unit)
        if self._runtime is not None:
            self._began[kind, unit] = monotonic_ns()

    def end(self, kind: str, unit: Unit | None = None, *, stays: bool = False) -> None:
        """End a slice, if it was begun; whether the training stays in it all the same."""
        has_left = kind == "backward" and unit is not None and unit is not self._unit
        if not stays and not has_left:
            self.reach(kind, unit, is_behind=True)
        if self._is_shown:
            self._hide(kind, unit)
        if self._runtime is None:
            return
        began = self._began.pop((kind, unit), None)
        if began is not None:
            self._runtime.trace_slice(self._name(kind, unit), began, monotonic_ns())

    def _name(self, kind: str, unit: Unit | None) -> str:
        return kind if unit is None or unit is self._root else f"{kind} {unit.name}"

    # ---- for a profiler -----------------------------------------------------------------------

    def _show(self, kind: str, unit: Unit | None) -> None:
        """Begin a range; one of the same kind and unit, of what has failed, ends."""
        self._hide(kind, unit)
        self._ranges[kind, unit] = _C.begin_range(self._name(kind, unit))

    def _hide(self, kind: str, unit: Unit | None) -> None:
        _C.end_range(self._ranges.pop((kind, unit), 0))

    def close(self) -> None:
        """End what a profiler is shown: there is nothing to come."""
        for number in self._ranges.values():
            _C.end_range(number)
        self._ranges.clear()

    # ---- passes -------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit, recomputed: bool, is_captured: bool = False) -> None:
        """Begin a unit's forward, and a step if it trains and the last step has ended.

        What is captured is one step, however many optimizers step in it: a recording that stopped
        at the next one would wait for the device within the capture.
        """
        if not (recomputed or is_captured) and torch.is_grad_enabled():
            self.begin_step()
        self.begin("recompute" if recomputed else "forward", unit)

    def begin_backward(self, unit: Unit) -> None:
        """Begin a block's part of a backward; what the root uses is used all along."""
        if unit is not self._root and not unit.read_by_root:
            self.begin("backward", unit)

    # ---- steps --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step, unless one has begun in which no optimizer has stepped yet."""
        if self._is_shown and (self._has_stepped or ("step", None) not in self._ranges):
            self._show("step", None)
        if self._has_stepped:
            self._number += 1
            self._has_stepped = False
        if self._runtime is None or (self._step_began is not None and self._step_ended is None):
            return
        self.end_step()
        self._steer(self._steps, True)
        self._steps += 1
        self._step_began, self._step_ended = monotonic_ns(), None
        self._stepped.clear()

    def end_optimizer(
        self, optimizer: torch.optim.Optimizer | None = None, is_captured: bool = False
    ) -> None:
        """Note that an optimizer has stepped, or all: the step ends here, unless one follows."""
        self.end("optimizer")
        self._has_stepped = True
        self._step_ended = monotonic_ns()
        if self._runtime is not None and not is_captured and self._is_last(optimizer):
            self._steer(self._steps, False)

    def _is_last(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether all parameters have been stepped, now that this optimizer has."""
        if optimizer is None:
            return True
        self._stepped.update(id(p) for group in optimizer.param_groups for p in group["params"])
        groups = (group for unit in self._numbers if unit is not None for group in unit.groups)
        shards = (parameter.sharded for group in groups for parameter in group.trainable)
        return all(id(shard) in self._stepped for shard in shards if shard.requires_grad)

    def end_step(self) -> None:
        """Write the step that has ended, if any: the next one begins, or the trace ends."""
        if self._runtime is None or self._step_began is None or self._step_ended is None:
            return
        self._runtime.trace_slice("step", self._step_began, self._step_ended)
        self._step_began = self._step_ended = None
