"""On GPUs: a rank that goes away in mid-step, and which way a trace says that collectives took."""

import json
import os
import signal
import time

import penstock
import pytest
import torch
import torch.distributed as dist
from equality import sgd, world
from models import DEVICE, Net, batch, loss_of, make
from penstock import PenstockError

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda", reason="this is about GPUs: PENSTOCK_TEST_DEVICE=cuda"
)


# ---- a rank that is killed --------------------------------------------------------------------


def train_until_killed(communicator):
    """Train until rank 1 is gone; nothing but a backward's wait looks for it."""
    rank, _ = world()
    model = penstock.shard(make(Net), communicator=communicator, timeout=60.0)
    begin = time.monotonic()
    try:
        for step in range(1000):
            if step == 3 and rank == 1:
                model.blocks[1].register_forward_pre_hook(
                    lambda module, inputs: os.kill(os.getpid(), signal.SIGKILL)
                )
            if step == 3:
                begin = time.monotonic()
            loss_of(model, step, rank).backward()
            torch.cuda.synchronize()
    except PenstockError as error:
        return error.status, str(error), time.monotonic() - begin
    return "OK", "", 0.0


@pytest.mark.parametrize("communicator", ["ce", "crossover"])
def test_a_killed_rank_is_noticed_long_before_the_deadline(fresh_world, communicator):
    answers = fresh_world(2).collect(train_until_killed, communicator)
    assert answers[1] == (False, f"died with exit code -{signal.SIGKILL.value}")
    ok, answer = answers[0]
    assert ok, answer
    status, text, seconds = answer
    assert status == "EPEER", text
    assert "rank 1" in text
    assert seconds < 30, "the deadline was waited for"


# ---- captured steps -----------------------------------------------------------------------------


def step_until_gone(communicator, number):
    """Train by captured steps until rank 1 has got a signal."""
    rank, _ = world()
    pids = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    model = penstock.shard(make(Net), communicator=communicator, timeout=8.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    runs = 0

    @penstock.step(model, optimizer)
    def train(inputs):
        nonlocal runs
        runs += 1
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found, begin = ("OK", ""), time.monotonic()
    try:
        for step in range(1000):
            if step == 12:
                begin = time.monotonic()
                if rank == 1:
                    os.kill(os.getpid(), number)
            train(batch(step, rank)).item()
    except PenstockError as error:
        found = error.status, str(error)
    finally:
        seconds = time.monotonic() - begin
        if rank == 0 and number == signal.SIGSTOP:
            os.kill(pids[1], signal.SIGCONT)
    penstock.close(model)  # nothing on the device is left that waits
    torch.cuda.synchronize()
    return *found, runs, seconds


@pytest.mark.parametrize(
    ("communicator", "number"),
    [("ce", signal.SIGKILL), ("ce", signal.SIGSTOP), ("nccl", signal.SIGSTOP)],
)
def test_a_rank_that_goes_away_in_captured_steps_is_named(fresh_world, communicator, number):
    answers = fresh_world(2).collect(step_until_gone, communicator, number)
    ok, answer = answers[0]
    assert ok, answer
    status, text, runs, seconds = answer
    assert runs < 12, "no step was captured"
    assert status in ("EPEER", "ETIMEDOUT"), text
    assert "rank 1" in text, text
    assert seconds < 40, "the deadline of 8 s was not kept"
    if number == signal.SIGKILL:
        assert answers[1] == (False, f"died with exit code -{number.value}")
    else:
        assert answers[1][0] and answers[1][1][0] != "OK", answers[1]


# ---- the path in a trace ----------------------------------------------------------------------


def paths_of(path):
    """The paths that a trace's slices name."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return {event["args"]["path"] for event in events if "path" in event.get("args", {})}


def trace_a_step(communicator, folder):
    rank, _ = world()
    torch.manual_seed(0)
    wide = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, device=DEVICE) for _ in range(2)))
    found = {}
    for name, model in (("wide", wide), ("narrow", make(Net))):
        sharded = penstock.shard(model, communicator=communicator)
        optimizer = sgd(sharded.parameters())
        with penstock.trace(sharded, os.path.join(folder, f"{name}{{rank}}.json")) as path:
            if name == "wide":
                sharded(torch.ones(4, 2048, device=DEVICE)).sum().backward()
            else:
                loss_of(sharded, 0, rank).backward()
            optimizer.step()
        found[name] = paths_of(path)
        penstock.close(sharded)
    return found


@pytest.mark.parametrize(
    ("communicator", "wide", "narrow"),
    [("ce", {"ce"}, {"ce"}), ("nccl", {"nccl"}, {"nccl"}), ("crossover", {"ce"}, {"nccl"})],
)
def test_a_trace_names_the_way_that_collectives_took(worlds, tmp_path, communicator, wide, narrow):
    for found in worlds(2).run(trace_a_step, communicator, str(tmp_path)):
        assert wide <= found["wide"]
        assert narrow <= found["narrow"]
