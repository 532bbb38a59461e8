"""Copies in the dtype of gathers, kept beside the shards or made for each gather: the same bits."""

import penstock
import pytest
import torch
from equality import whole, world
from models import Checkpointed, Net, Tied, loss_of, make

STEPS = 5


def train(keep_copies, *, kind=Net, in_backward=False, **shard):
    model = penstock.shard(make(kind), param_dtype=torch.bfloat16, keep_copies=keep_copies, **shard)
    optimizer = penstock.AdamW(model, lr=0.01, in_backward=in_backward)
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, number, world()[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model, number, world()[0]))
    values = [whole(parameter).cpu() for parameter in model.parameters()]
    assert ("keep_copies=True" in repr(model)) is keep_copies
    penstock.close(model)
    return [*values, *losses]


def train_both(given):
    for own, other in zip(train(False, **given), train(True, **given), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


CASES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {},
    "tied": {"kind": Tied},
    "checkpointed": {"kind": Checkpointed},
    "far ahead": {"prefetch_ahead": 8},
    "updated in the backward": {"in_backward": True},
    "reduced in float32": {"reduce_dtype": torch.float32},
}


@pytest.mark.parametrize("name", CASES)
def test_copies_of_gathers_are_the_copies_that_stay(worlds, name):
    worlds(2).run(train_both, CASES[name])


def test_one_rank_alone_makes_them_too(worlds):
    worlds(1).run(train_both, {})


def test_whether_copies_stay_is_a_yes_or_no():
    with pytest.raises(penstock.PenstockError, match="keep_copies=0: give True or False"):
        penstock.shard(make(Net), keep_copies=0)
