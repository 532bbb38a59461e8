"""What stays in memory, as it is measured and as the memory that is left has it.

The first steps recompute all blocks that may be. In one of them the bytes are counted that each
block would keep. The next one, which counting would slow down, is measured: the time that each
recomputation takes, the memory in use, and when compute gets where. A device works a while before
it, so that it neither waits for the host in it nor has rested. Then it is measured how fast the
device copies to its host and back. Where what is left is not enough to keep all, a trial follows:
one block of each kind recomputes selectively, and compiled ones recompute as they will, within what
is compiled, which leaves out what no gradient needs. The ranks bring together what they have
measured and what memory they have left, and all decide by the same figures which blocks keep their
activations, all of them or what is dear to recompute, which ones offload them, which groups stay
gathered, and how far ahead gathers begin.

A block that is called with more than was measured is recomputed, and so are all after it in that
pass: a step that grows takes no more memory than without a plan. What it takes is measured on the
way; where several steps have grown on some rank, the ranks decide anew.

Where stage 2 takes no more memory than the plan, an engine of that stage takes the place of the one
that was asked for. That one comes back, for good, where steps have grown so that it does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from penstock import _C, _budget
from penstock._activations import Call, Use, begin_late, bytes_of
from penstock._arguments import Options
from penstock._budget import Memory, Offer, readable
from penstock._checkpoint import Checkpointed, Way
from penstock._drafts import choose_draft, cost, describe, hold_whole, make_drafts
from penstock._figures import Figures
from penstock._offload import Offloading
from penstock._plans import Draft
from penstock._trial import STEPS, Share, Trial, find_trial, kind_of
from penstock._units import Unit
from penstock._values import tensors_of
from penstock._ways import Block, Choice, Link, Ways, measure_link
from penstock._world import World

_WARM_STEPS = 2  # in which blocks are compiled, and the optimizer makes its states
_INTERVAL = 16  # passes after which the ranks ask each other whether they have grown
_GROWN = 4  # passes among them that make the ranks decide anew
_logger = logging.getLogger("penstock")


class Passes(Protocol):
    """An engine, as far as it is asked here."""

    name: str
    world: World
    native: _C.Engine
    units: list[Unit]
    root: Unit
    options: Options
    plans: dict[bool, object]
    optimizer_steps: int
    is_captured: bool
    offloading: Offloading
    stage: int

    @property
    def may_reopen(self) -> bool:
        """Whether nobody would notice another engine."""

    def reopen(self, stage: int, why: str) -> None:
        """Open another engine in the place of this one."""

    def drop_graphs(self) -> None:
        """Destroy CUDA graphs of its passes: they hold another decision."""


class Span:
    """Passes whose graphs live at the same time: mostly one.

    Attributes
    ----------
    uses : dict of Checkpointed and Use
        What was called in them.
    is_metered : bool
        Whether all is recomputed from now on, and measured.
    is_trial : bool
        Whether what a trial tries is measured.
    counts : bool
        Whether bytes are counted where it is measured, which takes its time.
    is_whole : bool
        Whether that was so from the first block on.
    """

    def __init__(self, is_metered: bool, is_trial: bool = False, *, counts: bool = True) -> None:
        self.uses: dict[Checkpointed, Use] = {}
        self.is_metered = is_metered
        self.is_trial = is_trial
        self.counts = counts
        self.is_whole = True
        self._calls = 0

    def call(self, block: Checkpointed, size: int) -> int:
        """Note a call with arguments of so many bytes; return those of the block's calls."""
        self._calls += 1
        use = self.uses.setdefault(block, Use())
        use.inputs += size
        return use.inputs

    def grow(self) -> None:
        """Recompute and measure this call, which has more than was known, and what follows."""
        self.is_metered = True
        self.is_whole = self._calls == 1


class Decision(NamedTuple):
    """What the ranks have agreed on.

    Attributes
    ----------
    draft : Draft
        Of the plan.
    choice : Choice
        Of what blocks do.
    stage : int
        Of the engine that does it.
    """

    draft: Draft
    choice: Choice
    stage: int


class Keeping:
    """The decision of ``memory=`` and ``checkpoint="auto"``.

    Parameters
    ----------
    memory : str, int or float
        As given to `shard`.
    units : iterable of Unit
        The blocks that may be recomputed.

    Attributes
    ----------
    blocks : list of Checkpointed
        All of them, in the order of the model.
    is_decided : bool
        Whether the ranks have decided.
    """

    def __init__(self, memory: Memory, units: Iterable[Unit]) -> None:
        self.blocks = [Checkpointed(unit, Way.RECOMPUTE, self) for unit in units]
        self.is_decided = False
        self._memory = memory
        self._engine: Passes
        self._begin_anew()

    def attach(self, engine: Passes) -> None:
        """Note whose blocks they are."""
        self._engine = engine

    def _begin_anew(self) -> None:
        self._figures = {block: Figures() for block in self.blocks}
        self._shares: dict[Hashable, Share | None] = {}  # of what is saved selectively, by kind
        self._spared: dict[Hashable, float] = {}  # of recomputing all, within compiled code
        self._trial: Trial | None = None  # that goes on
        self._steps = 0  # that the optimizer has ended
        self._seen_steps: int | None = None  # how many the engine had
        self._left: int | None = None  # bytes at the peak of what was measured
        self._link: Link | None = None
        self._compiled: set[Checkpointed] = set()  # blocks, on all ranks
        self._recording: _C.Recording | None = None  # of a pass that was measured
        self._drafts: list[Draft] = []
        self._draft: Draft | None = None  # of the plan that was made; None: by the options
        self._choice = Choice()  # of what blocks do
        self._waits = False  # to go on in another stage
        self._has_gone_back = False  # to the stage that was asked for
        self._begins_step = False  # the pass that begins
        self._span = Span(False)
        self._measured: list[Span] = []
        self._measures_next = False
        self._passes = self._grown_passes = 0  # since the ranks have asked
        self._peak = 0  # bytes: the highest that was looked at
        self._pieces = 0  # bytes that torch's allocator could not use in the measured step
        self._bare_peak = 0  # bytes of a measured step, beside what its plan takes

    @property
    def _is_measured_step(self) -> bool:
        return not self.is_decided and self._steps == _WARM_STEPS

    @property
    def _is_counted_step(self) -> bool:
        return not self.is_decided and self._steps == _WARM_STEPS - 1

    # ---- calls of blocks -------------------------------------------------------------------------

    def way_of(self, block: Checkpointed, values: list[Any]) -> Way:
        """Tell what a call of the block is to save."""
        span = self._span
        has_grown = span.call(block, bytes_of(tensors_of(values))) > self._figures[block].inputs
        if self.is_decided and has_grown and not span.is_metered:
            span.grow()
            if not self._engine.is_captured:
                _budget.begin_peak(self._engine.world.device)
        return Way.RECOMPUTE if span.is_metered or has_grown else block.way

    def measured(self, block: Checkpointed, way: Way) -> Call | None:
        """Return what measures a call, where it is to be measured."""
        span, engine = self._span, self._engine
        is_tried = span.is_trial and (way is Way.SELECT or block in self._compiled)
        if engine.is_captured or not (span.is_metered or is_tried):
            return None
        device = engine.world.device
        return Call(span.uses[block], block.unit, engine.root, device, counts=span.counts)

    @property
    def recomputes_within(self) -> bool:
        """Whether it is not to be measured by itself what recomputing a block takes."""
        is_metered = self._span.is_metered and not self._engine.is_captured
        return (self.is_decided or self._trial is not None) and not is_metered

    # ---- passes ----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Note that a forward begins which gradients are computed of; no pass runs."""
        if self._engine.is_captured:
            self._span = Span(False)
            return
        # What it keeps may come to what others keep, on this rank; what follows is the same on all.
        is_alone = not any(unit.pending for unit in self._engine.units)
        if is_alone:
            self._end_span()
        self._note_step()
        if self._trial is not None and self._steps >= self._trial.end:
            self._end_trial(self._trial)
        elif self._trial is None and not self.is_decided and self._steps > _WARM_STEPS:
            self._consider()
        elif self.is_decided:
            self._look_for_growth()
        is_trial = self._trial is not None and self._steps == self._trial.end - 1
        is_measured = self._is_measured_step
        self._engine.native.set_timing(is_measured)
        if is_measured or is_trial:
            begin_late(self._engine.world.device)
        if not is_alone:
            return
        is_metered = self._is_counted_step or is_measured or self._measures_next
        self._span = Span(is_metered, is_trial, counts=not is_measured)
        if self._measures_next:
            self._measures_next = False
            _budget.begin_peak(self._engine.world.device)

    def begin_anew(self) -> None:
        """Forget what was measured, and recompute all blocks: all ranks begin with other ones."""
        self._follow(Choice())
        self.is_decided = False
        self._begin_anew()

    def _end_span(self) -> None:
        span = self._span
        if span.is_trial:
            self._measured.append(span)
        if not span.uses or not span.is_metered:
            return
        self._grown_passes += self.is_decided
        if not span.is_whole:
            self._measures_next = True
            return
        self._measured.append(span)
        if self.is_decided:
            self._note_left()

    def _note_step(self) -> None:
        """Count steps, by what ends them; those of before the first pass are none."""
        steps = self._engine.optimizer_steps
        self._begins_step = self._seen_steps is not None and steps != self._seen_steps
        if self._begins_step:
            self._steps += 1
            if self._is_counted_step:  # which makes its own, so that the measured one need not
                _budget.release_pieces(self._engine.world.device)
            if self._is_counted_step or self._is_measured_step:
                _budget.begin_peak(self._engine.world.device)
        self._seen_steps = steps

    def note_optimizer(self) -> None:
        """Note the peak of a measured step now that it ends: a user may measure the next one's."""
        if self._is_measured_step or (self.is_decided and self._span.is_metered):
            self._note_left()

    def _note_left(self) -> None:
        """Note what a pass that recomputes all has left: beside it stands what the plan takes."""
        device = self._engine.world.device
        if self._is_measured_step:
            self._pieces = max(self._pieces, _budget.pieces_of(device))
        self._bare_peak = max(self._bare_peak, _budget.peak_of(device) - self._cost())
        left = _budget.left_at_peak(self._memory, device, self._pieces) + self._cost()
        self._left = left if self._left is None else min(self._left, left)

    def _look_for_growth(self) -> None:
        """Ask the other ranks from time to time, all in the same pass."""
        has_nothing = self._draft is None and all(block.recomputes for block in self.blocks)
        if has_nothing and not self._waits:
            return
        self._passes += 1
        if self._passes < _INTERVAL:
            return
        self._look_at_peak()
        mine = [self._grown_passes, self._waits and not self._may_reopen]
        grown, is_noticed = self._ask(mine).max(dim=0).values.tolist()
        self._passes = self._grown_passes = 0
        if grown >= _GROWN:
            self._consider()
        elif self._waits and not is_noticed:
            self._decide(self._choose())

    def _look_at_peak(self) -> None:
        """Count a peak that goes over what there is, once, as passes that have grown."""
        device = self._engine.world.device
        peak, over = _budget.peak_of(device), -_budget.left_at_peak(self._memory, device, 0)
        if over > 0 and peak > self._peak:
            self._grown_passes = _GROWN
            self._left = min(self._left or 0, self._choice.size + self._cost() - over)
        self._peak = max(self._peak, peak)

    # ---- deciding --------------------------------------------------------------------------------

    def _ask(self, mine: list[int]) -> torch.Tensor:
        """Gather beside the collectives that are on their way."""
        return self._engine.world.all_gather(torch.tensor(mine, dtype=torch.int64))

    def _gather(self, mine: list[int]) -> torch.Tensor:
        """Gather behind all of them: what follows changes the plan, or measures."""
        if self._engine.world.size > 1:
            self._engine.native.drain()
        return self._ask(mine)

    def _consider(self) -> None:
        """Agree on what was measured, and decide by it, or try first what else there is."""
        engine = self._engine
        self._take_measured(self._figures)
        left = self._agree()
        if not self._is_whole:  # which has the drafts of before
            ahead, limit = engine.options.prefetch_ahead, engine.options.prefetch_bytes
            self._drafts = make_drafts(engine.native, self._recorded(), ahead, limit, left)
        decision = self._choose()
        most = sum(self._block(block).keep.nanoseconds for block in self.blocks)
        if decision.choice.nanoseconds < most:
            selective = find_trial(self._figures, self._shares, left - self._cost())
            if selective or any(kind_of(block) not in self._spared for block in self._compiled):
                self._begin_trial(selective)
                return
        self._decide(decision)

    def _choose(self) -> Decision:
        ways = Ways([self._block(block) for block in self.blocks], self._link)
        first, left = self._drafts[0], self._left or 0
        draft, choice = choose_draft(self._drafts, ways, left)
        whole, most = self._draft, first.peak_bytes + left  # once all is held, as long as it fits
        if whole is None or not self._is_whole:
            groups = (group for unit in self._engine.units for group in unit.groups)
            whole, most = hold_whole(draft, self._engine.native, groups), draft.peak_bytes
        stage = self._choose_stage(whole, most)
        if stage == self._engine.options.stage:
            return Decision(draft, choice, stage)
        return Decision(whole, ways.choose(left - cost(whole, first)), stage)

    def _choose_stage(self, whole: Draft, most: int) -> int:
        """Choose stage 2 where it takes no more than `most` bytes, once all ranks may reopen."""
        engine = self._engine
        asked, present = engine.options.stage, engine.stage
        may = asked == 3 and engine.world.ranks.parts > 1 and not self._has_gone_back
        may &= whole.predicted_step > 0  # else no times are known
        best = 2 if may and whole.peak_bytes <= most else asked
        self._waits = best != present and not self._gather([self._may_reopen]).min()
        return present if self._waits else best

    @property
    def _is_whole(self) -> bool:
        """Whether all is held, in another stage than was asked for."""
        return self._engine.stage != self._engine.options.stage

    @property
    def _may_reopen(self) -> bool:
        return self._begins_step and self._engine.may_reopen

    def _block(self, block: Checkpointed) -> Block:
        figures, share = self._figures[block], self._shares.get(kind_of(block))
        spared = self._spares(block)
        keep = Offer(figures.kept, figures.nanoseconds - spared)
        select = None if share is None else share.of(figures, spared)
        return Block(keep, select, block in self._compiled, figures.level, spared)

    def _spares(self, block: Checkpointed) -> int:
        """Return the nanoseconds less that recomputing it takes as it will be done."""
        share = self._spared.get(kind_of(block), 0.0) if block in self._compiled else 0.0
        return int(share * self._figures[block].nanoseconds)

    def _decide(self, decision: Decision) -> None:
        engine = self._engine
        self._follow(decision.choice)
        self.is_decided = True
        self._passes = self._grown_passes = 0
        engine.drop_graphs()
        if decision.stage != engine.stage:
            self._has_gone_back = decision.stage == engine.options.stage
            engine.reopen(decision.stage, f"the model went on in stage {decision.stage}")
            _budget.begin_peak(engine.world.device)  # that of the move is none of a step
        self._plan_by(decision.draft)
        _budget.release_pieces(engine.world.device)
        for line in self.describe():
            _logger.info("%s: %s", engine.name, line)

    def _begin_trial(self, selective: Mapping[Hashable, Checkpointed]) -> None:
        self._trial = Trial(self.blocks, selective, self._steps + STEPS)
        self.is_decided = self._measures_next = False
        self._engine.drop_graphs()
        tried = set(selective.values())
        places = (place for place, block in enumerate(self.blocks) if block in tried)
        self._follow(Choice(selective=tuple(places)))

    def _end_trial(self, trial: Trial) -> None:
        self._take_measured(trial.figures)
        self._agree_on(trial.figures.values())
        self._shares.update(trial.shares(self._figures))
        self._spared.update(trial.spared(self._figures, self._compiled))
        self._trial = None
        self._decide(self._choose())

    def _follow(self, choice: Choice) -> None:
        self._choice = choice
        ways = dict.fromkeys((*choice.kept, *choice.offloaded), Way.KEEP)
        ways |= dict.fromkeys((*choice.selective, *choice.offloaded_selectively), Way.SELECT)
        for place, block in enumerate(self.blocks):
            block.offloads = place in choice.offloaded
            block.way = ways.get(place, Way.RECOMPUTE)

    def _recorded(self) -> _C.Recording:
        """Return the pass that was measured, with its times: the device has come to its end."""
        if self._recording is None:
            self._recording = _C.Recording(self._engine.native.recorded(True))
        return self._recording

    def _plan_by(self, draft: Draft) -> None:
        """Make the plan of the draft, and those of other paths with what it takes."""
        if draft.predicted_step == 0:  # no times are known
            return
        native, options = self._engine.native, self._engine.options
        native.plan_with(draft.prefetch_ahead, draft.keep_bytes)
        budgets = draft.prefetch_ahead, options.prefetch_bytes or 0, draft.keep_bytes
        native.compile(True, self._recorded(), budgets)
        self._engine.plans.pop(True, None)
        self._draft = None if draft is self._drafts[0] else draft

    def _take_measured(self, figures: Mapping[Checkpointed, Figures]) -> None:
        if self._engine.world.device.type == "cuda":
            torch.cuda.synchronize(self._engine.world.device)
        for span in self._measured:
            for block, use in span.uses.items():
                # A call of a trial that has more than is known was recomputed.
                if block in figures and not (span.is_trial and self._has_grown(block, use)):
                    figures[block].take(use, self._bare_peak + self._cost())
        self._measured.clear()

    def _has_grown(self, block: Checkpointed, use: Use) -> bool:
        return use.inputs > self._figures[block].inputs

    def _agree(self) -> int:
        """Agree on what is known of blocks and of the link; return the least memory left."""
        link = self._measure_link()
        mine = [self._left or 0, link.down, link.up, link.host_bytes]
        mine += [block.is_compiled for block in self.blocks]
        self._left, *least = self._gather(mine).min(dim=0).values.tolist()
        self._link = Link(*least[:3]) if all(least[:3]) else None
        self._compiled = {b for b, on_all in zip(self.blocks, least[3:], strict=True) if on_all}
        self._agree_on(self._figures.values())
        return self._left

    def _agree_on(self, figures: Iterable[Figures]) -> None:
        """Take the largest and slowest of all ranks for each block."""
        known = list(figures)
        mine = [number for one in known for number in one.numbers()]
        most = iter(self._gather(mine).max(dim=0).values.tolist() if mine else [])
        for one in known:
            one.inputs, one.kept, one.nanoseconds, one.backward, one.level = islice(most, 5)

    def _measure_link(self) -> Link:
        """Measure what offloads could use: nothing where none is wanted."""
        engine = self._engine
        link = None
        if self.blocks and engine.options.offloads_activations:
            self._gather([0])  # the ranks of a host copy at the same time
            link = measure_link(engine.world.device, engine.offloading.most_bytes())
        return link or Link(0, 0, 0)

    # ---- figures ---------------------------------------------------------------------------------

    def saved(self) -> Figures:
        """Sum up what stays on the device, and what all that is not recomputed saves."""
        blocks, choice = [self._block(block) for block in self.blocks], self._choice
        kept = sum(blocks[place].keep.size for place in choice.kept)
        kept += sum(self._size(blocks[place].select) for place in choice.selective)
        return Figures(kept=kept, nanoseconds=choice.nanoseconds)

    @property
    def gain(self) -> int:
        """Nanoseconds that a pass as decided takes less than the measured one, by its blocks."""
        if not self.is_decided:
            return 0
        return self._choice.nanoseconds + sum(map(self._spares, self.blocks))

    @property
    def predicted_peak(self) -> int:
        """Bytes that torch has allocated at most in a step as decided; 0: not known."""
        if not self.is_decided or self._engine.world.device.type != "cuda":
            return 0
        return self._bare_peak + self._choice.size + self._cost()

    def _cost(self) -> int:
        """Return the bytes that the plan takes more than one by the options."""
        return 0 if self._draft is None else cost(self._draft, self._drafts[0])

    def describe(self) -> Iterator[str]:
        """Say in lines what is kept or offloaded, and by which plan."""
        if self.blocks:
            yield self._describe_blocks(self._left or 0)
        if self._link is not None and self._choice.offloaded:
            yield self._describe_offloaded(self._link)
        if self._draft is not None:
            saved = self.gain / 1e9
            yield describe(self._draft, self._drafts[0], saved, is_whole=self._is_whole)

    def _describe_blocks(self, left: int) -> str:
        count, choice = len(self.blocks), self._choice
        if not choice.kept and not choice.selective and not choice.offloaded:
            least = readable(min(figures.kept for figures in self._figures.values()))
            room = readable(max(left, 0))
            return f"all {count} blocks are recomputed: one keeps {least} at least, {room} are left"
        saved, selective, beside = self.saved(), len(choice.selective), len(choice.offloaded)
        some = f", and of {selective} what is dear to recompute" if selective else ""
        more = f", beside {beside} that are offloaded" if beside else ""
        peak = f", {readable(choice.size)} at the peak," if choice.size < saved.kept else ""
        names = [self._names(choice.kept)] if choice.kept else []
        names += [f"selectively {self._names(choice.selective)}"] if selective else []
        listed = f" ({'; '.join(names)})" if names else ""
        return (
            f"activations of {len(choice.kept)} of {count} blocks are kept{some}: "
            f"{readable(saved.kept)}{peak} of {readable(left)} that are left{more}, which saves "
            f"{saved.nanoseconds / 1e6:.2f} ms a pass{listed}"
        )

    def _describe_offloaded(self, link: Link) -> str:
        offloaded, selective = self._choice.offloaded, self._choice.offloaded_selectively
        blocks = {place: self._block(self.blocks[place]) for place in offloaded}
        sizes = (b.select if i in selective else b.keep for i, b in blocks.items())
        some = f", what is dear to recompute of {len(selective)}" if selective else ""
        return (
            f"activations of {len(offloaded)} of {len(self.blocks)} blocks are offloaded{some}: "
            f"{readable(sum(map(self._size, sizes)))} of {readable(link.host_bytes)} of the host's "
            f"memory, at {link.down / 1e9:.1f} GB/s to the host and {link.up / 1e9:.1f} GB/s back "
            f"({self._names(offloaded)})"
        )

    @staticmethod
    def _size(offer: Offer | None) -> int:
        return 0 if offer is None else offer.size

    def _names(self, places: Iterable[int]) -> str:
        return ", ".join(self.blocks[place].unit.name for place in places)
