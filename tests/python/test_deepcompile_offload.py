"""Activations that leave the device and come back, and activations freed early."""

import pytest
import torch
from models import DEVICE
from penstock import dc


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def runtime(request):
    dc.init(None, {"offload_activation_pin_memory": request.param, "free_activation_threshold": 8})
    yield
    dc.cleanup()


def there_and_back(tensor: torch.Tensor, graph: int, number: int) -> torch.Tensor:
    host = torch.ops.dc.offload_tensor(tensor, graph, number)
    host = torch.ops.dc.wait_offload(host, graph, number)
    tensor.fill_(-1)  # its memory is free for others
    return torch.ops.dc.wait_reload(torch.ops.dc.reload_tensor(host, graph, number), graph, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_an_activation_comes_back_as_it_was(runtime, dtype):
    for step in range(3):
        tensor = (torch.arange(600, device=DEVICE).view(20, 30) % 7 + step).to(dtype)
        kept = tensor.clone()
        back = there_and_back(tensor, 1, 5)
        assert back.device.type == torch.device(DEVICE).type
        assert torch.equal(back, kept)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2),
    "cut": lambda x: x[:, 1:3],
    "broadcast": lambda x: x[:1].expand(4, -1, -1).clone().expand(4, -1, -1),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_are_those_that_the_shape_functions_tell(runtime, layout):
    tensor = layout(torch.randn(4, 5, 6, device=DEVICE))
    kept = tensor.clone()
    told = torch.ops.dc.offload_tensor(torch.empty_like(tensor, device="meta"), 1, 2)
    back = there_and_back(tensor, 1, 2)
    assert torch.equal(back, kept)
    assert back.stride() == told.stride()


def test_many_are_kept_apart_by_graph_and_number(runtime):
    places = [(graph, number) for graph in (1, 2) for number in range(20)]
    tensors = {place: torch.randn(100, device=DEVICE) for place in places}
    hosts = {place: torch.ops.dc.offload_tensor(t, *place) for place, t in tensors.items()}
    for place in places:
        torch.ops.dc.wait_offload(hosts[place], *place)
    back = {place: torch.ops.dc.reload_tensor(hosts[place], *place) for place in reversed(places)}
    for place in places:
        got = torch.ops.dc.wait_reload(back[place], *place)
        assert torch.equal(got, tensors[place])


def test_the_host_tensor_can_be_read_and_outlives_the_runtime():
    dc.init(None, {})
    tensor = torch.randn(50, device=DEVICE)
    host = torch.ops.dc.wait_offload(torch.ops.dc.offload_tensor(tensor, 1, 1), 1, 1)
    dc.cleanup()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert host.device.type == "cpu" and torch.equal(host, tensor.cpu())


def test_what_was_not_offloaded_is_named(runtime):
    with pytest.raises(RuntimeError, match=r"^dc::reload_tensor: activation 3 of graph 9 was not"):
        torch.ops.dc.reload_tensor(torch.ones(2, device=DEVICE), 9, 3)


def test_activations_above_the_threshold_are_freed(runtime):
    large, small = torch.ones(9, device=DEVICE), torch.ones(8, device=DEVICE)
    torch.ops.dc.free_tensors([large, small])
    assert large.untyped_storage().nbytes() == 0 and large.shape == (0,)
    assert torch.equal(small, torch.ones(8, device=DEVICE))
