"""A model of stage 3 goes on in stage 2 where that takes no more memory than what would stay."""

import logging
from contextlib import nullcontext

import penstock
import pytest
import torch
from equality import make_mesh, whole, world
from models import DEVICE, Checkpointed, Frozen, Half, Net, Tied, Twice, batch, loss_of, make
from penstock import _budget, _keeping
from penstock._engine import engine_of
from penstock._world import local_of

AMPLE = "auto" if DEVICE == "cuda" else 1 << 40
WITHOUT = {"memory": None, "checkpoint": None}
DECIDED = 4  # steps
MANY = 2 * _keeping._INTERVAL  # steps
RATE = 2**-7  # the same in float32, in which a captured step has it

OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "torch's": lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, fused=True),
    "own": lambda model: penstock.AdamW(model, lr=RATE),
    "in backward": lambda model: penstock.AdamW(model, lr=RATE, in_backward=True),
    "with masters": lambda model: penstock.AdamW(model, lr=RATE, masters=True, in_backward=True),
}


class Trainer:
    """A sharded model, its optimizer, and what its steps have shown."""

    def __init__(self, kind=Net, optimizer="torch's", **shard):
        torch.manual_seed(7)
        self.model = penstock.shard(make(kind), **{"prefetch_ahead": 1, "memory": AMPLE, **shard})
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.engine = engine_of(self.model)
        self.steps, self.losses, self.stages = 0, [], []

    def step(self, pieces=1, set_to_none=True, size=4):
        for piece in range(pieces):
            inputs = batch(100 * self.steps + piece, world()[0], size)
            loss = self.model(inputs, world()[0]).float().square().mean()
            loss.backward()
            self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.steps += 1
        self.stages.append(self.engine.stage)

    def train(self, steps, **how):
        for _ in range(steps):
            self.step(**how)
        return self.engine.stage

    def finish(self):
        """Return losses, and what is trained."""
        values = [whole(p).float().cpu().tolist() for p in self.model.parameters()]
        penstock.close(self.model)
        return self.losses, values


def addresses_of(optimizer):
    """Return where what belongs to the optimizer lies."""
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    values = [value for state in states for value in state.values()]
    return [local_of(value).data_ptr() for value in values if isinstance(value, torch.Tensor)]


def go_on(steps=10, how=None, **options):
    without = Trainer(**{**options, **WITHOUT})
    without.train(steps, **(how or {}))
    trainer = Trainer(**options)
    parameters = list(trainer.model.parameters())
    assert trainer.train(DECIDED - 1, **(how or {})) == 3
    states = addresses_of(trainer.optimizer)
    assert trainer.train(1, **(how or {})) == 2
    assert addresses_of(trainer.optimizer) == states
    trainer.train(steps - DECIDED, **(how or {}))
    assert trainer.stages == [3] * (DECIDED - 1) + [2] * (steps - DECIDED + 1)
    assert all(p is q for p, q in zip(parameters, trainer.model.parameters(), strict=True))
    figures = penstock.stats(trainer.model)
    assert figures.deviations == 0 and figures.predicted_pass_ns > 0
    assert trainer.finish() == without.finish()  # bit for bit


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_trained_stays_the_same(worlds, optimizer):
    kind = Half if optimizer == "with masters" else Net
    worlds(2).run(go_on, kind=kind, optimizer=optimizer)


@pytest.mark.parametrize("kind", [Tied, Twice, Checkpointed])
def test_models_of_other_kinds_stay_the_same(worlds, kind):
    worlds(2).run(go_on, kind=kind, optimizer="in backward")


@pytest.mark.parametrize("how", [{"pieces": 3}, {"set_to_none": False}])
def test_gradients_that_add_up_stay_the_same(worlds, how):
    worlds(2).run(go_on, how=how)


def keep_activations():
    go_on(checkpoint="auto")
    trainer = Trainer(checkpoint="auto")
    trainer.train(MANY)
    assert penstock.stats(trainer.model).kept_blocks == 3 and trainer.engine.stage == 2
    trainer.finish()


def test_activations_are_kept_beside(worlds):
    worlds(2).run(keep_activations)


def go_on_in_replicas():
    names = ("replicate", "shard")
    go_on(mesh=make_mesh((world()[1] // 2, 2), names))


def test_replicas_go_on_together(worlds):
    worlds(4).run(go_on_in_replicas)


def stay_in_stage_3(memory):
    trainer = Trainer(memory=memory[world()[0]], prefetch_ahead=0)
    assert trainer.train(10) == 3
    trainer.finish()


@pytest.mark.skipif(DEVICE == "cuda", reason="bytes of CPUs are those beside the step")
def test_ranks_stay_in_stage_3_where_one_has_no_memory(worlds):
    worlds(2).run(stay_in_stage_3, [1 << 40, 1])


# ---- what users see ------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        logger = logging.getLogger("penstock")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record):
        self.lines.append(record.getMessage())


def look():
    seen = Lines()
    trainer = Trainer()
    trainer.train(DECIDED - 1)
    assert "stage=3" in repr(trainer.model)
    trainer.train(MANY)
    assert "stage=2" in repr(trainer.model)
    (line,) = [line for line in seen.lines if "gathered ahead" in line]
    assert "all stay, as in stage 2, which takes no more and gathers nothing twice" in line
    for stage in (2, 3):
        ops = penstock.get_recorded_ops(trainer.model)
        penstock.compile(trainer.model, recorded_ops=ops, zero_stage=stage)
    with pytest.raises(penstock.PenstockError, match="was sharded with stage=3"):
        penstock.compile(trainer.model, recorded_ops=ops, zero_stage=1)
    trainer.finish()


def test_the_log_and_the_model_say_so(worlds):
    worlds(2).run(look)


# ---- not now -------------------------------------------------------------------------------------


def hold_state(trainer):
    return trainer.model.state_dict() if world()[0] == 1 else None


def hold_rows(trainer):
    with torch.no_grad():
        return trainer.model.head.weight.to_local() if world()[0] == 0 else None


def hold_output(trainer):
    output = loss_of(trainer.model, 0, world()[0])
    return output if world()[0] == 1 else None


def wait(hold):
    without = Trainer(**WITHOUT)
    without.train(DECIDED + 2 * MANY)
    trainer = Trainer()
    trainer.train(1)
    held = hold(trainer)
    assert trainer.train(DECIDED - 1 + MANY) == 3
    if isinstance(held, torch.Tensor):
        assert torch.isfinite(held.detach()).all()
    del held
    assert trainer.train(MANY) == 2
    assert trainer.finish() == without.finish()


@pytest.mark.parametrize("hold", [hold_state, hold_rows, hold_output])
def test_what_somebody_holds_is_waited_for(worlds, hold):
    worlds(2).run(wait, hold)


def go_on_behind_a_trace(path):
    trainer = Trainer()
    with penstock.trace(trainer.model, path / "{rank}.json") if world()[0] == 0 else nullcontext():
        assert trainer.train(DECIDED + MANY) == 3
    assert trainer.train(MANY) == 2
    trainer.finish()


def test_the_end_of_a_trace_is_waited_for(worlds, tmp_path):
    worlds(2).run(go_on_behind_a_trace, tmp_path)


# ---- and back ------------------------------------------------------------------------------------


def grow(**options):
    """One rank finds that its peak goes over what there is."""
    without = Trainer(**{**options, **WITHOUT})
    without.train(DECIDED + 5 * MANY)
    trainer = Trainer(**options)
    assert trainer.train(DECIDED + MANY) == 2
    left_at_peak, peak_of = _budget.left_at_peak, _budget.peak_of
    if world()[0] == 1:
        _budget.left_at_peak, _budget.peak_of = lambda *_: -(1 << 40), lambda _: 1 << 50
    try:
        assert trainer.train(MANY) == 3
    finally:
        _budget.left_at_peak, _budget.peak_of = left_at_peak, peak_of
    trainer.train(3 * MANY)
    changes = [a != b for a, b in zip(trainer.stages, trainer.stages[1:], strict=False)]
    assert sum(changes) == 2 and trainer.stages[-1] == 3
    assert trainer.finish() == without.finish()


@pytest.mark.parametrize("checkpoint", [None, "auto"])
def test_steps_that_grow_go_back_once(worlds, checkpoint):
    worlds(2).run(grow, checkpoint=checkpoint, optimizer="in backward")


def unfreeze():
    trainer = Trainer(Frozen)
    assert trainer.train(DECIDED) == 2
    trainer.model.requires_grad_(True)
    assert trainer.train(1) == 3
    assert trainer.train(DECIDED) == 2
    trainer.finish()


def test_parameters_that_are_unfrozen_begin_with_the_stage_that_was_asked_for(worlds):
    worlds(2).run(unfreeze)


# ---- captured ------------------------------------------------------------------------------------


def capture(steps=24):
    without, trainer = (Trainer(optimizer="in backward", memory=m) for m in (None, AMPLE))
    step = penstock.step(trainer.model, trainer.optimizer)(train_on(trainer))
    plain = train_on(without)
    for number in range(steps):
        inputs = batch(number, world()[0])
        trainer.losses.append(step(inputs).item())
        trainer.stages.append(trainer.engine.stage)
        without.losses.append(plain(inputs).item())
    assert trainer.stages == [3] * (DECIDED - 1) + [2] * (steps - DECIDED + 1)
    if DEVICE == "cuda":
        assert penstock.stats(trainer.model).timed_graphs > 0
    assert trainer.losses == without.losses
    assert trainer.finish() == without.finish()


def train_on(trainer):
    def run(inputs):
        loss = trainer.model(inputs).square().mean()
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss

    return run


def test_a_captured_step_is_one_of_stage_2(worlds):
    worlds(2).run(capture)
