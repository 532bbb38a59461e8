"""Where DeepCompile's shards lie: copy engines read them from there, whatever tensors share it."""

import pytest
import torch
import torch.distributed as dist
from models import DEVICE
from penstock import _operators, dc

GRAPH = 3
CHUNK = 3 << 20  # elements; both shards are large enough to be moved where that is to be done


def whole(number: int, step: int) -> torch.Tensor:
    """Return a parameter as it is after so many steps."""
    ranks = torch.arange(dist.get_world_size(), device=DEVICE).repeat_interleave(CHUNK)
    return ranks + 10.0 * number + 100.0 * step


def train(symmetric: bool) -> None:
    """Two shards are pieces of one tensor, which an optimizer writes through another one."""
    flat = torch.empty(2 * CHUNK, device=DEVICE)
    alias, before = flat.view(2, CHUNK), flat.data_ptr()
    shards = flat.split(CHUNK)
    for number, shard in enumerate(shards):
        shard.fill_(dist.get_rank() + 10.0 * number)
    dc.init(dist.group.WORLD, {"symmetric_memory": symmetric})
    native = _operators.load()
    for number, shard in enumerate(shards):
        shape, buffer = [CHUNK * dist.get_world_size()], torch.empty(CHUNK, device=DEVICE)
        dc.register_z3_param(number, shape, shard, buffer)
    dc.register_graph_z3(GRAPH, [0, 1])
    for step in range(3):
        for number, shard in enumerate(shards):
            gathered = torch.ops.dc.allgather_param.default(shard, GRAPH, number)
            gathered = torch.ops.dc.wait_allgather.default(gathered, GRAPH, number)
            assert torch.equal(gathered, whole(number, step))
            torch.ops.dc.release_param.default(gathered, GRAPH, number, 1)
        dc.start_backward(True)
        dc.end_backward(None, GRAPH, True)
        alias.data.add_(100.0)
        native.step_ends()
    if native.communicator() == "ce":
        assert flat.data_ptr() != before
        assert native.stats()["source_bytes"] == 0
    else:
        assert flat.data_ptr() == before
    assert shards[1].data_ptr() == flat.data_ptr() + 4 * CHUNK == alias[1].data_ptr()
    dc.cleanup()
    assert torch.equal(flat, torch.cat([shards[0], shards[1]]))  # it is still there


def move() -> None:
    """Between steps the shards go elsewhere, as tensors do whose `data` is set."""
    shard = torch.full((CHUNK,), float(dist.get_rank()), device=DEVICE)
    dc.init(dist.group.WORLD, {})
    shape, buffer = [CHUNK * dist.get_world_size()], torch.empty(CHUNK, device=DEVICE)
    dc.register_z3_param(0, shape, shard, buffer)
    dc.register_graph_z3(GRAPH, [0])
    for step in range(4):
        gathered = torch.ops.dc.allgather_param.default(shard, GRAPH, 0)
        gathered = torch.ops.dc.wait_allgather.default(gathered, GRAPH, 0)
        assert torch.equal(gathered, whole(0, step))
        torch.ops.dc.release_param.default(gathered, GRAPH, 0, 1)
        dc.start_backward(True)
        dc.end_backward(None, GRAPH, True)
        shard.data = shard.data + 100.0
    shard.data = torch.empty(0, device=DEVICE)
    with pytest.raises(RuntimeError, match="parameter 0: its shard has 0 elements by now"):
        torch.ops.dc.allgather_param.default(shard, GRAPH, 0)
    dc.cleanup()


def test_shards_may_move_between_steps(worlds):
    worlds(2).run(move)


@pytest.mark.parametrize("symmetric", [False, True])
def test_shards_are_gathered_from_where_the_optimizer_writes(worlds, symmetric):
    worlds(2).run(train, symmetric)
