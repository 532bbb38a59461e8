"""Activations that leave the device and come back, activations freed early, shards on the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import DEVICE
from penstock import dc


def with_runtime(body: Callable[..., None], *arguments: Any, pinned: bool = True) -> None:
    """Run the body in a runtime of its own."""
    dc.init(
        dist.group.WORLD,
        {"offload_activation_pin_memory": pinned, "free_activation_threshold": 8},
    )
    body(*arguments)
    dc.cleanup()


PINNED = pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])


def there_and_back(tensor: torch.Tensor, graph: int, number: int) -> torch.Tensor:
    host = torch.ops.dc.offload_tensor(tensor, graph, number)
    host = torch.ops.dc.wait_offload(host, graph, number)
    tensor.fill_(-1)  # its memory is free for others
    return torch.ops.dc.wait_reload(torch.ops.dc.reload_tensor(host, graph, number), graph, number)


def move(dtype):
    for step in range(3):
        tensor = (torch.arange(600, device=DEVICE).view(20, 30) % 7 + step).to(dtype)
        kept = tensor.clone()
        back = there_and_back(tensor, 1, 5)
        assert back.device.type == torch.device(DEVICE).type
        assert torch.equal(back, kept)


@PINNED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_an_activation_comes_back_as_it_was(worlds, pinned, dtype):
    worlds(1).run(with_runtime, move, dtype, pinned=pinned)


def move_layouts():
    x = torch.randn(4, 5, 6, device=DEVICE)
    layouts = {
        "transposed": x.clone().transpose(0, 2),
        "cut": x.clone()[:, 1:3],
        "empty": x.clone()[:0],
    }
    for number, (name, tensor) in enumerate(layouts.items()):
        kept = tensor.clone()
        told = torch.ops.dc.offload_tensor(torch.empty_like(tensor, device="meta"), 1, number)
        back = there_and_back(tensor, 1, number)
        assert torch.equal(back, kept), name
        assert back.stride() == told.stride(), name


@PINNED
def test_layouts_are_those_that_the_shape_functions_tell(worlds, pinned):
    worlds(1).run(with_runtime, move_layouts, pinned=pinned)


def move_many():
    places = [(graph, number) for graph in (1, 2) for number in range(20)]
    tensors = {place: torch.randn(100, device=DEVICE) for place in places}
    hosts = {place: torch.ops.dc.offload_tensor(t, *place) for place, t in tensors.items()}
    for place in places:
        torch.ops.dc.wait_offload(hosts[place], *place)
    back = {place: torch.ops.dc.reload_tensor(hosts[place], *place) for place in reversed(places)}
    for place in places:
        got = torch.ops.dc.wait_reload(back[place], *place)
        assert torch.equal(got, tensors[place])


@PINNED
def test_many_are_kept_apart_by_graph_and_number(worlds, pinned):
    worlds(1).run(with_runtime, move_many, pinned=pinned)


def run_forward_twice():
    for order in [(0, 1), (1, 0), (1, 0)]:
        tensors = [torch.randn(100, device=DEVICE) for _ in range(2)]
        kept = [tensor.clone() for tensor in tensors]
        hosts = [torch.ops.dc.offload_tensor(tensor, 1, 7) for tensor in tensors]
        hosts = [torch.ops.dc.wait_offload(host, 1, 7) for host in hosts]
        for tensor in tensors:
            tensor.fill_(-1)
        for i in order:
            back = torch.ops.dc.reload_tensor(hosts[i], 1, 7)
            assert torch.equal(torch.ops.dc.wait_reload(back, 1, 7), kept[i])


@PINNED
def test_a_graph_that_runs_twice_before_its_backward_keeps_both(worlds, pinned):
    worlds(1).run(with_runtime, run_forward_twice, pinned=pinned)


def use_the_same_memory_again():
    addresses = set()
    for _ in range(5):
        host = torch.ops.dc.offload_tensor(torch.randn(100, device=DEVICE), 1, 7)
        addresses.add(torch.ops.dc.wait_offload(host, 1, 7).data_ptr())
    assert len(addresses) <= 2  # `host` still has the last one when the next is stored


def test_the_next_step_takes_no_further_host_memory(worlds):
    worlds(1).run(with_runtime, use_the_same_memory_again)


def outlive():
    dc.init(dist.group.WORLD, {})
    tensor = torch.randn(50, device=DEVICE)
    host = torch.ops.dc.wait_offload(torch.ops.dc.offload_tensor(tensor, 1, 1), 1, 1)
    dc.cleanup()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert host.device.type == "cpu" and torch.equal(host, tensor.cpu())


def test_the_host_tensor_can_be_read_and_outlives_the_runtime(worlds):
    worlds(1).run(outlive)


def ask_for_nothing():
    with pytest.raises(RuntimeError, match=r"^dc::reload_tensor: activation 3 of graph 9 was not"):
        torch.ops.dc.reload_tensor(torch.ones(2, device=DEVICE), 9, 3)


def test_what_was_not_offloaded_is_named(worlds):
    worlds(1).run(with_runtime, ask_for_nothing)


def free_some():
    large, small = torch.ones(9, device=DEVICE), torch.ones(8, device=DEVICE)
    torch.ops.dc.free_tensors([large, small])
    assert large.untyped_storage().nbytes() == 0 and large.shape == (0,)
    assert torch.equal(small, torch.ones(8, device=DEVICE))


def test_activations_above_the_threshold_are_freed(worlds):
    worlds(1).run(with_runtime, free_some)


def train_shards_on_the_host():
    """Reloaded before each gather, as the pass has it; the optimizer writes the host's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = torch.full((10,), float(rank))
    dc.register_z3_param(0, [10 * world], shard, torch.empty(0, device=DEVICE), False)
    dc.register_graph_z3(7, [0])
    for step in range(3):
        torch.ops.dc.reload_parameter(shard, 7, 0)
        whole = torch.ops.dc.allgather_param(shard, 7, 0)
        whole = torch.ops.dc.wait_allgather(whole, 7, 0)
        torch.ops.dc.offload_parameter(shard, 7, 0)
        wanted = torch.arange(world).repeat_interleave(10) + 100.0 * step
        assert torch.equal(whole.cpu(), wanted)
        torch.ops.dc.release_param(whole, 7, 0, 1)
        assert torch.equal(shard, torch.full((10,), rank + 100.0 * step))
        shard.add_(100)


def test_shards_on_the_host_are_gathered_as_they_are_there(worlds):
    worlds(2).run(with_runtime, train_shards_on_the_host)


def train_behind_torch():
    """The optimizer writes as torch does not count it; graphs reload and drop now and then."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = torch.full((10,), float(rank))
    dc.register_z3_param(0, [10 * world], shard, torch.empty(10, device=DEVICE), False)
    dc.register_graph_z3(7, [0])
    for step in range(8):
        if step % 2 == 0:
            torch.ops.dc.reload_parameter(shard, 7, 0)
        whole = torch.ops.dc.wait_allgather(torch.ops.dc.allgather_param(shard, 7, 0), 7, 0)
        assert torch.equal(whole.cpu(), torch.arange(world).repeat_interleave(10) + 100.0 * step)
        torch.ops.dc.release_param(whole, 7, 0, 1)
        if step % 3 == 0:
            torch.ops.dc.offload_parameter(shard, 7, 0)
        dc.start_backward(True)
        dc.end_backward(None, 7, True)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        shard.data.add_(100)


def test_shards_on_the_host_may_be_written_behind_torchs_back(worlds):
    worlds(2).run(with_runtime, train_behind_torch)


def drop_while_used():
    """What is gathered stays, whatever becomes of the shard's copy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = torch.full((10,), float(rank))
    dc.register_z3_param(0, [10 * world], shard, torch.empty(0, device=DEVICE), False)
    dc.register_graph_z3(7, [0])
    torch.ops.dc.reload_parameter(shard, 7, 0)
    torch.ops.dc.offload_parameter(shard, 7, 0)
    torch.ops.dc.reload_parameter(shard, 7, 0)
    whole = torch.ops.dc.allgather_param(shard, 7, 0)
    torch.ops.dc.offload_parameter(shard, 7, 0)
    whole = torch.ops.dc.wait_allgather(whole, 7, 0)
    assert torch.equal(whole.cpu(), torch.arange(world).repeat_interleave(10).float())
    torch.ops.dc.release_param(whole, 7, 0, 1)


def test_a_dropped_shard_leaves_what_is_gathered(worlds):
    worlds(2).run(with_runtime, drop_while_used)
