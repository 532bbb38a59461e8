"""Embeddings of which a forward looks up few rows: the same training, and less that travels."""

import models
import penstock
import pytest
import torch
from equality import train_both
from models import make
from penstock._engine import engine_of
from penstock._units import Unit
from torch import nn

ROWS = 200_000  # so that ranks push its gradient


class Words(models.LookedUp):
    """A large embedding in front of the blocks, and a small one of positions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, models.WIDTH, padding_idx=3)
        self.places = nn.Embedding(64, models.WIDTH)

    def words(self, x):
        return ((x * 997).long() * 31) % ROWS

    def look_up(self, x):
        words = self.words(x)
        places = torch.arange(words.shape[1], device=words.device)
        return (self.embed(words) + self.places(places)).mean(dim=1)


class Twice(Words):
    def look_up(self, x):
        return super().look_up(x) + self.embed(input=self.words(x + 1).int()).sum(dim=1)


class Many(Words):
    """So many that all rows are gathered."""

    def words(self, x):
        return super().words(x).repeat(1, ROWS // 32)

    def look_up(self, x):
        return self.embed(self.words(x)).mean(dim=1) + self.places(self.words(x) % 64).mean(dim=1)


class Scored(Words):
    """The model reads all rows, too."""

    def forward(self, x, rank=0):
        x = self.norm(self.run_blocks(self.look_up(x), rank))
        return x @ self.embed.weight[1000:1010].T


class FrozenWords(Words):
    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)


class Recomputed(Words):
    def look_up(self, x):
        return torch.utils.checkpoint.checkpoint(super().look_up, x, use_reentrant=False)


KINDS = [Words, Twice, Many, Scored, FrozenWords, Recomputed]


def evaluate(model):
    with torch.no_grad():
        models.loss_of(model, 99, 0)


def train_and_close(kind, stage):
    options = {} if kind is not Many else {"tolerance": 1e-4}
    penstock.close(train_both(kind, steps=4, stage=stage, between=evaluate, **options))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_training_is_that_of_the_whole_model(worlds, kind, stage):
    worlds(2).run(train_and_close, kind, stage)


def count_gathered(kind, stage):
    model = penstock.shard(make(kind), stage=stage)
    whole = ROWS * models.WIDTH * 4
    before = penstock.stats(model).gather_bytes
    for step in range(3):
        models.loss_of(model, step, 0).backward()
        model.zero_grad()
    gathered = penstock.stats(model).gather_bytes - before
    by_rows = penstock.stats(model).communicator == "ce"
    penstock.close(model)
    return gathered < whole, by_rows


@pytest.mark.parametrize("stage", [2, 3])
def test_rows_alone_travel_where_peers_read_them(worlds, stage):
    for is_less, by_rows in worlds(2).run(count_gathered, Words, stage):
        assert is_less == by_rows
    for is_less, _ in worlds(2).run(count_gathered, Many, stage):
        assert not is_less


# ---- what a forward names ------------------------------------------------------------------------


def rows_named(model, monkeypatch):
    """Return what holding the embedding has named in a forward of the model."""
    named = []
    hold = Unit.hold

    def note(unit, rows=None):
        if unit.name == "embed":
            named.append(rows)
        hold(unit, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Unit, "hold", note)
        models.loss_of(model, 0, 0)
    return named


def unchanged(model):
    pass


def hook_before(model):
    model.embed.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hook_behind(model):
    model.embed.register_forward_hook(lambda module, args, output: output * 2)


def replace_forward(model):
    forward = model.embed.forward
    model.embed.forward = lambda words: forward((words + 1) % ROWS)


@pytest.mark.parametrize(
    ("kind", "change", "names"),
    [
        (Words, unchanged, [True]),
        (Twice, unchanged, [True, True]),
        (Many, unchanged, [False]),
        (Words, hook_before, [False]),
        (Words, hook_behind, [False]),
        (Words, replace_forward, [False]),
        (Scored, unchanged, [True, False]),
    ],
)
def test_a_forward_names_its_rows_where_nobody_else_reads_any(monkeypatch, kind, change, names):
    model = penstock.shard(make(kind))
    change(model)
    named = rows_named(model, monkeypatch)
    assert [rows is not None for rows in named] == names
    words = model.words(models.batch(0, 0))
    assert not names[0] or torch.equal(named[0], words)
    assert all(rows is None or rows.dtype == torch.int64 for rows in named)
    penstock.close(model)


class Shared(Words):
    def __init__(self):
        super().__init__()
        self.again = nn.Embedding(ROWS, models.WIDTH)
        self.again.weight = self.embed.weight


class Cut(Words):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, models.WIDTH, max_norm=1.0)


class Own(Words):
    class Scaled(nn.Embedding):
        def forward(self, words):
            return super().forward(words) * self.weight.norm()

    def __init__(self):
        super().__init__()
        self.embed = self.Scaled(ROWS, models.WIDTH)


@pytest.mark.parametrize(
    ("kind", "is_table"), [(Words, True), (Shared, False), (Cut, False), (Own, False)]
)
def test_what_else_may_read_all_of_it_is_no_table(kind, is_table):
    model = penstock.shard(make(kind))
    units = {unit.name: unit for unit in engine_of(model).units}
    assert units.get("embed") is None or units["embed"].is_table == is_table
    assert (units.get("embed") is not None) or not is_table
    penstock.close(model)
