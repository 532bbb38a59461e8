"""CUDA graphs: the hooks of a sharded model are not captured, what lies outside of it can be."""

import penstock
import pytest
import torch
from equality import TOLERANCE, assert_same_parameters, sgd, world
from models import DEVICE, Net, batch, loss_of, make

on_gpus = pytest.mark.skipif(
    DEVICE != "cuda", reason="CUDA graphs want a GPU: PENSTOCK_TEST_DEVICE=cuda"
)


def capture(sharded, whole):
    """Try to capture the model, or one block of it, and see that it says what to do."""
    inputs = batch(0, 0) if whole else torch.ones(2, 7, device=DEVICE)
    called = sharded if whole else sharded.blocks[0]
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(penstock.PenstockError, match=r"under CUDA-graph capture.*capture what"),
        torch.cuda.graph(graph),
    ):
        called(inputs)


def train_around_a_capture(whole):
    rank, size = world()
    reference, sharded = make(Net), penstock.shard(make(Net))
    optimizers = [sgd(model.parameters()) for model in (reference, sharded)]
    scaled = torch.zeros(4, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    for step in range(3):
        loss_of(sharded, step, rank).backward()
        capture(sharded, whole)
        if step == 0:
            with torch.cuda.graph(graph):
                scaled += 1
        graph.replay()
        (sum(loss_of(reference, step, r) for r in range(size)) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert scaled.tolist() == [3.0] * 4
    assert_same_parameters(sharded, reference, TOLERANCE)
    penstock.close(sharded)


@on_gpus
@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
def test_hooks_refuse_a_capture_and_go_on_after_it(worlds, whole):
    worlds(2).run(train_around_a_capture, whole)
