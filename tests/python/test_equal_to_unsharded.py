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
    models.OnOneRank,
    models.Checkpointed,
    models.CheckpointedReentrant,
    models.CheckpointedInside,
    models.CheckpointedInsideReentrant,
    models.CheckpointedPairs,
    models.CheckpointedPairsReentrant,
    models.Reparametrized,
    models.NestedValues,
    models.Mixed,
]


def train_and_close(kind, **options):
    penstock.close(train_both(kind, **options))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_training_equals_unsharded(worlds, kind, stage, ranks):
    worlds(ranks).run(train_and_close, kind, stage=stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_rank_without_process_group_equals_unsharded(kind, stage):
    train_and_close(kind, stage=stage)
