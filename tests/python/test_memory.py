"""On GPUs the memory of an engine is torch's: its figures count it, and closing gives it back."""

import gc
from unittest.mock import Mock

import penstock
import pytest
import torch
from equality import sgd, whole, world
from models import DEVICE, Net, loss_of, make
from penstock._memory import Lasting, segment_maker, set_apart
from penstock._world import local_of

on_gpus = pytest.mark.skipif(
    DEVICE != "cuda",
    reason="engines take memory from torch on GPUs only: PENSTOCK_TEST_DEVICE=cuda",
)


def settle():
    """Forget what nobody uses any more, and return what torch counts."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def train_and_close(stage, communicator):
    rank, _ = world()
    before = settle()
    sharded = penstock.shard(make(Net), stage=stage, communicator=communicator)
    optimizer = sgd(sharded.parameters())
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        loss_of(sharded, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    figures = penstock.stats(sharded)
    arena = figures.arena_reserved + figures.places_reserved  # where what is gathered lies
    assert arena > 0
    assert torch.cuda.memory_allocated() >= before[0] + arena
    assert torch.cuda.memory_reserved() >= before[1] + arena
    assert torch.cuda.max_memory_allocated() >= before[0] + arena
    penstock.close(sharded)
    del sharded, optimizer
    return before, settle()


def count_memory(stage, communicator):
    train_and_close(stage, communicator)  # what torch keeps for good
    before, after = train_and_close(stage, communicator)
    assert after == before


@on_gpus
@pytest.mark.parametrize("communicator", ["ce", "nccl"])
@pytest.mark.parametrize("stage", [1, 3])
def test_torch_counts_what_an_engine_has(worlds, stage, communicator):
    worlds(2).run(count_memory, stage, communicator)


MIB = 1 << 20
MARGIN = 64 * MIB


def open_and_close(communicator):
    """Return what the driver has free once peers map nothing of this GPU any more."""
    sharded = penstock.shard(torch.nn.Linear(64, 64, device=DEVICE), communicator=communicator)
    sharded(torch.ones(2, 64, device=DEVICE)).sum().backward()
    penstock.close(sharded)
    del sharded
    settle()
    torch.distributed.all_reduce(torch.zeros(1))
    return torch.cuda.mem_get_info()[0]


def lose_memory(communicator):
    """What the first engine leaves is the library's for good; a leak is what each one leaves.

    Other processes on the GPU may take memory meanwhile, but hardly between all of these engines.
    """
    free = [open_and_close(communicator) for _ in range(6)]
    lost = [before - after for before, after in zip(free, free[1:], strict=False)]
    print(f"{communicator}: MiB free behind each engine: {[size >> 20 for size in free]}")
    assert min(lost) < MARGIN, f"each engine leaves memory with the driver: {lost} bytes"


@on_gpus
@pytest.mark.parametrize("communicator", ["ce", "nccl", "crossover"])
def test_engines_one_after_the_other_leave_nothing_with_the_driver(worlds, communicator):
    worlds(2).run(lose_memory, communicator, answer_within=180)


def run_out_of_memory():
    """A segment that does not fit first frees what torch has cached."""
    model = torch.nn.Linear(1 << 15, 1 << 15, bias=False, device=DEVICE)  # 4 GiB
    sharded = penstock.shard(model)
    settle()
    free, _ = torch.cuda.mem_get_info()
    hoard = torch.empty(free - (1 << 30), dtype=torch.uint8, device=DEVICE)
    del hoard  # torch keeps it, and the driver has next to nothing left
    sharded(torch.ones(1, 1 << 15, device=DEVICE)).sum().backward()
    penstock.close(sharded)


@on_gpus
def test_a_segment_makes_torch_free_its_cache(worlds):
    worlds(2).run(run_out_of_memory)


def drop_a_segment():
    make_segment = segment_maker(torch.device(DEVICE, torch.cuda.current_device()))
    _, before = settle()
    segments = [make_segment(32 * MIB), make_segment(64 * MIB)]
    assert settle()[1] == before + 96 * MIB
    del segments[1]
    assert settle()[1] == before + 32 * MIB


@on_gpus
def test_a_segment_that_is_dropped_goes_back_to_the_device(worlds):
    worlds(1).run(drop_a_segment)


def step_amid_activations():
    """The moments, of 4 MiB, would fit into what the activation has left."""
    parameter = torch.nn.Parameter(torch.zeros(MIB, device=DEVICE))
    parameter.grad = torch.ones_like(parameter)
    optimizer = penstock.AdamW([parameter])
    _, before = settle()
    activation = torch.empty(512 * MIB, dtype=torch.uint8, device=DEVICE)
    del activation
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].nbytes == 4 * MIB
    assert before < settle()[1] < before + 512 * MIB


@on_gpus
def test_states_of_adamw_lie_apart_from_activations(worlds):
    worlds(1).run(step_amid_activations)


def segment_of(tensor):
    """Return how many bytes the segment has that a tensor lies in."""
    place = local_of(tensor).data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if 0 <= place - segment["address"] < segment["total_size"]:
            return segment["total_size"]
    raise AssertionError(f"no segment has {place:#x}")


def capture_with_adamw_of_torch():
    """Its states are made amid a step, of which others are captured later, for two shapes."""
    model, reference = (torch.nn.Linear(1024, 1024, bias=False, device=DEVICE) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    penstock.shard(model)
    optimizers = [torch.optim.AdamW(m.parameters(), capturable=True) for m in (model, reference)]

    def train(model, optimizer, inputs):
        activation = torch.empty(512 * MIB, dtype=torch.uint8, device=DEVICE)
        del activation
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    @penstock.step(model, optimizers[0])
    def step(inputs):
        train(model, optimizers[0], inputs)

    batches = [torch.rand(rows, 1024, device=DEVICE) for rows in (8, 16)] * 8
    for inputs in batches:
        step(inputs)
        train(reference, optimizers[1], inputs)
    torch.cuda.synchronize()
    assert penstock.stats(model).timed_graphs > 1
    ((parameter, state),) = optimizers[0].state.items()
    assert local_of(state["exp_avg"]).nbytes == 4 * MIB
    assert segment_of(state["exp_avg"]) < 512 * MIB
    assert segment_of(state["exp_avg_sq"]) < 512 * MIB
    assert torch.allclose(whole(parameter), reference.weight, atol=1e-4)
    penstock.close(model)


@on_gpus
def test_states_of_torchs_optimizers_leave_them_before_a_capture(worlds):
    worlds(1).run(capture_with_adamw_of_torch)


def places_of(tensor, calls=2):
    """Return where a tensor lies behind each of some calls."""
    places = []
    for _ in range(calls):
        set_apart([tensor, torch.rand(8)])
        places.append(tensor.data_ptr())
    return places


def test_a_tensor_is_set_apart_once_and_for_all_that_hold_it():
    tensor = torch.rand(MIB)
    values, before = tensor.clone(), tensor.data_ptr()
    first, second = places_of(tensor)
    assert first == second != before
    assert torch.equal(tensor, values)


def test_a_tensor_that_found_no_memory_stays_for_good(monkeypatch):
    """A graph that is captured behind the first call knows where it lies."""
    tensor = torch.rand(MIB)
    before = tensor.data_ptr()
    with monkeypatch.context() as patched:
        patched.setattr(Lasting, "make", Mock(side_effect=torch.OutOfMemoryError))
        assert places_of(tensor, calls=1) == [before]
    assert places_of(tensor) == [before, before]


def look_at_shards(communicator, stage):
    rank, _ = world()
    sharded = penstock.shard(make(Net), communicator=communicator, stage=stage)
    reserved = penstock.stats(sharded).places_reserved
    assert (reserved > 0) == (communicator == "ce")
    for step in range(3):
        loss_of(sharded, step, rank).backward()
    before = [whole(parameter).clone() for parameter in sharded.parameters()]
    penstock.close(sharded)
    gc.collect()
    torch.cuda.empty_cache()
    for parameter, value in zip(sharded.parameters(), before, strict=True):
        assert torch.equal(whole(parameter), value)
        assert local_of(parameter).untyped_storage().nbytes() < reserved or communicator != "ce"


@on_gpus
@pytest.mark.parametrize(("communicator", "stage"), [("ce", 2), ("ce", 3), ("nccl", 3)])
def test_shards_outlive_their_engine(worlds, communicator, stage):
    worlds(2).run(look_at_shards, communicator, stage)
