"""penstock.step: captured steps equal eager ones bit for bit; what cannot be captured goes on."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace

import penstock
import penstock.trace as tool
import pytest
import torch
from equality import make_mesh, whole, world
from models import (
    DEVICE,
    Block,
    Checkpointed,
    CheckpointedReentrant,
    Frozen,
    Net,
    Tied,
    batch,
    loss_of,
    make,
)
from penstock._engine import engine_of
from penstock._step import _kind_of
from torch import nn

on_gpus = pytest.mark.skipif(
    DEVICE != "cuda", reason="CUDA graphs want a GPU: PENSTOCK_TEST_DEVICE=cuda"
)
STEPS, MANY = 12, 200


class Dropping(Net):
    """Dropout in each block, so that each step draws other numbers."""

    def run_blocks(self, x, rank):
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.3, self.training)
        return x


class Broad(Net):
    """Some of its matrices have rows that are long enough for scales of their own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for i in range(3))


class DroppingBlock(Block):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


class DroppingWithin(Net):
    """Dropout within blocks: a block that is run anew draws the same numbers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock(11 + 2 * i) for i in range(3))


class Trainer:
    """A sharded model, its optimizer and schedule, and how a step goes."""

    def __init__(
        self,
        model_class,
        *,
        is_captured,
        clips=False,
        pieces=1,
        compiles=False,
        zeroes_first=False,
        **shard,
    ):
        torch.manual_seed(7)
        self.model = make(model_class)
        if compiles:
            for block in self.model.blocks:
                block.compile()
        penstock.shard(self.model, **shard)
        rate = torch.tensor(0.01, device=DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, capturable=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.clips, self.pieces, self.zeroes_first = clips, pieces, zeroes_first
        self.runs = 0
        self.step = self.run
        if is_captured:
            self.step = penstock.step(self.model, self.optimizer)(self.run)

    def run(self, inputs):
        self.runs += 1
        if self.zeroes_first:
            self.optimizer.zero_grad()
        for piece in inputs.chunk(self.pieces):
            loss = self.model(piece).square().mean()
            loss.backward()
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        if not self.zeroes_first:
            self.optimizer.zero_grad()
        return loss

    def train(self, steps=STEPS, first=0):
        losses = []
        for step in range(first, first + steps):
            losses.append(self.step(batch(step, world()[0])).detach())
            self.schedule.step()
        return losses

    def values(self):
        return [whole(parameter) for parameter in self.model.parameters()]


def both(model_class, steps, **options):
    """Train eagerly, then captured, from one seed."""
    trained = []
    for is_captured in (False, True):
        trainer = Trainer(model_class, is_captured=is_captured, **options)
        torch.manual_seed(11)
        losses = trainer.train(steps)
        trained.append((losses, trainer.values(), trainer.runs))
        penstock.close(trainer.model)
    return trained


def assert_equal(model_class, options):
    steps = MANY if options.pop("many", False) else STEPS
    (losses, values, runs), (captured_losses, captured_values, captured_runs) = both(
        model_class, steps, **options
    )
    assert runs == steps and 2 <= captured_runs < STEPS, "it was not captured"
    assert [x.item() for x in losses] == [x.item() for x in captured_losses]
    for one, other in zip(values, captured_values, strict=True):
        assert torch.equal(one, other)


WAYS = {
    "plain": (Net, {"many": True}),
    "stage1": (Net, {"stage": 1}),
    "stage2": (Net, {"stage": 2}),
    "dropout": (Dropping, {"many": True}),
    "zeroed first": (Net, {"zeroes_first": True, "many": True}),
    "clipped": (Net, {"clips": True}),
    "accumulated": (Net, {"pieces": 2}),
    "compiled": (Net, {"compiles": True}),
    "checkpointed": (Checkpointed, {}),
    "reentrant": (CheckpointedReentrant, {}),
    "blocks checkpointed": (DroppingWithin, {"checkpoint": "blocks.*"}),
    "checkpointed as measured": (DroppingWithin, {"checkpoint": "auto"}),
    "accumulated and checkpointed": (Net, {"pieces": 2, "checkpoint": "auto"}),
    "frozen": (Frozen, {}),
    "tied": (Tied, {}),
    "bfloat16": (Net, {"param_dtype": torch.bfloat16}),
    "cast behind updates": (Net, {"param_dtype": torch.bfloat16, "keep_copies": True}),
    "float8": (Broad, {"param_dtype": torch.float8_e4m3fn}),
}


@on_gpus
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "communicator"), [(1, "auto"), (2, "ce"), (2, "nccl")])
def test_captured_steps_equal_eager_ones(worlds, size, communicator, way):
    if torch.cuda.device_count() < size:
        pytest.skip(f"wants {size} GPUs")
    worlds(size).run(check_way, way, communicator)


def check_way(way, communicator):
    model_class, options = WAYS[way]
    assert_equal(model_class, {**options, "communicator": communicator})


def check_replicas(communicator):
    mesh = make_mesh((2, 1), ("replicate", "shard"))
    assert_equal(Net, {"mesh": mesh, "communicator": communicator})


@on_gpus
@pytest.mark.parametrize("communicator", ["auto", "nccl"])
def test_captured_steps_of_replicas_equal_eager_ones(worlds, communicator):
    worlds(2).run(check_replicas, communicator)


# ---- accumulation outside of the function --------------------------------------------------------


def accumulate_outside():
    """Capture the backwards alone; the optimizer steps behind each third one."""
    found = []
    for is_captured in (False, True):
        torch.manual_seed(7)
        model = make(Net)
        penstock.shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        runs = 0

        def add(inputs, model=model):
            nonlocal runs
            runs += 1
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        add_gradients = penstock.step(model)(add) if is_captured else add
        losses = []
        for step in range(36):
            losses.append(add_gradients(batch(step, world()[0])).item())
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert runs == 36 or (is_captured and runs < 24), runs
        found.append((losses, [whole(parameter) for parameter in model.parameters()]))
        penstock.close(model)
    (losses, values), (captured_losses, captured_values) = found
    assert losses == captured_losses
    for one, other in zip(values, captured_values, strict=True):
        assert torch.equal(one, other)


@on_gpus
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_add_up_over_captured_calls(worlds, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"wants {size} GPUs")
    worlds(size).run(accumulate_outside)


# ---- between captured steps ---------------------------------------------------------------------


def mix():
    """Evaluate, save, load and train eagerly between captured steps."""
    values = []
    for is_captured in (False, True):
        trainer = Trainer(Net, is_captured=is_captured)
        trainer.train(6)
        trainer.model.eval()
        with torch.no_grad():
            values.append([trainer.model(batch(50, 0)).clone()])
        trainer.model.train()
        saved = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train(2, 6)
        trainer.run(batch(8, world()[0]))
        trainer.train(2, 9)
        trainer.model.load_state_dict(saved)
        trainer.train(2, 11)
        trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
        trainer.train(4, 13)
        trainer.model.norm.weight.requires_grad_(False)
        trainer.train(6, 17)
        trainer.model.norm.weight.requires_grad_(True)
        trainer.train(6, 23)
        values[-1] += trainer.values()
        penstock.close(trainer.model)
    for one, other in zip(*values, strict=True):
        assert torch.equal(one, other)


@on_gpus
def test_what_comes_between_captured_steps_sees_their_values(worlds):
    worlds(1).run(mix)


def change_shapes():
    trainer = Trainer(Net, is_captured=True)
    reference = Trainer(Net, is_captured=False)
    for step in range(40):
        inputs = batch(step, 0)[: 1 + step % 3]
        assert trainer.step(inputs).item() == reference.step(inputs).item()
    assert trainer.runs < 20
    penstock.close(trainer.model)
    penstock.close(reference.model)


def trace_captured(folder):
    trainer = Trainer(Net, is_captured=True)
    trainer.train()
    engine_of(trainer.model).native.drain()  # a graph on its way would be in the first trace, too
    runs = trainer.runs
    for number in range(10):
        path = f"{folder}/{number}-{{rank}}.json"
        with penstock.trace(trainer.model, path) as recording:
            trainer.train(3, first=STEPS + 3 * number)
        lanes = [track for track in tool.load(recording).of_rank(world()[0]) if track.is_lane]
        names = [one.name for lane in lanes for one in lane.slices]
        assert names.count("graph of a step") == 3, names
    assert trainer.runs == runs
    penstock.close(trainer.model)


@on_gpus
@pytest.mark.parametrize("size", [1, 2])
def test_a_trace_has_each_captured_step(worlds, size, tmp_path):
    worlds(size).run(trace_captured, str(tmp_path))


@on_gpus
def test_each_shape_is_captured(worlds):
    worlds(1).run(change_shapes)


class Messages(logging.Handler):
    """What is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def synchronize_within():
    """A step that asks the device for a number cannot be captured, and trains all the same."""
    messages = Messages()
    logging.getLogger("penstock").addHandler(messages)
    trainer = Trainer(Dropping, is_captured=False)
    other = Trainer(Dropping, is_captured=False)

    @penstock.step(trainer.model, trainer.optimizer)
    def train_step(inputs):
        loss = trainer.model(inputs).square().mean()
        if loss.item() < 0:  # here
            raise ValueError
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss

    for step in range(8):
        torch.manual_seed(step)
        loss = train_step(batch(step, 0)).item()
        torch.manual_seed(step)
        assert loss == other.run(batch(step, 0)).item()
    for one, two in zip(trainer.values(), other.values(), strict=True):
        assert torch.equal(one, two)
    told = [line for line in messages.lines if "is not captured" in line]
    assert len(told) == 1 and "test_step.py" in told[0] and "train_step" in told[0], told
    penstock.close(trainer.model)
    penstock.close(other.model)


@on_gpus
def test_what_cannot_be_captured_goes_on_with_one_warning(worlds):
    worlds(1).run(synchronize_within)


# ---- without a GPU ------------------------------------------------------------------------------


def train_on_host():
    messages = Messages()
    logging.getLogger("penstock").addHandler(messages)
    model, reference = penstock.shard(make(Net)), make(Net)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    rank, size = world()

    @penstock.step(model, optimizers[0])
    def train_step(step):
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss

    for step in range(5):
        train_step(step)
        (sum(loss_of(reference, step, r) for r in range(size)) / size).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(one), other.detach(), rtol=1e-4, atol=1e-5)
    assert train_step.__name__ == "train_step"
    assert len([line for line in messages.lines if "is not captured" in line]) == 1
    penstock.close(model)


def test_what_tells_calls_apart_is_always_hashable():
    @dataclass(frozen=True)
    class Listing:
        values: list[int]

    listing, other = Listing([1]), Listing([1])
    values = [1, 1.0, True, "1", (1,), [1], listing, other]
    kinds = {_kind_of(value) for value in values}
    assert len(kinds) == len(values)
    assert _kind_of(listing) == _kind_of(listing) and _kind_of("a b") == _kind_of("a b")


@pytest.mark.skipif(DEVICE == "cuda", reason="this is what CPUs do")
def test_a_capture_that_does_not_begin_leaves_the_engine_on_its_stream(monkeypatch):
    model = penstock.shard(make(Net))
    engine = engine_of(model)
    monkeypatch.setattr("penstock._engine.stream_of", lambda device: 7)
    with (
        pytest.raises(penstock.PenstockError, match="EUNSUPPORTED|captur"),
        engine.captured(SimpleNamespace(cuda_stream=7), ()),
    ):
        pass
    assert engine.stream == 0
    monkeypatch.undo()
    loss_of(model, 0, 0).backward()
    penstock.close(model)


@pytest.mark.skipif(DEVICE == "cuda", reason="this is what CPUs do")
def test_a_step_on_cpus_trains_as_it_is(worlds):
    worlds(2).run(train_on_host)
