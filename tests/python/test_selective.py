"""Blocks that recompute selectively: the same bits, no product twice, and fewer bytes."""

import logging

import pytest
import torch
from equality import breaking_off, train_both, whole, world
from models import DEVICE, WIDTH, Block, Net
from penstock import (
    PenstockError,
    _activations,
    _keeping,
    _offload,
    _selective,
    close,
    shard,
    stats,
)
from penstock._budget import Offer
from penstock._checkpoint import Way
from penstock._engine import engine_of
from penstock._figures import Figures
from penstock._keeping import _INTERVAL
from penstock._selective import is_saved
from penstock._trial import STEPS, Share, Trial, kind_of
from penstock._ways import Choice, Link, Ways
from test_checkpoint import (
    KINDS,
    Clock,
    Trainer,
    activations_alone,
    assert_same,
    kept_without_checkpoint,
    on_cpus,
    train,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

SELECTIVE = {"checkpoint": "selective"}
OFFLOADED = SELECTIVE | {"offload": "activations"}
HEADS = 2
aten = torch.ops.aten


class AttentionBlock(nn.Module):
    """Attention and a product, with random numbers behind each; takes its input by name."""

    def __init__(self, dropout: float, behind: float = 0.3) -> None:
        super().__init__()
        self.behind = behind
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 24, bias=False)
        self.down = nn.Linear(8, 8)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.up(self.norm(x)).view(2, -1, 3, HEADS, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, dropout_p=self.dropout
        )
        mixed = torch.tanh(mixed.transpose(1, 2).reshape(x.shape))
        mixed = self.down(nn.functional.dropout(mixed, self.behind))
        return x + nn.functional.dropout(mixed, self.behind)


class InPlaceBlock(nn.Module):
    """Writes into what its products put out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.relu_(self.up(x)))
        out += x
        return out


class Varied(nn.Module):
    def __init__(self, *dropouts: float, behind: float = 0.3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        attention = (AttentionBlock(dropout, behind) for dropout in dropouts)
        self.blocks = nn.ModuleList([*attention, InPlaceBlock()])

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x=x)
        return x


class Eager(Varied):
    def __init__(self) -> None:
        super().__init__(0.3, 0.0)


class Compiled(Varied):
    """What is compiled and recomputed on a GPU draws from a generator that torch makes for it."""

    def __init__(self) -> None:
        super().__init__(0.0, behind=0.0 if DEVICE == "cuda" else 0.3)


# ---- what is trained is the same -----------------------------------------------------------------


def train_selectively(stage, compiled):
    torch._dynamo.reset()
    before, _offload._LEAST = _offload._LEAST, 1
    for compiles, ways in (("", (SELECTIVE, OFFLOADED)), *compiled):
        kind = Compiled if compiles else Eager
        want = train(kind, stage=stage, compiles=compiles)
        for way in ways:
            assert_same(train(kind, stage=stage, compiles=compiles, **way), want)
    _offload._LEAST = before


@pytest.mark.parametrize(
    ("stage", "compiled"), [(1, ()), (3, [("before", [SELECTIVE, OFFLOADED])])]
)
def test_training_is_the_same_bit_for_bit(worlds, stage, compiled):
    worlds(2).run(train_selectively, stage, compiled)


def test_training_without_process_group_is_the_same_bit_for_bit():
    train_selectively(3, ())


@on_cpus
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_all_kinds_of_models_equal_unsharded(kind):
    close(train_both(kind, steps=2, stage=3, **SELECTIVE))


def train_under_a_kept_graph(**options):
    trainer = Trainer(**options)
    for step in range(2):
        loss = trainer.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    with breaking_off(trainer.model.blocks[1]):
        trainer.loss(3).backward()
    trainer.optimizer.zero_grad()
    trainer.step(4)
    return trainer.finish()


def test_a_graph_that_is_kept_is_used_again():
    assert_same(train_under_a_kept_graph(**SELECTIVE), train_under_a_kept_graph())


class Branching(Block):
    """Puts out two tensors, each of which may have a backward of its own."""

    def forward(self, x):
        return self.scale * torch.tanh(x), self.down(torch.tanh(self.up(x))).sin()


def gradients_by_parts(**options):
    torch.manual_seed(0)
    model = shard(nn.Sequential(Branching()).to(DEVICE), blocks="0", **options)
    first, second = model(torch.rand(4, WIDTH, device=DEVICE))
    first.sum().backward()
    second.square().sum().backward(retain_graph=True)
    second.square().sum().backward()
    found = [whole(parameter.grad) for parameter in model.parameters()]
    close(model)
    return found


def test_parts_of_a_graph_have_backwards_of_their_own():
    assert_same(gradients_by_parts(**SELECTIVE), gradients_by_parts())


# ---- what is saved, and what is run anew ---------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts calls of operators."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function] = self.calls.get(function, 0) + 1
        return function(*args, **(kwargs or {}))


def products_of_backward(compiles, **options):
    torch._dynamo.reset()
    trainer = Trainer(compiles=compiles, **options)
    loss = trainer.loss(0)
    with Counting() as counting:
        loss.backward()
    trainer.finish()
    return sum(counting.calls.get(op, 0) for op in (aten.mm.default, aten.addmm.default))


@on_cpus
def test_no_product_is_computed_twice():
    want = products_of_backward("")
    assert products_of_backward("", **SELECTIVE) == want
    assert products_of_backward("after", **SELECTIVE) == want
    assert products_of_backward("", checkpoint="*") == want + 2 * 3


def bytes_selected(block, inputs):
    selection = _selective.Selection()
    checkpoint(block, inputs, use_reentrant=False, context_fn=selection.contexts)
    return sum(tensor.nbytes for tensor in selection.tensors())


@on_cpus
def test_less_is_saved_than_is_kept():
    block, inputs = AttentionBlock(0.0), torch.rand(60, 8, requires_grad=True)
    # What `up` puts out, and attention, with a number a row and head, and `down`.
    found = bytes_selected(block, inputs)
    assert found == (24 + 8 + HEADS + 8) * 60 * 4
    assert found < kept_without_checkpoint(block, inputs)


def test_operators_are_told_by_what_they_cost_and_draw():
    x = torch.empty(0)
    flash = aten._scaled_dot_product_flash_attention.default
    assert is_saved(aten.mm.default, (x, x), {})
    assert is_saved(flash, (x, x, x), {}) and is_saved(flash, (x, x, x, 0.0), {})
    assert not is_saved(flash, (x, x, x, 0.1), {})
    assert not is_saved(flash, (x, x, x), {"dropout_p": 0.1})
    for op in (aten.mul.Tensor, aten.native_dropout.default, aten.bernoulli_.float, aten.mm.out):
        assert not is_saved(op, (x, x), {})


@on_cpus
def test_blocks_are_counted():
    for options, want in ((SELECTIVE, (0, 3, 0, 0)), (OFFLOADED, (0, 0, 0, 3))):
        trainer = Trainer(**options)
        assert trainer.step() == [2 - bool(want[3])] * 3
        found = stats(trainer.model)
        counts = found.kept_blocks, found.selective_blocks, found.recomputed_blocks
        assert (*counts, found.offloaded_blocks) == want
        trainer.finish()


# ---- by what is measured -------------------------------------------------------------------------


class DeepBlock(nn.Module):
    """Keeps four tensors of 16 columns, and selectively one, beside what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).sin().sin().sin())


class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DeepBlock() for _ in range(3))


ROWS = 32
ALL = 4 * ROWS * 16 * 4
SOME = ROWS * 16 * 4 + 1024  # what `down` puts out comes in multiples of 512
TIME, REST = 100_000, 10_000  # nanoseconds of recomputing all, and selectively


def choose_by(memories, clocks, stage=3, compiles=""):
    """Return what is chosen where each rank has a memory and a clock of its own."""
    rank, _ = world()
    with pytest.MonkeyPatch.context() as patch, activations_alone(tries=True):
        if not compiles:
            patch.setattr(_activations, "now", Clock(*clocks[rank]))
        trainer = Trainer(
            Deep, checkpoint="auto", memory=memories[rank], stage=stage, compiles=compiles
        )
        runs = trainer.train(6, size=ROWS)
        keeping, figures = engine_of(trainer.model).keeping, stats(trainer.model)
        choice, seen = keeping._choice, trainer.finish()
    assert_same(seen, train_deep(stage, compiles))
    assert figures.kept_activations_bytes == choice.size <= min(memories)
    assert figures.saved_recomputing_ns == choice.nanoseconds
    assert len(keeping._spared) == bool(compiles)  # one kind
    assert all(0.0 <= spared <= 0.5 for spared in keeping._spared.values())
    counts = figures.kept_blocks, figures.selective_blocks, figures.recomputed_blocks
    assert counts[:2] == (len(choice.kept), len(choice.selective)) and sum(counts) == 3
    return choice, runs[:-1], list(keeping._shares.values())


def train_deep(stage, compiles):
    trainer = Trainer(Deep, stage=stage, compiles=compiles)
    trainer.train(6, size=ROWS)
    return trainer.finish()


@on_cpus
@pytest.mark.parametrize(
    ("memory", "kept", "selective"),
    [
        (ALL - 1, (), ()),  # a trial would not fit
        (ALL, (), (1, 2)),  # of equal ones the later
        (3 * SOME, (), (0, 1, 2)),
        (ALL + 2 * SOME, (2,), (0, 1)),
        (3 * ALL, (0, 1, 2), ()),
    ],
)
def test_blocks_select_as_far_as_memory_goes(memory, kept, selective):
    choice, runs, _ = choose_by([memory], [([TIME], [REST])])
    assert (choice.kept, choice.selective) == (kept, selective)
    assert choice.nanoseconds == len(kept) * TIME + len(selective) * (TIME - REST)
    tried = runs[-2:] == [[2, 2, 2]] * 2
    assert tried == (memory < 3 * ALL)  # what fits is kept at once


@on_cpus
def test_a_selection_that_saves_no_time_is_none():
    choice, _, shares = choose_by([ALL + SOME], [([TIME], [TIME])])
    assert (choice.kept, choice.selective) == ((2,), ())
    assert shares == [None]


@on_cpus
@pytest.mark.parametrize("stage", [1, 3])
def test_the_ranks_decide_alike(worlds, stage):
    clocks = ([TIME], [REST]), ([2 * TIME], [5 * REST])  # the slower rank counts
    answers = worlds(2).run(choose_by, [ALL + 2 * SOME, 1 << 30], clocks, stage)
    assert answers[0][0] == answers[1][0]
    assert answers[0][0].selective == (0, 1) and answers[0][0].kept == (2,)
    assert answers[0][0].nanoseconds == 2 * (2 * TIME - 5 * REST) + 2 * TIME


@on_cpus
def test_what_compiled_blocks_save_is_measured():
    torch._dynamo.reset()
    choice, _, (share,) = choose_by([ALL + SOME], [], compiles="after")
    if share is not None:  # by the machine's clock
        assert share.size == 0.5  # of two tensors that compiled code keeps
        assert choice.size == ALL // 4 * len(choice.selective) + ALL // 2 * len(choice.kept)


def test_what_need_not_be_recomputed_is_seen_in_backwards():
    torch._dynamo.reset()
    trainer = Trainer(Deep, checkpoint="auto", memory=1, compiles="after")
    keeping = engine_of(trainer.model).keeping
    first, second, third = keeping.blocks
    (kind,) = set(map(kind_of, keeping.blocks))
    measured = dict.fromkeys(keeping.blocks, Figures(10, 100, 60, 200, 0))
    trial = Trial(keeping.blocks, {kind: second}, 5)
    trial.figures[first] = Figures(10, 0, 0, 184, 0)
    trial.figures[second] = Figures(10, 50, 0, 150, 0)  # selects
    trial.figures[third] = Figures(10, 0, 0, 186, 0)
    assert dict(trial.spared(measured, keeping.blocks)) == {kind: 0.25}
    assert dict(trial.spared(measured, [third])) == {kind: 14 / 60}
    assert dict(trial.spared(measured, [second])) == {}  # not compiled, or it selects
    trial.figures[third] = Figures(5, 0, 0, 20, 0)  # called with less
    assert dict(trial.spared(measured, [third])) == {}
    trial.figures[third] = Figures(10, 0, 0, 300, 0)
    assert dict(trial.spared(measured, [third])) == {kind: 0.0}
    trial.figures[third] = Figures(10, 0, 0, 1, 0)
    assert dict(trial.spared(measured, [third])) == {kind: 0.5}
    for keeping._trial in (None, trial):
        assert first.lies_within(Way.RECOMPUTE) == (keeping._trial is not None)
    keeping._span.grow()
    assert not first.lies_within(Way.RECOMPUTE)  # it is measured by itself
    keeping._figures = measured
    keeping._compiled, keeping._spared = set(keeping.blocks), {kind: 0.25}
    assert keeping._block(first).keep == Offer(100, 45) and keeping._block(first).forward == 60
    assert Share(0.5, 0.9).of(measured[first], 15) == Offer(50, 39)
    keeping._choice, keeping.is_decided = Choice(kept=(2,), nanoseconds=45), True
    assert keeping.gain == 45 + 3 * 15  # one saves all that it took to recompute
    trainer.finish()


@on_cpus
def test_compiled_blocks_are_tried_where_there_is_room_for_none(worlds):
    for choice, _, shares in worlds(2).run(choose_by, [1, ALL], [], compiles="after"):
        assert choice == Choice() and shares == []


@on_cpus
def test_what_compiled_blocks_select_leaves(monkeypatch, caplog):
    all_leave = Choice(offloaded=(0, 1, 2), offloaded_selectively=(1, 2), nanoseconds=TIME)
    monkeypatch.setattr(Ways, "choose", lambda ways, room: all_leave)
    monkeypatch.setattr(_keeping, "measure_link", lambda *_: Link(10**12, 10**12, 1 << 30))
    monkeypatch.setattr(_offload, "_LEAST", 1)
    torch._dynamo.reset()
    want = train_deep(3, "after")
    options = {"checkpoint": "auto", "memory": 1 << 20, "offload": "activations"}
    with activations_alone(tries=True), caplog.at_level(logging.INFO, "penstock"):
        trainer = Trainer(Deep, compiles="after", **options)
        trainer.train(5, size=ROWS)
        assert stats(trainer.model).offload_bytes == 0
        trainer.step(5, size=ROWS)
    # Of two tensors of each block the others recompute one.
    assert stats(trainer.model).offload_bytes == (2 + 1 + 1) * ROWS * 16 * 4
    assert stats(trainer.model).offloaded_blocks == 3
    assert "3 of 3 blocks are offloaded, what is dear to recompute of 2" in caplog.text
    assert_same(trainer.finish(), want)


@on_cpus
def test_what_is_selected_is_logged(caplog):
    with caplog.at_level(logging.INFO, "penstock"):
        choose_by([ALL + 2 * SOME], [([TIME], [REST])])
    told = [message for message in caplog.messages if "activations of" in message]
    assert len(told) == 1
    assert "1 of 3 blocks are kept, and of 2 what is dear to recompute: 14.0 KiB of 14.0" in told[0]
    assert "(blocks.2; selectively blocks.0, blocks.1)" in told[0]


def test_a_model_without_blocks_is_refused():
    with pytest.raises(PenstockError, match="^checkpoint='selective': Linear has no blocks"):
        shard(nn.Linear(3, 3).to(DEVICE), **SELECTIVE)


@on_cpus
def test_a_step_that_grows_is_tried():
    with pytest.MonkeyPatch.context() as patch, activations_alone(tries=True):
        patch.setattr(_activations, "now", Clock([TIME], [REST]))
        trainer = Trainer(Deep, checkpoint="auto", memory=3 * ALL)
        trainer.train(5, size=ROWS)
        assert stats(trainer.model).kept_blocks == 3
        trainer.train(2 * _INTERVAL + STEPS, size=2 * ROWS)
        assert stats(trainer.model).selective_blocks == 3
        trainer.finish()
