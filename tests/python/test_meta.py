"""Models that are sharded on the meta device, and get their values afterwards."""

import penstock
import pytest
import torch
import torch.distributed as dist
from equality import accumulate_reference, assert_same_gradients, assert_same_parameters, world
from models import DEVICE, Net, Tied, loss_of, make
from penstock import PenstockError
from penstock._world import local_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


class Buffered(Net):
    """Buffers that are saved and one that is not, which its parameters' initialisation sets."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.full((5,), 0.25))
        self.register_buffer("gain", torch.full((), 2.0), persistent=False)

    def forward(self, x, rank=0):
        return super().forward(x * self.gain + self.shift, rank)


def on_meta(kind):
    with torch.device("meta"):
        return kind()


def refuses(status, text, function, *args, **kwargs):
    with pytest.raises(PenstockError, match=text) as caught:
        function(*args, **kwargs)
    assert caught.value.status == status


def initialise(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def both_optimizers(parameters):
    parameters = list(parameters)
    return (
        torch.optim.AdamW(parameters[::2], lr=1e-2),
        penstock.AdamW(parameters[1::2], lr=1e-2),
    )


def train_as_reference(model, optimizers, kind, steps=3):
    """Compare with an unsharded model that begins with the values that `make` gives it."""
    rank, _ = world()
    reference = make(kind)
    reference_optimizers = both_optimizers(reference.parameters())
    for step in range(steps):
        losses = accumulate_reference(reference, step)
        value = loss_of(model, step, rank)
        value.backward()
        assert value.item() == pytest.approx(losses[rank], rel=1e-5)
        assert_same_gradients(model, reference, 1e-5)
        for optimizer in (*optimizers, *reference_optimizers):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, 1e-5)


# ---- values --------------------------------------------------------------------------------------


def load_later(kind, stage):
    model = penstock.shard(on_meta(kind), stage=stage, device=DEVICE)
    optimizers = both_optimizers(model.parameters())
    before = list(model.parameters())
    addresses = [local_of(p).data_ptr() for p in before]
    refuses("ESTATE", "'embed.weight' of .* has no values yet, and ", loss_of, model, 0, 0)
    assert model.to_empty(device=DEVICE) is model
    refuses("ESTATE", "'embed.weight' of .* has no values yet, and ", loss_of, model, 0, 0)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert [local_of(p).data_ptr() for p in model.parameters()] == addresses
    model.load_state_dict(make(kind).state_dict())
    if kind is Buffered:
        model.gain.fill_(2.0)
    train_as_reference(model, optimizers, kind)
    penstock.close(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [Buffered, Tied])
def test_a_model_without_values_trains_once_it_has_some(worlds, kind, stage):
    worlds(2).run(load_later, kind, stage)


def test_a_model_of_one_process_trains_once_it_has_values():
    load_later(Buffered, 3)


def initialise_by_modules():
    rank, size = world()
    torch.manual_seed(rank)
    model = penstock.shard(on_meta(Net), device=DEVICE)
    model.to_empty(device=DEVICE)
    initialise(model)
    # A single row, which one rank has: those without rows hear of it as well.
    refuses("ESTATE", "'blocks.0.scale' of Net .* and 2 more", loss_of, model, 0, rank)
    for block in model.blocks:
        block.scale.data.fill_(1.0)  # which nobody counts where there is one process
    before = loss_of(model, 0, rank)
    before.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert loss_of(model, 0, rank) < before
    penstock.close(model)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_modules_initialise_their_shards(worlds, size):
    worlds(size).run(initialise_by_modules)


def test_modules_initialise_a_model_of_one_process():
    initialise_by_modules()


def take_from_rank_0():
    rank, _ = world()
    model = penstock.shard(on_meta(Buffered), device=DEVICE)
    optimizers = both_optimizers(model.parameters())
    state = make(Buffered).state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    refuses("ESTATE", "buffer 'gain' of Buffered is on the meta device", loss_of, model, 0, 0)
    model.gain = torch.tensor(2.0, device=DEVICE)
    train_as_reference(model, optimizers, Buffered)
    penstock.close(model)


def test_values_come_from_rank_0(worlds):
    worlds(2).run(take_from_rank_0)


def step_as_one():
    model = penstock.shard(on_meta(Net), device=DEVICE)
    optimizer = penstock.AdamW(model, lr=1e-2)

    @penstock.step(model, optimizer)
    def train_step(number):
        loss = loss_of(model, number, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    refuses("ESTATE", "has no values yet", train_step, 0)
    model.load_state_dict(make(Net).state_dict())
    first = train_step(0)
    assert first.item() == pytest.approx(loss_of(make(Net), 0, 0).item(), rel=1e-5)
    assert train_step(0) < first
    penstock.close(model)


def test_a_step_is_refused_until_there_are_values(worlds):
    worlds(2).run(step_as_one)


# ---- refusals ------------------------------------------------------------------------------------


def test_a_model_with_some_values_is_refused():
    model = on_meta(Net)
    model.head = nn.Linear(7, 3, device=DEVICE)
    before = list(model.parameters())
    text = f"'head.weight' is on {DEVICE}.* and 'embed.weight' on meta: give all of them values"
    refuses("EINVAL", text, penstock.shard, model)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


def differ_in_values():
    rank, _ = world()
    model = on_meta(Net) if rank == 1 else make(Net)
    text = "on the meta device on rank 1 and has values on rank 0"
    refuses("EMISMATCH", text, penstock.shard, model, device=DEVICE)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    dist.barrier()


def test_ranks_that_have_values_and_others_that_have_not_are_told(worlds):
    worlds(2).run(differ_in_values)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("meta", "device='meta': shards lie on 'cpu' or on one of the GPUs"),
        ("cuda:99", "device='cuda:99': shards lie on"),
        ("nowhere", "device='nowhere': give a torch.device or its name"),
        (2.5, "device=2.5: give a torch.device or its name"),
    ],
)
def test_a_device_that_is_none_is_refused(device, text):
    refuses("EINVAL", text, penstock.shard, on_meta(Net), device=device)


def test_the_device_of_a_model_with_values_is_where_it_is():
    refuses("EINVAL", "device='meta'", penstock.shard, make(Net), device="meta")
    model = penstock.shard(make(Net), device=DEVICE)
    text = r"cannot be moved or converted \(here to torch.float32 on meta\).*device="
    refuses("ESTATE", text, model.to_empty, device="meta")
    penstock.close(model)
