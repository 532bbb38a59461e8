"""penstock.AdamW beside torch.optim.AdamW: values, state, scaling, clipping, ranks, graphs."""

import copy
import os
import time

import penstock
import pytest
import torch
import torch.distributed.checkpoint as dcp
from equality import train_both, whole, world
from models import DEVICE, Net, Tied, batch, loss_of, make
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

on_gpus = pytest.mark.skipif(DEVICE != "cuda", reason="wants a GPU: PENSTOCK_TEST_DEVICE=cuda")
SHAPES = [(37, 13), (5,), (1000, 33), (1,), (64, 16), ()]
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture
def seed():
    """Seed torch, and say by what."""
    value = int(os.environ.get("PST_SEED", time.time_ns() % 2**32))
    print(f"PST_SEED={value}")
    torch.manual_seed(value)
    return value


def draw(shapes=SHAPES, dtype=torch.float32):
    return [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]


def twins(tensors):
    return [[nn.Parameter(tensor.clone()) for tensor in tensors] for _ in range(2)]


def twins_on_cpus(tensors):
    """Parameters, and the same on CPUs for torch.

    Its fused kernel on GPUs holds betas in fp32, where 1 - 0.999 is off by 1e-5 of itself.
    """
    ours, theirs = twins(tensors)
    return ours, [nn.Parameter(parameter.detach().cpu()) for parameter in theirs]


def on_cpus(values):
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def give_gradients(*lists, scale=1.0):
    for parameters in zip(*lists, strict=True):
        gradient = torch.randn_like(parameters[0]) * scale
        for parameter in parameters:
            parameter.grad = gradient.to(parameter.device, copy=True)


def ulps_of(found, wanted, size):
    """The difference in units of the last place of a number as large as `size`."""
    size = size.abs().clamp(min=torch.finfo(torch.float32).tiny)
    return (found - wanted).abs() / (torch.nextafter(size, 2 * size) - size)


# ---- values -------------------------------------------------------------------------------------


def values_of(optimizer, parameter):
    """Parameter and state, by name."""
    state = {name: value for name, value in optimizer.state[parameter].items() if name != "step"}
    return {"parameter": parameter.detach(), **state}


def assert_like_torchs(ours, theirs, before):
    """Compare a step, in units of the last place of the largest operand; then make them equal.

    It may be four of them where a parameter is about as small as its change.
    """
    for name, wanted in theirs.items():
        old = before.get(name, torch.zeros_like(wanted))
        moved = (wanted - old).abs()
        off = ulps_of(ours[name], wanted, torch.stack([old.abs(), wanted.abs(), moved]).amax(0))
        is_small = (old.abs() < 8 * moved) & (name == "parameter")
        assert (off <= torch.where(is_small, 4, 1)).all(), (name, off.max())
        wanted.copy_(ours[name])


@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"amsgrad": True}, {"betas": (0.3, 0.9)}]
)
@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_each_of_1000_steps_is_within_an_ulp_of_torchs(seed, way, options):
    ours, theirs = twins_on_cpus(draw())
    mine = penstock.AdamW(ours, **OPTIONS, **options)
    reference = torch.optim.AdamW(theirs, **OPTIONS, **options, **{way: True})
    for _ in range(1000 if not options else 50):
        give_gradients(ours, theirs)
        before = [on_cpus(values_of(mine, one)) for one in ours]
        mine.step()
        reference.step()
        for one, two, old in zip(ours, theirs, before, strict=True):
            assert_like_torchs(on_cpus(values_of(mine, one)), values_of(reference, two), old)


def test_1000_steps_are_those_of_torchs_fused_one_bit_for_bit(seed):
    ours, theirs = twins_on_cpus(
        draw([(64, 16), (128, 32)])
    )  # its vectors; its rest is rounded otherwise
    mine = penstock.AdamW(ours, **OPTIONS)
    reference = torch.optim.AdamW(theirs, **OPTIONS, fused=True)
    for _ in range(1000):
        give_gradients(ours, theirs)
        mine.step()
        reference.step()
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one.cpu(), two)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_anywhere_in_memory_are_updated_alone(seed, dtype, offset):
    memory = torch.randn(5000, device=DEVICE).to(dtype)
    sizes, place, ours = (1, 7, 16, 0, 33, 2049), offset, []
    for size in sizes:
        ours.append(nn.Parameter(memory[place : place + size]))
        place += size + 1
    between = [
        place
        for place in range(5000)
        if all(p.numel() == 0 or not (0 <= place - p.storage_offset() < p.numel()) for p in ours)
    ]
    before = memory.clone()
    theirs = [nn.Parameter(parameter.detach().float()) for parameter in ours]
    mine, reference = penstock.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for one, two in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one)
        two.grad = one.grad.float()
    mine.step()
    reference.step()
    assert torch.equal(memory[between], before[between])
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(
            one.float(),
            two,
            rtol=2**-8 if dtype != torch.float32 else 1e-6,
            atol=1e-3 if dtype != torch.float32 else 1e-6,
        )


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_states_lie_as_their_parameters_do_for_vectors(offset):
    memory = torch.randn(2000, device=DEVICE, dtype=torch.bfloat16)
    parameter = nn.Parameter(memory[offset : offset + 999].view(27, 37))
    parameter.grad = torch.ones_like(parameter)
    optimizer = penstock.AdamW([parameter], moments=torch.float32, masters=True)
    for _ in range(2):
        optimizer.step()
        states = [optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq", "master")]
        for state in states:
            assert state.data_ptr() // 4 % 8 == parameter.data_ptr() // 2 % 8 == offset
            assert state.shape == parameter.shape and state.is_contiguous()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masters", [False, True])
def test_each_step_in_bfloat16_is_right_within_its_rounding(seed, moments, masters):
    ours = [nn.Parameter(tensor) for tensor in draw(dtype=torch.bfloat16)]
    theirs = [nn.Parameter(parameter.detach().float()) for parameter in ours]
    mine = penstock.AdamW(ours, **OPTIONS, moments=moments, masters=masters)
    reference = torch.optim.AdamW(theirs, **OPTIONS)
    for _ in range(20):
        give_gradients(ours)
        for one, two in zip(ours, theirs, strict=True):
            two.grad = one.grad.float()
        mine.step()
        reference.step()
        for one, two in zip(ours, theirs, strict=True):
            state, wanted = mine.state[one], reference.state[two]
            if masters:
                assert torch.allclose(state["master"], two, rtol=1e-6, atol=1e-7)
                assert torch.equal(state["master"].to(torch.bfloat16), one)
            assert torch.allclose(one.float(), two, rtol=2**-8, atol=1e-7)
            with torch.no_grad():
                two.copy_(state["master"] if masters else one)
            for name in ("exp_avg", "exp_avg_sq"):
                rtol = 1e-6 if moments == torch.float32 else 2**-7
                assert torch.allclose(state[name].float(), wanted[name], rtol=rtol, atol=1e-7)
                wanted[name].copy_(state[name])


def test_bfloat16_moments_are_right_in_the_mean(seed):
    parameter = nn.Parameter(torch.zeros(20000, device=DEVICE))
    optimizer = penstock.AdamW([parameter], moments=torch.bfloat16, seed=seed, betas=(0.99, 0.999))
    for _ in range(200):  # rounded to nearest it would stop growing below 0.4
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    mean = optimizer.state[parameter]["exp_avg"].float().mean().item()
    assert mean == pytest.approx(1 - 0.99**200, rel=5e-3)


def test_a_seed_repeats_the_rounding(seed):
    def run(seed):
        torch.manual_seed(1)
        parameter = nn.Parameter(torch.randn(1000, device=DEVICE))
        optimizer = penstock.AdamW([parameter], moments=torch.bfloat16, seed=seed)
        for _ in range(3):
            give_gradients([parameter])
            optimizer.step()
        return optimizer.state[parameter]["exp_avg"]

    assert torch.equal(run(3), run(3)) and not torch.equal(run(3), run(4))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_groups_and_schedules_are_followed(seed, as_tensor):
    ours, theirs = twins(draw())
    made = []
    for kind, parameters in ((penstock.AdamW, ours), (torch.optim.AdamW, theirs)):
        lr = torch.tensor(0.01, device=DEVICE) if as_tensor else 0.01
        options = {"capturable": True} if as_tensor and DEVICE == "cuda" else {}
        groups = [{"params": parameters[:2], "weight_decay": 0.3}, {"params": parameters[2:]}]
        optimizer = kind(groups, lr=lr, **options)
        made.append((optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)))
    for _ in range(5):
        give_gradients(ours, theirs)
        for optimizer, schedule in made:
            optimizer.step()
            schedule.step()
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)


def test_parameters_without_gradients_stay(seed):
    ours, _ = twins(draw())
    optimizer = penstock.AdamW(ours)
    give_gradients(ours[:2])
    before = [parameter.detach().clone() for parameter in ours]
    optimizer.step()
    assert [torch.equal(p, b) for p, b in zip(ours, before, strict=True)] == [False] * 2 + [
        True
    ] * 4
    assert len(optimizer.state) == 2


@pytest.mark.skipif(DEVICE != "cpu", reason="the host's threads")
def test_the_number_of_threads_does_not_matter(seed):
    found, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        parameters = [nn.Parameter(tensor) for tensor in draw([(1_700_001,), (3,), (900, 1001)])]
        optimizer = penstock.AdamW(parameters, moments=torch.bfloat16)
        give_gradients(parameters)
        optimizer.step()
        found.append([(p, optimizer.state[p]["exp_avg"]) for p in parameters])
    torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_write_is_seen_by_autograd():
    parameter = nn.Parameter(torch.ones(3, device=DEVICE))
    loss = (parameter * parameter).sum()
    parameter.grad = torch.ones_like(parameter)
    penstock.AdamW([parameter]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- scaling and skipping -----------------------------------------------------------------------


def test_a_grad_scaler_scales_and_skips(seed):
    ours, theirs = twins(draw())
    mine, reference = penstock.AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    scaler.scale(torch.ones((), device=DEVICE))
    for step in range(4):
        give_gradients(ours, theirs)
        for parameter in ours:
            parameter.grad *= 1024
        is_bad = step == 2
        if is_bad:
            ours[2].grad[3, 4] = float("inf")
        else:
            reference.step()
        scaler.step(mine)
        scaler.update(1024.0)
    assert mine.state[ours[0]]["step"].item() == 3
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("clips", [False, True])
def test_steps_with_gradients_that_are_not_finite_are_skipped(seed, bad, clips):
    model = nn.Linear(7, 5, device=DEVICE)
    optimizer = penstock.AdamW(model, skip_nonfinite=True)
    for step in range(3):
        give_gradients(list(model.parameters()))
        if step == 1:
            model.bias.grad[2] = bad
        before = copy.deepcopy(model.state_dict())
        if clips:
            penstock.clip_grad_norm_(model, 1.0)
        optimizer.step()
        same = torch.equal(before["weight"], model.weight)
        assert same == (step == 1)
    assert optimizer.state[model.weight]["step"].item() == 2


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_is_torchs(seed, max_norm):
    ours, theirs = make(Net, seed=3), make(Net, seed=3)
    mine, reference = penstock.AdamW(ours), torch.optim.AdamW(theirs.parameters())
    for _ in range(3):
        give_gradients(list(ours.parameters()), list(theirs.parameters()))
        norm = penstock.clip_grad_norm_(ours, max_norm)
        wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        assert torch.allclose(norm, wanted)
        mine.step()
        reference.step()
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)


# ---- state --------------------------------------------------------------------------------------


def test_state_moves_to_torchs_and_back(seed):
    ours, theirs = twins(draw())
    mine, reference = penstock.AdamW(ours, lr=0.03), torch.optim.AdamW(theirs, lr=0.5)
    give_gradients(ours)
    mine.step()
    with torch.no_grad():
        for one, two in zip(ours, theirs, strict=True):
            two.copy_(one)
    reference.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert reference.param_groups[0]["lr"] == 0.03
    give_gradients(ours, theirs)
    mine.step()
    reference.step()
    back = penstock.AdamW(theirs, lr=1.0)
    back.load_state_dict(copy.deepcopy(reference.state_dict()))
    give_gradients(ours, theirs)
    mine.step()
    back.step()
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)
        assert mine.state[one]["step"].item() == back.state[two]["step"].item() == 3


def test_loading_keeps_dtypes_and_options(seed):
    ours, others = twins(draw(dtype=torch.bfloat16))
    mine = penstock.AdamW(ours, masters=True)
    give_gradients(ours)
    mine.step()
    for moments in (torch.float32, torch.bfloat16):
        other = penstock.AdamW(others, masters=True, moments=moments)
        other.load_state_dict(mine.state_dict())
        state = other.state[others[0]]
        assert state["exp_avg"].dtype == other.param_groups[0]["moments"] == moments
        assert torch.equal(state["master"], mine.state[ours[0]]["master"])
    without = penstock.AdamW(others)
    without.load_state_dict(mine.state_dict())
    assert "master" not in without.state[others[0]]


def test_a_copy_goes_on_alike(seed):
    model = nn.Linear(7, 5, device=DEVICE)
    optimizer = penstock.AdamW(model, moments=torch.bfloat16)
    give_gradients(list(model.parameters()))
    optimizer.step()
    both = copy.deepcopy((model, optimizer))
    give_gradients(list(model.parameters()), list(both[0].parameters()))
    optimizer.step()
    both[1].step()
    assert torch.equal(model.weight, both[0].weight)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"moments": torch.float16}, "moments"),
        ({"eps": float("nan")}, "eps"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_options_are_named(options, text):
    with pytest.raises(penstock.PenstockError, match=text):
        penstock.AdamW([nn.Parameter(torch.ones(2))], **options)


def test_what_cannot_be_updated_is_named():
    with pytest.raises(penstock.PenstockError, match="float64"):
        penstock.AdamW([nn.Parameter(torch.ones(2, dtype=torch.float64))])
    apart = nn.Parameter(torch.ones(4, 4, device=DEVICE)[:, :2])
    apart.grad = torch.ones_like(apart)
    with pytest.raises(penstock.PenstockError, match="parameter 0.*contiguous"):
        penstock.AdamW([apart]).step()
    with pytest.raises(penstock.PenstockError, match="no penstock.AdamW holds"):
        penstock.clip_grad_norm_(nn.Linear(2, 2), 1.0)


def test_gradients_in_another_layout_are_read_rightly(seed):
    ours, theirs = twins(draw([(6, 9)]))
    ours[0].grad = torch.randn(9, 6, device=DEVICE).t()
    theirs[0].grad = ours[0].grad.clone()
    penstock.AdamW(ours).step()
    torch.optim.AdamW(theirs).step()
    assert torch.allclose(ours[0], theirs[0], rtol=1e-6)


# ---- ranks --------------------------------------------------------------------------------------


def either(parameters):
    """Ours for the shards, torch's for the reference: `train_both` makes the reference's first."""
    parameters = list(parameters)
    ours = isinstance(parameters[0], DTensor)
    return (penstock.AdamW if ours else torch.optim.AdamW)(parameters, lr=0.05, weight_decay=0.1)


def train_sharded(kind, stage):
    penstock.close(train_both(kind, stage=stage, steps=5, optimizer=either, tolerance=1e-4))


@pytest.mark.parametrize("kind", [Net, Tied])
@pytest.mark.parametrize("stage", [1, 3])
def test_sharded_training_is_torchs_unsharded(worlds, kind, stage):
    worlds(2).run(train_sharded, kind, stage)


def clip_sharded():
    models = [penstock.shard(make(Net, seed=3)) for _ in range(2)]
    optimizers = [
        penstock.AdamW(models[0], lr=0.05),
        torch.optim.AdamW(models[1].parameters(), lr=0.05),
    ]
    for step in range(3):
        for model in models:
            loss_of(model, step, world()[0]).backward()
        norm = penstock.clip_grad_norm_(models[0], 0.02)
        wanted = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.02)
        assert torch.allclose(norm, whole(wanted), rtol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(whole(one), whole(two), rtol=1e-5, atol=1e-6)
    for model in models:
        penstock.close(model)


def test_clipping_over_ranks_is_torchs(worlds):
    worlds(2).run(clip_sharded)


def clip_by_torch():
    """What torch does to gradients before the step counts."""
    model = penstock.shard(make(Net, seed=3))
    reference = penstock.shard(make(Net, seed=3))
    pairs = (
        (model, penstock.AdamW(model)),
        (reference, torch.optim.AdamW(reference.parameters())),
    )
    for step in range(2):
        for each, optimizer in pairs:
            loss_of(each, step, world()[0]).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(whole(one), whole(two), rtol=1e-5, atol=1e-6)
    penstock.close(model)
    penstock.close(reference)


def test_torchs_clipping_works_as_ever(worlds):
    worlds(2).run(clip_by_torch)


def skip_together():
    rank, _ = world()
    model = penstock.shard(make(Net))
    optimizer = penstock.AdamW(model, skip_nonfinite=True)
    for step in range(3):
        loss_of(model, step, rank).backward()
        before = [whole(p).clone() for p in model.parameters()]
        if step == 1 and rank == 1:
            rows = next(p.grad.to_local() for p in model.parameters() if p.to_local().numel() > 0)
            rows.view(-1)[0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
        changed = [
            not torch.equal(whole(p), b) for p, b in zip(model.parameters(), before, strict=True)
        ]
        assert any(changed) != (step == 1)
    penstock.close(model)


def test_ranks_skip_a_step_together(worlds):
    worlds(2).run(skip_together)


def rounded(seed):
    """Moments after three steps by the same whole gradients, whatever the ranks."""
    model = penstock.shard(make(Net, seed=3))
    optimizer = penstock.AdamW(model, moments=torch.bfloat16, seed=seed)
    torch.manual_seed(7)
    for _ in range(3):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, device=DEVICE)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    found = [whole(optimizer.state[p]["exp_avg"]).float().cpu() for p in model.parameters()]
    penstock.close(model)
    return [one.tolist() for one in found]


def test_random_rounding_does_not_depend_on_the_number_of_ranks(worlds):
    alone = worlds(1).run(rounded, 5)[0]
    assert all(found == alone for found in worlds(2).run(rounded, 5))


def save_state(folder):
    model = penstock.shard(make(Net, seed=3), param_dtype=torch.bfloat16)
    optimizer = penstock.AdamW(model, lr=0.01)
    for step in range(2):
        loss_of(model, step, 0).backward()  # each rank the same, whatever their number
        optimizer.step()
        optimizer.zero_grad()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    result = go_on(model, optimizer)
    penstock.close(model)
    return result


def go_on(model, optimizer):
    loss_of(model, 9, 0).backward()
    optimizer.step()
    return [whole(p).tolist() for p in model.parameters()]


def load_state(folder, ours):
    model = penstock.shard(make(Net, seed=6), param_dtype=torch.bfloat16)
    kind = penstock.AdamW if ours else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.5)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    whole_state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    for name, parameter in model.named_parameters():
        assert whole_state["state"][name]["exp_avg"].shape == parameter.shape
    found = go_on(model, optimizer)
    penstock.close(model)
    return found


@pytest.mark.parametrize("ours", [True, False])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(worlds, tmp_path, ours):
    wanted = worlds(2).run(save_state, str(tmp_path))[0]
    ranks = 1 if DEVICE == "cuda" else 4
    for found in worlds(ranks).run(load_state, str(tmp_path), ours):
        for one, two in zip(found, wanted, strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(two), rtol=1e-3, atol=1e-4)


# ---- graphs -------------------------------------------------------------------------------------


def train_captured(is_captured, masters):
    torch.manual_seed(7)
    model = penstock.shard(make(Net).to(torch.bfloat16) if masters else make(Net))
    rate = torch.tensor(0.01, device=DEVICE)  # a graph reads it, rounded to fp32: so do both
    optimizer = penstock.AdamW(
        model, lr=rate, masters=masters, skip_nonfinite=True, moments=torch.bfloat16
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    runs = 0

    def run(inputs):
        nonlocal runs
        runs += 1
        loss = model(inputs).float().square().mean()
        loss.backward()
        penstock.clip_grad_norm_(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = penstock.step(model, optimizer)(run) if is_captured else run
    for number in range(12):
        inputs = batch(number, world()[0])
        if number == 8:
            inputs = inputs * float("nan")  # a step that the graph itself leaves out
        step(inputs.to(torch.bfloat16) if masters else inputs)
        schedule.step()
    values = [whole(parameter).float().cpu() for parameter in model.parameters()]
    assert all(torch.isfinite(value).all() for value in values)
    penstock.close(model)
    return [value.tolist() for value in values], runs


@on_gpus
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("masters", [False, True])
def test_a_captured_step_updates_as_an_eager_one(worlds, ranks, masters):
    eager = worlds(ranks).run(train_captured, False, masters)
    captured = worlds(ranks).run(train_captured, True, masters)
    for (wanted, _), (found, runs) in zip(eager, captured, strict=True):
        assert found == wanted and runs < 12
