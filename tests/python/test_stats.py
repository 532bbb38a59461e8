"""Figures of a sharded model, on the CPU and on GPUs."""

import penstock
import pytest
import torch
from equality import world
from models import DEVICE, Net, loss_of, make


def time_waits(wanted):
    rank, _ = world()
    sharded = penstock.shard(make(Net), time_waits=wanted)
    for step in range(4):
        loss_of(sharded, step, rank).backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    figures = penstock.stats(sharded, reset=True)
    again = penstock.stats(sharded)
    penstock.close(sharded)
    return figures, again


@pytest.mark.parametrize("wanted", [False, True], ids=["not asked", "asked"])
def test_the_stream_that_computes_is_timed_on_gpus_if_asked(worlds, wanted):
    for figures, again in worlds(2).run(time_waits, wanted):
        is_timed = wanted and DEVICE == "cuda"
        assert (figures.timed_waits > 0) == is_timed
        assert (figures.device_gather_ns > 0) == is_timed
        assert (figures.device_reduce_ns > 0) == is_timed
        assert figures.untimed_waits == 0
        if DEVICE != "cuda":
            assert figures.exposed_ns > 0
        assert again.timed_waits == again.device_gather_ns == again.device_reduce_ns == 0
