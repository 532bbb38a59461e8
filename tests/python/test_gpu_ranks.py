"""On GPUs: a rank that is killed in mid-step, and which way a trace says that collectives took."""

import json
import os
import signal
import time

import penstock
import pytest
import torch
from equality import sgd, world
from models import DEVICE, Net, loss_of, make
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
