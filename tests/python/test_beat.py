"""What ranks post of where they are, and what the others say of it."""

import gc
import logging
import os
import re
import signal
import threading
import time
import weakref

import penstock
import pytest
import torch
import torch.distributed as dist
from equality import sgd, world
from models import Net, loss_of, make
from penstock._page import Head
from penstock._roll import Roll
from penstock._standstill import Standstill
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
    return penstock._engine.engine_of(model).world.roll.page.describe()


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


# ---- while torch waits for a GPU ----------------------------------------------------------------


def head_of(roll):
    """Return what a rank's page says, to be written."""
    return Head.from_buffer(memoryview(roll.page))


def launch(roll, lane, name, task, ticket):
    """Put an unfinished task into a page."""
    head = head_of(roll)
    head.lane_count = max(head.lane_count, lane + 1)
    found = head.lanes[lane]
    found.name, found.task, found.ticket = name, task, ticket
    found.since = time.monotonic_ns()


def until(holds):
    """Wait for what comes in a moment."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_rank_stands_still_while_neither_its_program_nor_its_lanes_move():
    roll = Roll(None, 0, 1, 10.0)
    standstill = Standstill(roll.page)
    assert standstill.look() == (0.0, None)
    assert standstill.look()[0] > 0
    roll.page.reach(0, 0, 1, False)
    assert standstill.look()[0] == 0
    launch(roll, 0, b"store", b"copy", 0)
    launch(roll, 1, b"gather", b"a", 7)
    launch(roll, 2, b"reduce", b"b", 8)
    standstill.look()
    seconds, lane = standstill.look()
    assert seconds > 0 and (lane.name, lane.task, lane.ticket) == (b"gather", b"a", 7)
    head_of(roll).lanes[2].ended = 1
    assert standstill.look()[0] == 0


def test_who_waits_in_torch_says_so_in_the_log_and_who_is_missing():
    shared = dist.HashStore()
    first, second, third = (Roll(shared, rank, 3, 4.0) for rank in range(3))
    runtime = penstock._C.Runtime("job", 0, 3, 4.0, torch.device("cpu"), 0, first)
    lines, stop = listen()
    launch(first, 0, b"gather", b"layers.0", 7)
    second.waits(1.0, "gather", 7, [("gather", "layers.0", 7)])
    first.watch(runtime)
    for roll in (first, third):
        roll.follow()
    until(lambda: lines)
    for roll in (first, third):
        roll.stop()
    stop()
    runtime.destroy()
    ((level, text),) = lines
    assert level == logging.WARNING
    assert re.match(r"rank 0 has waited \d s for 'layers.0' \(ticket 7\); rank 2 did not", text)


def test_ranks_that_wait_for_each_other_name_who_has_not_come():
    shared, over = dist.HashStore(), threading.Event()
    first, second, third = (Roll(shared, rank, 3, 4.0) for rank in range(3))
    third.waits(1.0, "gather", 7, [("gather", "layers.0", 7)])  # in a step before
    lines, stop = listen()
    waits = [
        threading.Thread(target=roll.together, args=("comparison", over.wait))
        for roll in (first, second)
    ]
    for wait in waits:
        wait.start()
    until(lambda: len(lines) == 2)
    over.set()
    for wait in waits:
        wait.join()
    stop()
    texts = sorted(text for _, text in lines)
    for rank, text in enumerate(texts):
        told = rf"rank {rank} has waited \d s for the comparison; rank 2 did not come"
        assert re.fullmatch(told, text), text


def fail_beside_a_wait():
    """Rank 1 fails while rank 0 waits for something else; return what rank 0's engine says then."""
    rank, _ = world()
    model = penstock.shard(make(Net), timeout=60)
    engine = penstock._engine.engine_of(model)
    engine.world.roll.watch(engine.runtime)  # as on GPUs
    train(model)
    texts = []

    def is_stopped():
        try:
            engine.native.drain()  # waits for nobody
        except penstock.PenstockError as error:
            texts.append(f"{error.status} {error}")
        return texts

    if rank == 0:
        until(is_stopped)
        store().set("told", "")
    else:
        engine.world.roll.leave("ValueError: boom", is_theirs=False)
        store().wait(["told"])
    penstock.close(model)
    return texts


def test_a_failure_stops_who_waits_for_something_else(fresh_world):
    (text,), _ = fresh_world(2).run(fail_beside_a_wait)
    assert text.startswith("EPEER ")
    assert "rank 1 failed: ValueError: boom, behind the optimizer (step 0)" in text


def test_a_rank_that_has_failed_stays_failed():
    shared = dist.HashStore()
    first, second = (Roll(shared, rank, 2, 4.0) for rank in range(2))
    first.lost("ESYSTEM", "boom")
    first.waits(2.0, "gather", 7, [("gather", "layers.0", 7)])
    found = second.waits(2.0, "gather", 7, [("gather", "layers.0", 7)])
    assert found == "rank 0 failed: boom"


def test_a_runtime_that_has_ended_is_not_stopped():
    roll = Roll(None, 0, 1, 10.0)
    runtime = penstock._C.Runtime("job", 0, 1, 10.0, torch.device("cpu"), 0, roll)
    runtime.destroy()
    runtime.stop("too late")
    assert runtime.recent() == []
