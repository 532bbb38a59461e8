"""Sharded training equals unsharded training: every stage, several ranks, all kinds of models."""

import models
import penstock
import pytest
from equality import train_both

KINDS = [
    models.Net,
    models.Tied,
    models.Frozen,
    models.FrozenBetween,
    models.Twice,
    models.Unused,
    models.ChangedInPlace,
    models.FrozenChangedInPlace,
    models.OnOneRank,
    models.Checkpointed,
    models.CheckpointedReentrant,
    models.CheckpointedInside,
    models.CheckpointedInsideReentrant,
    models.CheckpointedPairs,
    models.CheckpointedPairsReentrant,
    models.Reparametrized,
    models.NestedValues,
    models.Dataclasses,
    models.Mixed,
]


# What a forward may do beside calling its blocks. The first one's loss uses what it returns.
ODD_FORWARDS = [
    models.GivenAway,
    models.ViewsChangedInPlace,
    models.GradientInside,
    models.TiedReentrant,
]


def train_and_close(kind, **options):
    penstock.close(train_both(kind, **options))


def loss_with_gain(model, step, rank):
    out, gain = model(models.batch(step, rank), rank)
    return (out * gain).square().mean()


def train_odd_forwards(stage):
    for kind in ODD_FORWARDS:
        loss = loss_with_gain if kind is models.GivenAway else models.loss_of
        train_and_close(kind, stage=stage, loss=loss)


# Every kind, stage and number of ranks. On GPUs, where each makes communicators anew, the kinds
# that differ in what runs there: all at stage 3, which gathers and reduces everything, the plainest
# and those with the oddest reductions at the other stages.
if models.DEVICE == "cuda":
    odd = [models.Net, models.Tied, models.OnOneRank, models.Mixed]
    CASES = [(kind, 3, 4) for kind in KINDS] + [
        (kind, stage, 4) for kind in odd for stage in (1, 2)
    ]
    CASES += [(models.Net, 3, 2)]
    ALONE = [models.Net]
else:
    CASES = [(kind, stage, ranks) for kind in KINDS for stage in (1, 2, 3) for ranks in (2, 4)]
    ALONE = KINDS


def name_of(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("kind", "stage", "ranks"), CASES, ids=name_of)
def test_training_equals_unsharded(worlds, kind, stage, ranks):
    worlds(ranks).run(train_and_close, kind, stage=stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_odd_forwards_equal_unsharded(worlds, stage):
    worlds(2).run(train_odd_forwards, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ALONE, ids=name_of)
def test_one_rank_without_process_group_equals_unsharded(kind, stage):
    train_and_close(kind, stage=stage)
