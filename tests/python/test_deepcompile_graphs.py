"""Training on graphs of a real model with the operators in them, beside an unsharded run."""

import pytest
import torch
from deepcompile_training import Twins, train_both, trained
from models import Block, Frozen, Net, Tied, Unused
from torch import nn

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@STAGES
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_equal_unsharded_and_so_do_accumulated_gradients(worlds, stage, ranks):
    worlds(ranks).run(train_both, Net, stage=stage, then=(4, 4, 4), profile=True)


class Broken(Net):
    """A graph break between blocks."""

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.blocks[2](x)


def train_broken(stage):
    engine = trained(Broken, stage=stage, then=(4, 4), profile=True)
    assert sum(each.needs_backward for each in engine.order) >= 3


@STAGES
def test_graph_breaks_equal_unsharded(worlds, stage):
    worlds(2).run(train_broken, stage)


class TiedOverBreak(Tied):
    """Graphs before and after the break have the tied matrices."""

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[2](self.blocks[1](x))


def train_tied(stage):
    engine = trained(TiedOverBreak, stage=stage, then=(4, 4))
    ids = [ds_id for each in engine.order for ds_id in each.ids.values()]
    assert len(ids) - len(set(ids)) == 2


@STAGES
def test_a_parameter_of_two_graphs_gets_both_gradients(worlds, stage):
    worlds(2).run(train_tied, stage)


class WithoutReductions(nn.Module):
    """The first graph has no parameters and passes a gradient only."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        x = torch.cat([x, x[:, :2]], 1).requires_grad_()
        torch._dynamo.graph_break()
        x = torch.tanh(x).square()
        torch._dynamo.graph_break()
        return self.head(self.block(x))


@STAGES
def test_a_backward_graph_without_reductions_does_no_harm(worlds, stage):
    worlds(2).run(train_both, WithoutReductions, stage=stage, sizes=(4, 4))


def recompile_in_a_step(stage):
    engine = trained(Net, stage=stage, sizes=(4, 6, 4))
    assert len(engine.order) == 2  # a pair of graphs a shape


@STAGES
def test_a_recompile_between_micro_batches_keeps_what_was_accumulated(worlds, stage):
    worlds(2).run(recompile_in_a_step, stage)


def recompile_between_steps(stage):
    twins = Twins(Broken, stage=stage, sizes=(4, 4))
    twins.step()
    twins.engine.recompile()
    for _ in range(2):
        twins.step()
    twins.close()


@STAGES
def test_graphs_that_a_reset_replaces_go_on_where_they_were(worlds, stage):
    worlds(2).run(recompile_between_steps, stage)


@STAGES
def test_frozen_parameters_stay_and_the_others_train(worlds, stage):
    worlds(2).run(train_both, Frozen, stage=stage)


@STAGES
def test_parameters_that_no_graph_uses_do_no_harm(worlds, stage):
    worlds(2).run(train_both, Unused, stage=stage)


class OverTwo(Twins):
    """Each backward goes back over two forwards, and DeepSpeed says for each that it begins."""

    def forward(self, size):
        return super().forward(size) + super().forward(size + 1)


@STAGES
def test_backwards_over_two_forwards_equal_unsharded(worlds, stage):
    worlds(2).run(train_both, Net, stage=stage, then=(4, 4), twins=OverTwo)


def evaluate_between(stage):
    twins = Twins(Net, stage=stage)
    for _ in range(2):
        twins.step()
        with torch.no_grad():
            x = torch.ones(4, 5)
            assert torch.allclose(twins.engine(x), twins.reference(x), atol=1e-6)
    twins.close()


@STAGES
def test_evaluations_between_steps_equal_unsharded(worlds, stage):
    worlds(2).run(evaluate_between, stage)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_announced_gathers_equal_unsharded(worlds, prefetch):
    worlds(2).run(train_both, Broken, stage=3, sizes=(4, 4), prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_persistent_parameters_are_gathered_anew_after_an_update(worlds, prefetch):
    worlds(2).run(
        train_both, Broken, stage=3, sizes=(4, 4), persistent=(0, 3, 5), prefetch=prefetch
    )


class Bf16(Net):
    """Parameters and activations in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return super().forward(x.bfloat16(), rank)


@STAGES
@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=["bf16", "fp32"])
def test_gradients_of_another_dtype_equal_unsharded(worlds, stage, grad_dtype):
    worlds(2).run(
        train_both,
        Bf16,
        stage=stage,
        sizes=(4, 4),
        steps=2,
        grad_dtype=grad_dtype,
        tolerance=5e-2,
    )


class Autocast(Net):
    """Casts of fp32 parameters, which the gathers take over."""

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, rank).float()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("persistent", [(), (0, 2, 3)], ids=["released", "persistent"])
def test_gathers_in_the_dtype_of_a_cast_equal_unsharded(worlds, prefetch, persistent):
    worlds(2).run(
        train_both,
        Autocast,
        stage=3,
        sizes=(4, 4),
        steps=2,
        prefetch=prefetch,
        persistent=persistent,
        profile=True,
        tolerance=5e-2,
    )


def side_by_side():
    """Parameters' numbers of stages 1 and 2 are unique in one engine only."""
    stages = (1, 1, 2, 2, 3, 3)
    twins = [Twins(Net, stage=stage) for stage in stages]
    for _ in range(3):
        losses = [(each, each.forward(size)) for each in twins for size in each.sizes[:1]]
        for each, loss in reversed(losses):
            each.engine.backward(loss)
        for each in twins:
            each.update()
            each.done += 1
    for leaves, stays in zip(twins[::2], twins[1::2], strict=True):
        leaves.close()
        stays.step()
    for each in twins[1::2]:
        each.close()


def test_engines_of_all_stages_side_by_side_equal_unsharded(worlds):
    worlds(2).run(side_by_side)


WAITS = ("sync_before_allgather", "sync_after_allgather", "sync_before_reduce", "sync_after_reduce")
SWITCHED = {"one buffer": {"double_buffer": False}, "waits": dict.fromkeys(WAITS, True)}


@pytest.mark.parametrize("switched", SWITCHED.values(), ids=SWITCHED)
@STAGES
def test_a_switched_configuration_equals_unsharded(worlds, stage, switched):
    worlds(2).run(train_both, Net, stage=stage, sizes=(4, 4), steps=2, **switched)
