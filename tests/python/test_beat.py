"""What ranks post of where they are, and what the others say of it."""

import gc
import logging
import os
import re
import signal
import time
import weakref

import penstock
import pytest
import torch.distributed as dist
from equality import sgd, world
from models import Net, loss_of, make
from test_processes import listen, store
from torch import nn


class Calls(nn.Module):
    """A block that calls a function in its forward, and another one in its backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.in_forward = self.in_backward = lambda: None

    def forward(self, x):
        self.in_forward()
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.in_backward())
        return x + 1


class Called(Net):
    """A model whose second block calls."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = Calls()


def train(model, steps=1):
    optimizer = sgd(model.parameters())
    for step in range(steps):
        loss_of(model, step, world()[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


def where(model):
    return penstock._engine.engine_of(model).phases.where()[1]


def test_a_place_has_its_step_its_phase_and_its_block():
    model = make(Called)
    calls, seen = model.blocks[1], []
    penstock.shard(model, blocks=[*model.blocks])

    def note(*_):
        seen.append(where(model))

    calls.in_forward = calls.in_backward = note
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(note)
    note()
    for step in range(2):
        loss = loss_of(model, step, 0)
        note()
        loss.backward()
        note()
        optimizer.step()
        note()
    expected = ["before the first forward"]
    for step in range(2):
        expected += [
            f"in 'blocks.1' (step {step}, forward)",
            f"behind the forward (step {step})",
            f"in 'blocks.1' (step {step}, backward)",
            f"behind the backward (step {step})",
            f"in the optimizer (step {step})",
            f"behind the optimizer (step {step})",
        ]
    assert seen == expected
    penstock.close(model)


def test_a_forward_that_fails_stays_where_it_failed():
    model = make(Called)
    calls = model.blocks[1]
    penstock.shard(model, blocks=[*model.blocks])

    def fail():
        raise ValueError("boom")

    calls.in_forward = fail
    with pytest.raises(ValueError, match="boom"):
        loss_of(model, 0, 0)
    assert where(model) == "in 'blocks.1' (step 0, forward)"
    penstock.close(model)


def drop_a_model():
    """Return whether the beat keeps a model that nobody has any more."""
    model = make(Net)
    penstock.shard(model)
    train(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is not None


def test_a_beat_keeps_no_model(worlds):
    assert worlds(2).run(drop_a_model) == [False, False]


# ---- what the others say ------------------------------------------------------------------------


def fail_in_a_step(phase, number):
    """Have the last rank stay in a block, or get a signal there; return what this rank says."""
    rank, size = world()
    pids = [0] * size
    dist.all_gather_object(pids, os.getpid())
    model = make(Called)
    calls = model.blocks[1]
    penstock.shard(model, timeout=8, blocks=[*model.blocks])
    train(model, 2)
    lines, stop = listen()

    def fail():
        if number:
            os.kill(os.getpid(), number)  # before the next beat
        else:
            time.sleep(5.5)

    if rank == size - 1:
        setattr(calls, f"in_{phase}", fail)
    try:
        train(model)
    except penstock.PenstockError as error:
        lines.append((logging.ERROR, str(error)))
    stop()
    if number == signal.SIGSTOP and rank < size - 1:
        store().set(f"gave up {rank}", "")
        store().wait([f"gave up {other}" for other in range(size - 1)])
        os.kill(pids[-1], signal.SIGCONT)
    penstock.close(model)
    return [text for _, text in lines]


def told(world, *arguments):
    """Return what the ranks say of the last one that fails."""
    return [text for _, text in world.collect(fail_in_a_step, *arguments)[:-1]]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_who_waits_says_where_the_late_rank_is_and_since_when(fresh_world, phase):
    late = rf"; rank 2 did not come: in 'blocks.1' \(step 2, {phase}\) since \d s"
    others = rf"; ranks 0, 1 wait (in|behind) [^;]*\(step 2, {phase}\)"
    for rank, lines in enumerate(told(fresh_world(3), phase, 0)):
        text = next(line for line in lines if f"rank {rank} has waited" in line)
        assert re.search(late, text), text
        assert re.search(others, text), text


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "has ended")]
)
def test_the_error_says_where_a_stopped_or_killed_rank_was(fresh_world, phase, number, state):
    place = rf"last heard of in 'blocks.1' \(step 2, {phase}\)"
    for lines in told(fresh_world(3), phase, number):
        assert re.search(rf"the process of rank 2 \(\d+\) {state}, {place}", lines[-1]), lines
