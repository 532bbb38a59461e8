"""Shards, gradients and optimizer on the host: the same bits as with all of it on the device."""

from contextlib import nullcontext

import penstock
import pytest
import torch
import torch.distributed.checkpoint as dcp
from equality import breaking_off, make_mesh, whole, world
from models import DEVICE, Checkpointed, Frozen, Net, Tied, batch, loss_of, make
from penstock import PenstockError
from penstock._world import local_of
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors writes the files")

STEPS = 6
EXACT = {"rtol": 0, "atol": 0}
HOSTED = {"offload": "optimizer"}


def adamw(model, **given):
    return penstock.AdamW(model, lr=0.01, **given)


def torchs_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def lies_on_host(model):
    """Whether all that an optimizer reads is on the host, where a GPU copies it at full speed."""
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    rows = [local_of(tensor) for tensor in tensors]
    is_pinned = all(one.is_pinned() for one in rows if one.numel() > 0)
    return all(one.device.type == "cpu" for one in rows) and is_pinned == (DEVICE == "cuda")


# ---- equality -----------------------------------------------------------------------------------


def plainly(model, number, rank):
    loss_of(model, number, rank).backward()


def accumulating(model, number, rank):
    for piece in range(3):
        loss_of(model, number + piece, rank).backward()


def without_sync(model, number, rank):
    for piece in range(2):
        with penstock.no_sync(model) if piece == 0 else nullcontext():
            loss_of(model, number + piece, rank).backward()


def evaluating(model, number, rank):
    plainly(model, number, rank)
    with torch.no_grad():
        loss_of(model, number, rank)


def clipping(model, number, rank):
    plainly(model, number, rank)
    penstock.clip_grad_norm_(model, 0.1)


def clipping_by_torch(model, number, rank):
    plainly(model, number, rank)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def under_a_graph_that_is_kept(model, number, rank):
    """Gradients of one forward are computed twice: the second time they are added."""
    loss = loss_of(model, number, rank)
    loss.backward(retain_graph=True)
    loss.backward()


def broken_off(model, number, rank):
    with breaking_off(model.blocks[0]):
        loss_of(model, number + 1, rank).backward()
    model.zero_grad()
    plainly(model, number, rank)


def writing_between(model, number, rank):
    """The host writes to shards as soon as it may."""
    with torch.no_grad():
        loss_of(model, number, rank)
        for parameter in model.parameters():
            parameter.mul_(1.5)
    loss = loss_of(model, number, rank)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)


def freezing(model, number, rank):
    model.blocks[1].requires_grad_(number % 2 == 0)
    model.head.requires_grad_(number > 2)
    plainly(model, number, rank)


def train(offload, *, kind, optimizer, backward, dtype, shard):
    model = penstock.shard(make(kind).to(dtype), **shard, offload=offload)
    stepped = optimizer(model)
    for number in range(STEPS):
        backward(model, number, world()[0])
        assert offload is None or lies_on_host(model)
        stepped.step()
        stepped.zero_grad()
    values = [whole(parameter).cpu() for parameter in model.parameters()]
    penstock.close(model)
    return values


def in_bfloat16(model, number, rank):
    for piece in range(2):
        inputs = batch(number + piece, rank).bfloat16()
        model(inputs).float().square().mean().backward()


def with_masters(model):
    return adamw(model, masters=True, moments=torch.bfloat16)


CASES = {
    "plain": {},
    "torch's optimizer": {"optimizer": torchs_adamw},
    "stage 1": {"shard": {"stage": 1}},
    "stage 2": {"shard": {"stage": 2}},
    "tied": {"kind": Tied},
    "frozen": {"kind": Frozen},
    "checkpointed": {"kind": Checkpointed},
    "in parts": {"shard": {"bucket_bytes": 128, "part_bytes": 128}},
    "gathered in bfloat16": {"shard": {"param_dtype": torch.bfloat16}},
    "reduced in float32": {
        "shard": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    },
    "bfloat16 with masters": {
        "dtype": torch.bfloat16,
        "optimizer": with_masters,
        "backward": in_bfloat16,
    },
    "accumulating": {"backward": accumulating},
    "without sync": {"backward": without_sync},
    "evaluating": {"backward": evaluating},
    "clipping": {"backward": clipping},
    "clipping by torch": {"backward": clipping_by_torch},
    "a graph that is kept": {"backward": under_a_graph_that_is_kept},
    "broken off": {"backward": broken_off},
    "writing between": {"backward": writing_between},
    "freezing": {"backward": freezing},
}


ALONE = ("plain", "gathered in bfloat16", "bfloat16 with masters", "a graph that is kept")
# Where gathers differ: those with "parameters" bring shards up.
PARAMETERS = (
    *("plain", "stage 2", "tied", "checkpointed", "gathered in bfloat16", "evaluating"),
    *("a graph that is kept", "broken off", "writing between", "freezing"),
)


def train_both(name, offload):
    case = {
        "kind": Net,
        "optimizer": adamw,
        "backward": plainly,
        "dtype": torch.float32,
        "shard": {},
    } | CASES[name]
    # What one GPU adds up in its own order, or divides behind moments of 16 bits, is no bit of the
    # host's.
    is_exact = DEVICE == "cpu" or not any(k in name for k in ("clipping", "torch", "masters"))
    for own, wanted in zip(train(offload, **case), train(None, **case), strict=True):
        torch.testing.assert_close(own, wanted, **(EXACT if is_exact else {}))


@pytest.mark.parametrize("name", CASES)
def test_the_host_trains_to_the_same_bits(worlds, name):
    worlds(2).run(train_both, name, "optimizer")


@pytest.mark.parametrize("name", PARAMETERS)
def test_shards_come_up_for_each_gather(worlds, name):
    worlds(2).run(train_both, name, "parameters")


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
@pytest.mark.parametrize("name", ALONE)
def test_the_host_of_one_rank_does_so_too(worlds, name, offload):
    worlds(1).run(train_both, name, offload)


# ---- states -------------------------------------------------------------------------------------


def train_some(model, optimizer, numbers):
    for number in numbers:
        plainly(model, number, world()[0])
        optimizer.step()
        optimizer.zero_grad()


def states_of(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def resume(folder, hosted):
    """Go on with what another run has saved; return the last values."""
    model = penstock.shard(make(Net, seed=3), **(HOSTED if hosted else {}))
    optimizer = adamw(model)
    train_some(model, optimizer, [7])  # there is a state to load into
    dcp.load(states_of(model, optimizer), checkpoint_id=folder)
    optimizer_state = states_of(model, optimizer)["optimizer"]
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    train_some(model, optimizer, range(2, 4))
    values = [whole(parameter).cpu() for parameter in model.parameters()]
    penstock.close(model)
    return values


def go_through_files(folder):
    for hosted in (True, False):
        model = penstock.shard(make(Net), **(HOSTED if hosted else {}))
        optimizer = adamw(model)
        train_some(model, optimizer, range(2))
        dcp.save(states_of(model, optimizer), checkpoint_id=f"{folder}/{hosted}")
        train_some(model, optimizer, range(2, 4))
        wanted = [whole(parameter).cpu() for parameter in model.parameters()]
        penstock.close(model)
        for other in (True, False):
            for own, value in zip(resume(f"{folder}/{hosted}", other), wanted, strict=True):
                torch.testing.assert_close(own, value, **EXACT)


def test_checkpoints_go_from_and_to_the_host(worlds, tmp_path):
    worlds(2).run(go_through_files, str(tmp_path))


def load_on_meta(file, state):
    with torch.device("meta"):
        model = Net()
    penstock.shard(model, device=DEVICE, **HOSTED)
    penstock.load(model, file)
    assert lies_on_host(model) and model.to(DEVICE) is model
    assert "ranks=2, offload=optimizer, parameters=" in repr(model)
    model.load_state_dict({name: 2 * value for name, value in state.items()})
    reference = make(Net)
    reference.load_state_dict({name: 2 * value for name, value in state.items()})
    inputs = batch(0, 0)
    torch.testing.assert_close(model(inputs), reference(inputs))
    penstock.close(model)


def test_a_model_of_the_meta_device_is_loaded_to_the_host(worlds, tmp_path):
    state = {name: value.cpu() for name, value in make(Net).state_dict().items()}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    worlds(2).run(load_on_meta, str(tmp_path / "model.safetensors"), state)


# ---- what cannot be -----------------------------------------------------------------------------


def refuses(text, function, *args, **given):
    with pytest.raises(PenstockError, match=text) as caught:
        function(*args, **given)
    assert caught.value.status == "EINVAL"


def test_what_is_not_offloaded_is_refused():
    both = "leave one of them out"
    text = "offload=True: give one or several of 'optimizer'"
    refuses(text, penstock.shard, make(Net), offload=True)
    refuses(f"memory=4096: .*{both}", penstock.shard, make(Net), memory=4096, **HOSTED)
    given = {"checkpoint": "auto", "memory": 4096}
    refuses(f"memory=4096: .*{both}", penstock.shard, make(Net), **given, **HOSTED)
    model = penstock.shard(make(Net), **HOSTED)
    refuses("in_backward=True: .* offload=, are updated in step", adamw, model, in_backward=True)
    penstock.close(model)


def divide_and_offload():
    mesh = make_mesh((1, 2), ("dp", "tp"))
    model = parallelize_module(make(Net), mesh["tp"], {"head": ColwiseParallel()})
    text = "offload='optimizer': parameter 'head.weight' is a DTensor"
    refuses(text, penstock.shard, model, mesh=mesh["dp"], **HOSTED)


def test_dtensors_are_refused(worlds):
    worlds(2).run(divide_and_offload)


def test_a_step_is_not_captured(caplog):
    model = penstock.shard(make(Net), **HOSTED)
    optimizer = adamw(model)
    calls = []

    @penstock.step(model, optimizer)
    def step(inputs):
        calls.append(inputs)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(8):
        step(batch(number, 0))
    assert len(calls) == 8
    assert DEVICE != "cuda" or "the host has a part in steps" in caplog.text
    penstock.close(model)
