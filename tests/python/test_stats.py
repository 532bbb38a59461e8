"""Figures of a sharded model, on the CPU and on GPUs."""

from dataclasses import replace

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


def test_figures_are_printed_with_units_and_without_zeros():
    sharded = penstock.shard(make(Net))
    loss_of(sharded, 0, 0)
    figures = replace(penstock.stats(sharded), exposed_ns=2_500_000, arena_peak=3 << 19)
    lines = dict(line.split(maxsplit=1) for line in str(figures).splitlines())
    assert lines["forwards"] == "1" and "backwards" not in lines
    assert lines["exposed_ns"] == "2.500 ms" and lines["arena_peak"] == "1.500 MiB"
    penstock.close(sharded)
