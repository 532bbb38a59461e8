"""penstock.AdamW with in_backward: the same bits as in step(); what needs gradients has them."""

import logging
from contextlib import nullcontext

import penstock
import pytest
import torch
from equality import breaking_off, whole, world
from models import DEVICE, Checkpointed, Frozen, Net, Tied, batch, loss_of, make
from penstock._engine import engine_of

on_gpus = pytest.mark.skipif(
    DEVICE != "cuda", reason="nothing is updated beside a CPU: PENSTOCK_TEST_DEVICE=cuda"
)
STEPS = 12


def values_of(model):
    return [whole(parameter).float().cpu().tolist() for parameter in model.parameters()]


def train_plainly(model, optimizer):
    for number in range(6):
        loss_of(model, number, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- equality -----------------------------------------------------------------------------------


def train(in_backward, is_captured, model_class=Net, masters=False, pieces=1, **shard):
    """Train some steps; return parameters, groups updated in backwards, and runs of the step."""
    torch.manual_seed(7)
    dtype = torch.bfloat16 if masters else torch.float32
    model = penstock.shard(make(model_class).to(dtype), **shard)
    rate = torch.tensor(0.01, device=DEVICE)
    optimizer = penstock.AdamW(
        model, lr=rate, masters=masters, moments=torch.bfloat16, in_backward=in_backward
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    runs = updates = 0

    def run(inputs):
        nonlocal runs, updates
        runs += 1
        for i, piece in enumerate(inputs.chunk(pieces)):
            is_last = i + 1 == pieces
            with nullcontext() if is_last else penstock.no_sync(model):
                model(piece).float().square().mean().backward()
        updated = penstock.stats(model, reset=True).updates
        optimizer.step()
        has_gradients = any(parameter.grad is not None for parameter in model.parameters())
        assert has_gradients == (updated == 0)
        optimizer.zero_grad()
        updates += updated

    step = penstock.step(model, optimizer)(run) if is_captured else run
    for number in range(STEPS):
        step(batch(number, world()[0]).to(dtype))
        schedule.step()
    values = values_of(model)
    penstock.close(model)
    return values, updates, runs


def check_equal(worlds, ranks, is_captured=False, **given):
    wanted = worlds(ranks).run(train, False, False, **given)
    found = worlds(ranks).run(train, True, is_captured, **given)
    for (values, _, _), (own, updates, runs) in zip(wanted, found, strict=True):
        assert own == values
        assert (updates > 0) == (DEVICE == "cuda")
        assert (runs < STEPS) == is_captured


KINDS = {
    "plain": {},
    "masters": {"masters": True},
    "tied": {"model_class": Tied},
    "frozen": {"model_class": Frozen},
    "checkpointed": {"model_class": Checkpointed},
    "stage 2": {"stage": 2},
    "in parts": {"bucket_bytes": 128, "part_bytes": 128},
    "reduced in bfloat16": {"reduce_dtype": torch.bfloat16},
    "accumulated": {"pieces": 2},
}

ON_CPUS = ("plain", "accumulated")  # where all is updated in step()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS if DEVICE == "cuda" else ON_CPUS)
def test_updates_in_backward_are_those_of_step(worlds, ranks, kind):
    check_equal(worlds, ranks, **KINDS[kind])


@on_gpus
def test_the_same_over_nccl(worlds):
    check_equal(worlds, 2, communicator="nccl")


@on_gpus
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("masters", [False, True])
def test_captured_updates_are_those_of_step(worlds, ranks, masters):
    check_equal(worlds, ranks, is_captured=True, masters=masters)


# ---- who needs gradients ------------------------------------------------------------------------


def train_with(work):
    """Two models, one with in_backward; return how often backwards have updated groups of it."""
    models = [penstock.shard(make(Net)) for _ in range(2)]
    optimizers = [penstock.AdamW(m, lr=0.01, in_backward=i == 0) for i, m in enumerate(models)]
    for number in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            work(model, optimizer, number)
            optimizer.zero_grad()
    assert values_of(models[0]) == values_of(models[1])
    updates = penstock.stats(models[0]).updates
    for model in models:
        penstock.close(model)
    return updates


def clip(model, optimizer, number):
    loss_of(model, number, 0).backward()
    penstock.clip_grad_norm_(model, 0.01)
    optimizer.step()


def clip_by_torch(model, optimizer, number):
    loss_of(model, number, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def where_gradients_lie(model, optimizer, number):
    """What `penstock.step` asks around a step is no use of gradients."""
    loss_of(model, number, 0).backward()
    assert len(engine_of(model).gradient_addresses()) == len(list(model.parameters()))
    optimizer.step()


def accumulate(model, optimizer, number):
    for piece in range(2):
        loss_of(model, number + piece, 0).backward()
    optimizer.step()


def scale(model, optimizer, number):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    scaler.scale(loss_of(model, number, 0)).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("work", [clip, clip_by_torch, accumulate, scale])
def test_what_needs_gradients_has_them(caplog, work):
    with caplog.at_level(logging.INFO, logger="penstock"):
        assert train_with(work) == 0
    said = [r.message for r in caplog.records if "updated in step()" in r.message]
    assert len(said) == 1


class Said(logging.Handler):
    """How often the library has logged in this process where it updates parameters."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        self.count += "updated in step()" in record.getMessage()


def listen_to(work):
    said, logger = Said(), logging.getLogger("penstock")
    level = logger.level
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    try:
        return train_with(work), said.count
    finally:
        logger.setLevel(level)
        logger.removeHandler(said)


@pytest.mark.parametrize("work", [clip, clip_by_torch])
def test_what_needs_gradients_has_them_between_ranks(worlds, work):
    assert worlds(2).run(listen_to, work) == [(0, 1)] * 2


def test_to_ask_where_gradients_lie_is_no_use_of_them(worlds):
    for updates, said in worlds(2).run(listen_to, where_gradients_lie):
        assert (updates > 0) == (DEVICE == "cuda") and said == 0


def test_hooks_are_called_with_gradients():
    model = penstock.shard(make(Net))
    optimizer = penstock.AdamW(model, in_backward=True)
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    for number in range(5):
        loss_of(model, number, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 5 * len(list(model.parameters())) and all(seen)
    assert penstock.stats(model).updates == 0
    penstock.close(model)


@on_gpus
def test_a_backward_behind_one_that_has_updated_is_refused():
    model = penstock.shard(make(Net))
    optimizer = penstock.AdamW(model, in_backward=True)
    train_plainly(model, optimizer)
    assert penstock.stats(model).updates > 0
    loss_of(model, 6, 0).backward()
    with pytest.raises(penstock.PenstockError, match="call step"):
        loss_of(model, 7, 0).backward()
    optimizer.step()
    loss_of(model, 8, 0).backward()
    optimizer.step()
    penstock.close(model)


@on_gpus
@pytest.mark.parametrize("steps", [True, False])
def test_a_backward_that_fails_says_what_it_leaves(caplog, steps):
    model = penstock.shard(make(Net))
    optimizer = penstock.AdamW(model, in_backward=True)
    train_plainly(model, optimizer)
    with breaking_off(model.blocks[0]):
        loss_of(model, 6, 0).backward()
    assert "some may be updated, some not" in caplog.text
    if steps:
        optimizer.step()
    optimizer.zero_grad()
    train_plainly(model, optimizer)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    penstock.close(model)


@pytest.mark.skipif(DEVICE == "cuda", reason="GPUs do it in a backward")
def test_a_backward_that_fails_counts_no_step_of_what_it_has_not_updated():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = penstock.AdamW(parameters)
    optimizer.prepare_updates({id(p): number for number, p in enumerate(parameters)})
    with pytest.raises(penstock.PenstockError, match="call step"):
        optimizer.refuse_backward()
    optimizer.break_off({id(parameters[1])})
    optimizer.refuse_backward()
    assert [float(optimizer.state[p]["step"]) for p in parameters] == [0, 1, 0]


@pytest.mark.skipif(DEVICE == "cuda", reason="GPUs do it in a backward")
def test_a_backward_that_is_refused_leaves_what_the_one_before_has_done():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = penstock.AdamW(parameters)
    optimizer.prepare_updates({id(p): number for number, p in enumerate(parameters)})
    optimizer.note_gradients()
    optimizer.break_off(set())  # of the one that is refused
    with pytest.raises(penstock.PenstockError, match="call step"):
        optimizer.refuse_backward()
    assert [float(optimizer.state[p]["step"]) for p in parameters] == [1, 1, 1]


# ---- refusals -----------------------------------------------------------------------------------


def test_what_cannot_be_is_refused():
    plain = make(Net)
    with pytest.raises(penstock.PenstockError, match="in_backward.*penstock.shard"):
        penstock.AdamW(plain, in_backward=True)
    model = penstock.shard(make(Net))
    with pytest.raises(penstock.PenstockError, match="in_backward.*skip_nonfinite"):
        penstock.AdamW(model, in_backward=True, skip_nonfinite=True)
    penstock.close(model)
