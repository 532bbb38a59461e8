"""Models with collectives of their own, over groups that an engine does not know."""

import ctypes
from functools import cache

import penstock
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"
from equality import train_both
from models import DEVICE, Net, loss_of
from penstock._world import World

KERNEL = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n"


@cache
def own_group():
    """All ranks."""
    return dist.new_group()


def load_a_kernel():
    """The driver waits until the device has done all that was launched, and nothing is launched."""
    if DEVICE == "cuda":
        module = ctypes.c_void_p()
        assert ctypes.CDLL("libcuda.so.1").cuModuleLoadData(ctypes.byref(module), KERNEL) == 0


class Mean(torch.autograd.Function):
    """Of what the ranks have, of values and of gradients."""

    @staticmethod
    def forward(ctx, x):
        return mean_of(x)

    @staticmethod
    def backward(ctx, gradient):
        return mean_of(gradient)


def mean_of(x):
    x = x.clone()
    load_a_kernel()
    dist.all_reduce(x, group=own_group())
    load_a_kernel()
    return x / own_group().size()


class Meeting(Net):
    """Ranks meet behind each block."""

    def __init__(self):
        super().__init__(blocks=16)

    def run_blocks(self, x, rank):
        for block in self.blocks:
            x = Mean.apply(block(x))
        return x


def train_meeting(stage):
    group = own_group()
    penstock.close(
        train_both(
            Meeting,
            steps=8,
            loss=lambda model, step, rank: loss_of(model, step, 0),
            stage=stage,
            bucket_bytes=256,
        )
    )
    dist.destroy_process_group(group)  # the ranks stay, and so would it
    own_group.cache_clear()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_models_own_collectives_come_between_those_of_the_engine(worlds, stage):
    worlds(2).run(train_meeting, stage)


def what_is_beside():
    """Of a first engine, beside a group of the host, on another one of GPUs, and beside that."""

    def is_beside_others(group=None):
        found = World(group, torch.device(DEVICE), 60.0)
        found.close()
        return found.is_beside_others

    answers = [is_beside_others()]
    dist.new_group(backend="gloo")
    answers.append(is_beside_others())
    own = dist.new_group(backend="nccl" if DEVICE == "cuda" else "fake")
    return [*answers, is_beside_others(own), is_beside_others()]


def test_an_engine_knows_of_other_groups_that_launch_on_gpus(fresh_world):
    answers = fresh_world(2).run(what_is_beside)
    assert answers == [[False, False, False, True]] * 2
