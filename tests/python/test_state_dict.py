"""Model and optimizer state through torch's own functions, full and sharded."""

import copy
import pickle

import penstock
import pytest
import torch
import torch.distributed.checkpoint as dcp
from equality import assert_same_parameters, whole, world
from models import Net, Tied, loss_of, make
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

FULL = StateDictOptions(full_state_dict=True)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, number):
    loss_of(model, number, world()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(kind=Net, stage=3):
    model = penstock.shard(make(kind), stage=stage)
    optimizer = adamw(model)
    for number in range(2):
        step(model, optimizer, number)
    return model, optimizer


def losses(model):
    return [loss_of(model, number, 0).item() for number in range(3)]


def full_round_trip(kind, stage):
    model, optimizer = trained(kind, stage)
    state = get_model_state_dict(model, options=FULL)
    # torch hands out the very tensors of the step counts on all ranks but the first.
    moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
    assert not any(isinstance(value, DTensor) for value in state.values())
    plain = make(kind, seed=5)
    if world()[0] == 0:  # torch gives full state to rank 0, others get nothing unless asked
        plain.load_state_dict(state)
    other = penstock.shard(make(kind, seed=6), stage=stage)
    other_optimizer = adamw(other)
    before = losses(other)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state, options=broadcast)
    set_optimizer_state_dict(other, other_optimizer, moments, options=broadcast)
    assert losses(other) == pytest.approx(losses(model)) and losses(other) != before
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        step(each, its_optimizer, 9)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(whole(p), whole(q), rtol=1e-6), name
    penstock.close(model)
    penstock.close(other)


@pytest.mark.parametrize("kind", [Net, Tied])
@pytest.mark.parametrize("stage", [1, 3])
def test_full_state_goes_round(worlds, kind, stage):
    worlds(2).run(full_round_trip, kind, stage)


def checkpoint_round_trip(folder):
    model, optimizer = trained()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    assert all(isinstance(value, DTensor) for value in state["model"].values())
    dcp.save(state, checkpoint_id=folder)
    other = penstock.shard(make(Net, seed=6))
    other_optimizer = adamw(other)
    losses(other)
    target = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, other_optimizer),
    }
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(other, target["model"])
    set_optimizer_state_dict(other, other_optimizer, target["optimizer"])
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        step(each, its_optimizer, 9)
    assert losses(other) == pytest.approx(losses(model))
    penstock.close(model)
    penstock.close(other)


def test_a_distributed_checkpoint_goes_round(worlds, tmp_path):
    worlds(2).run(checkpoint_round_trip, str(tmp_path))


def load_checkpoint(folder, stage):
    other = penstock.shard(make(Net, seed=6), stage=stage)
    target = {"model": get_model_state_dict(other)}
    dcp.load(target, checkpoint_id=folder)
    assert_same_parameters(other, make(Net), 0)
    found = losses(other)
    penstock.close(other)
    return found


def save_checkpoint(folder):
    model = penstock.shard(make(Net))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    penstock.close(model)


def test_a_checkpoint_of_two_ranks_loads_on_four(worlds, tmp_path):
    worlds(2).run(save_checkpoint, str(tmp_path))
    for stage in (1, 3):
        for found in worlds(4).run(load_checkpoint, str(tmp_path), stage):
            assert found == pytest.approx(losses(make(Net)))


def load_assigning(stage):
    model = penstock.shard(make(Net, seed=3), stage=stage)
    source = penstock.shard(make(Net, seed=4), stage=stage)
    before = list(model.parameters())
    losses(model)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert losses(model) == pytest.approx(losses(source))
    penstock.close(model)
    penstock.close(source)


@pytest.mark.parametrize("stage", [1, 3])
def test_loading_by_assignment_fills_the_shards(worlds, stage):
    worlds(2).run(load_assigning, stage)


def load_in_place(folder, options):
    """Into the tensors of the state dict, and nothing else tells of it."""
    model = penstock.shard(make(Net), **options)
    wanted = losses(model)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert losses(model) != wanted
    dcp.load(model.state_dict(), checkpoint_id=folder)
    assert losses(model) == wanted
    penstock.close(model)


@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "param_dtype": torch.bfloat16}],
    ids=["1", "2", "3", "bfloat16"],
)
def test_a_checkpoint_loaded_in_place_is_noticed(worlds, tmp_path, options):
    worlds(2).run(load_in_place, str(tmp_path), options)


def assert_copied(copies, model):
    """Plain DTensors with the model's values, in other memory."""
    for name, parameter in model.named_parameters():
        got, want = copies[name].to_local(), parameter.to_local()
        assert type(copies[name]) is DTensor, name
        assert torch.equal(got, want), name
        assert got.data_ptr() != want.data_ptr() or got.numel() == 0, name


def copy_and_save(folder, stage):
    model, _ = trained(stage=stage)
    rank, _ = world()
    loss_of(model, 0, rank).backward()
    state = model.state_dict()
    for name, value in state.items():
        rows = value.to_local()
        assert value.data_ptr() == 0, name  # as those of FSDP2
        assert rows.untyped_storage().nbytes() == rows.nbytes, name  # a file has no more than it
    path = f"{folder}/{rank}.pt"
    torch.save(state, path)
    saved = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.async_save(state, checkpoint_id=f"{folder}/dcp").result()
    dcp.load(saved, checkpoint_id=f"{folder}/dcp")
    of_parameters = pickle.loads(pickle.dumps(dict(model.named_parameters())))
    for copies in (copy.deepcopy(state), torch.load(path), saved, of_parameters):
        assert_copied(copies, model)
    for parameter in model.parameters():
        copied = copy.deepcopy(parameter)
        assert isinstance(copied, torch.nn.Parameter) and type(copied) is DTensor
        assert torch.equal(copied.grad.to_local(), parameter.grad.to_local())
    penstock.close(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dict_is_saved_and_copied_as_any_other(worlds, tmp_path, stage):
    worlds(2).run(copy_and_save, str(tmp_path), stage)


def load_whole(stage):
    """Plain tensors of the whole shape, which every rank has; one in another dtype."""
    for assign in (False, True):
        model = penstock.shard(make(Tied, seed=3), stage=stage)
        losses(model)
        state = make(Tied, seed=4).state_dict()
        state["norm.weight"] = state["norm.weight"].double()
        model.load_state_dict(state, assign=assign)
        assert losses(model) == pytest.approx(losses(make(Tied, seed=4)))
        state["norm.weight"] = torch.zeros(3)
        with pytest.raises(RuntimeError, match=r"norm\.weight"):
            model.load_state_dict(state)
        penstock.close(model)


def test_whole_plain_tensors_are_loaded(worlds):
    worlds(2).run(load_whole, 3)


def refuse_copies():
    model, _ = trained(stage=1)
    for use in (
        copy.deepcopy,
        torch.optim.swa_utils.AveragedModel,
        pickle.dumps,
        lambda model: copy.deepcopy(model.blocks[0].up),
    ):
        with pytest.raises(penstock.PenstockError, match=r"Net is sharded.*state_dict\(\)"):
            use(model)
    step(model, adamw(model), 3)
    penstock.close(model)


def test_a_sharded_model_says_that_it_cannot_be_copied(worlds):
    worlds(2).run(refuse_copies)
