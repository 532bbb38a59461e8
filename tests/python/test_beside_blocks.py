"""Modules beside the blocks are gathered each by itself, whatever the model does with them."""

import models
import penstock
import pytest
import torch
from equality import sgd, train_both, world
from models import Net, loss_of, make
from penstock._blocks import find_beside, find_blocks
from torch import nn

READERS = [
    models.LookedUp,
    models.ReadAndCalled,
    models.ReadAlone,
    models.ReadFrozen,
    models.ReadInCheckpoint,
    models.ReadInCheckpointReentrant,
]


def names(model, blocks=None):
    return [name for name, _ in find_beside(model, find_blocks(model, blocks))]


def test_what_is_large_beside_the_blocks_is_found():
    assert names(make(Net)) == ["embed", "norm", "head"]
    assert names(make(Net), ["blocks.*", "head"]) == ["embed", "norm"]


def test_what_is_small_stays_with_the_model():
    model = Net()
    model.blocks = nn.ModuleList([nn.Linear(100, 100), nn.Linear(80, 80)])  # 6,480 and more
    model.head = nn.Linear(16, 3)  # 51
    assert names(model) == []
    model.head = nn.Linear(16, 4)  # 68
    assert names(model) == ["head"]


def test_a_model_around_another_is_searched_too():
    outer = nn.Module()
    outer.inner = make(Net)
    outer.head = nn.Linear(9, 9)
    assert names(outer) == ["inner.embed", "inner.norm", "inner.head", "head"]


def test_without_blocks_nothing_is_beside_them():
    assert names(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))) == []


def train_and_close(kind, **options):
    penstock.close(train_both(kind, steps=5, **options))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_what_the_model_reads_of_them_itself_is_whole(worlds, kind, stage):
    worlds(2).run(train_and_close, kind, stage=stage)


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_the_same_on_one_rank(kind):
    train_and_close(kind)


def train_compiled(kind):
    reference, sharded = make(kind), penstock.shard(make(kind))
    compiled = torch.compile(sharded, backend="aot_eager")
    twins = sgd(reference.parameters()), sgd(sharded.parameters())
    for step in range(3):
        losses = [loss_of(model, step, 0) for model in (reference, compiled)]
        for loss in losses:
            loss.backward()
        assert abs(losses[0].item() - losses[1].item()) <= 1e-5 * abs(losses[0].item())
        for each in twins:
            each.step()
            each.zero_grad()
    penstock.close(sharded)


@pytest.mark.parametrize("kind", READERS[1:3], ids=lambda kind: kind.__name__)
def test_a_compiled_model_may_read_them_too(kind):
    train_compiled(kind)


def backward_gathers(kind):
    model = penstock.shard(make(kind))
    for step in range(3):
        loss_of(model, step, world()[0]).backward()
    operations = penstock.get_recorded_ops(model)
    penstock.close(model)
    return [op.group for op in operations if op.kind == "gather" and op.backward]


def test_an_embedding_that_is_looked_up_is_not_gathered_in_a_backward(worlds):
    for gathered in worlds(2).run(backward_gathers, models.LookedUp):
        assert gathered == ["head", "norm", "blocks.2", "blocks.1", "blocks.0"]
    for gathered in worlds(2).run(backward_gathers, models.ReadAndCalled):
        assert gathered[0] == "embed"
