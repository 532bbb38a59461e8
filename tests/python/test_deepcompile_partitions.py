"""Stages 1 and 2 by hand: what each rank gets of gradients, and how long memory is held."""

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import assert_close
from models import DEVICE
from penstock import PenstockError, _operators, dc

SIZES = [5, 301, 1, 77, 40]
ALL = range(len(SIZES))
GRAPH = 17


class Partition:
    """The flat space of SIZES, of which this rank owns its part."""

    def __init__(self, stage: int, **config: Any) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.stage = stage
        dc.init(dist.group.WORLD, config, 64)
        part = math.ceil(sum(SIZES) / self.world)
        self.flat = torch.full((part,), math.nan, device=DEVICE)
        self.views, begin = [], 0
        for number, size in enumerate(SIZES):
            low, high = max(begin, self.rank * part), min(begin + size, (self.rank + 1) * part)
            at, count = low - self.rank * part, max(0, high - low)
            view = self.flat[at : at + count] if count else self.flat[:0]
            self.views.append((view, low - begin if count else 0))
            weight = torch.zeros(size, device=DEVICE)
            dc.register_param(number, [size], weight, *self.views[number])
            begin += size
        self.register(GRAPH)

    def register(self, graph: int) -> None:
        register = dc.register_graph_z1 if self.stage == 1 else dc.register_graph_z2
        register(graph, list(range(len(SIZES))))

    def gradient(self, number: int, step: int, rank: int | None = None) -> torch.Tensor:
        seed = 1000 * step + 10 * number + (self.rank if rank is None else rank)
        drawn = torch.randn(SIZES[number], generator=torch.Generator().manual_seed(seed))
        return drawn.to(DEVICE)

    def mean(self, number: int, *steps: int) -> torch.Tensor:
        total = sum(self.gradient(number, s, r) for s in steps for r in range(self.world))
        return total / self.world

    def check(self, *steps: int, numbers: range = ALL) -> None:
        for number in numbers:
            view, offset = self.views[number]
            wanted = self.mean(number, *steps)[offset : offset + view.numel()]
            assert_close(f"gradient {number}", view, wanted, 1e-5)

    def reduce(self, step: int, graph: int = GRAPH, numbers: range = ALL) -> None:
        for number in reversed(numbers):
            torch.ops.dc.reduce_grad(self.gradient(number, step), graph, number)


def bucket_bytes() -> int:
    return _operators.load().reduce_bucket_bytes()


STAGES = pytest.mark.parametrize("stage", [1, 2])


def accumulate(stage):
    partition = Partition(stage)
    for step in (0, 2):
        for micro in (0, 1):
            dc.start_backward(micro == 1)
            partition.reduce(step + micro)
            torch.ops.dc.end_backward([None], GRAPH, True)
            assert bucket_bytes() == 0
        partition.check(step, step + 1)
    dc.cleanup()


@STAGES
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches_add_up(worlds, stage, ranks):
    worlds(ranks).run(accumulate, stage)


def keep_the_graphs_own(stage):
    partition = Partition(stage)
    given = []
    for micro in (0, 1, 2):
        dc.start_backward(micro == 2)
        for number in range(len(SIZES)):
            given.append((partition.gradient(number, micro), number, micro))
            torch.ops.dc.reduce_grad(given[-1][0], GRAPH, number)
        torch.ops.dc.end_backward([None], GRAPH, True)
    partition.check(0, 1, 2)
    for tensor, number, micro in given:
        assert torch.equal(tensor, partition.gradient(number, micro))
    dc.cleanup()


@STAGES
def test_gradients_of_graphs_are_not_written_to(worlds, stage):
    worlds(2).run(keep_the_graphs_own, stage)


class Reducing(torch.autograd.Function):
    """A graph whose backward reduces `numbers`, or nothing."""

    @staticmethod
    def forward(ctx, x, what):
        ctx.what = what
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        partition, graph, numbers, release, *step = ctx.what
        partition.reduce(*step or [3], graph, numbers)
        if numbers:  # graphs that reduce nothing have no end_backward
            torch.ops.dc.end_backward([None], graph, release)
        return grad, None


def run_graphs(stage, parts, releasing):
    """Graphs with these parameters, in the order of the forward; one of them is to release."""
    partition = Partition(stage)
    for _ in range(3):
        x = torch.ones(2, device=DEVICE, requires_grad=True)
        y = x
        for graph, numbers in enumerate(parts):
            partition.register(graph)
            y = Reducing.apply(y, (partition, graph, numbers, graph == releasing))
        dc.start_backward(True)
        y.sum().backward()
        assert bucket_bytes() == 0
        partition.check(3)
    dc.cleanup()


@STAGES
@pytest.mark.parametrize("releasing", [0, 1])
def test_buckets_are_gone_behind_the_last_graph_that_reduces(worlds, stage, releasing):
    parts = [range(0, 2), range(2, 5)]
    worlds(2).run(run_graphs, stage, parts, releasing)


@STAGES
def test_buckets_are_gone_where_the_last_graph_reduces_nothing(worlds, stage):
    parts = [range(0), range(0, 2), range(2, 5)]
    worlds(2).run(run_graphs, stage, parts, 0)


def leave_out(stage):
    partition = Partition(stage)
    for step, numbers in enumerate([range(5), range(2, 5), range(5)]):
        dc.start_backward(True)
        partition.reduce(step, numbers=numbers)
        torch.ops.dc.end_backward([None], GRAPH, True)
        partition.check(step, numbers=numbers)
        for number in set(range(5)) - set(numbers):
            assert torch.count_nonzero(partition.views[number][0]) == 0
    dc.cleanup()


@STAGES
def test_parameters_without_a_gradient_have_zeros(worlds, stage):
    worlds(2).run(leave_out, stage)


def leave_out_at_the_boundary(stage, is_in_autograd):
    """What only earlier micro-batches had belongs to this update, and to none behind it."""
    partition = Partition(stage)

    def backward(step, numbers):
        if is_in_autograd:
            x = torch.ones(2, device=DEVICE, requires_grad=True)
            Reducing.apply(x, (partition, GRAPH, numbers, True, step)).sum().backward()
        else:
            partition.reduce(step, numbers=numbers)
            torch.ops.dc.end_backward([None], GRAPH, True)

    for _ in range(2):
        dc.start_backward(False)
        backward(0, ALL)
        dc.start_backward(True)
        backward(1, range(2))
        partition.check(0, 1, numbers=range(2))
        partition.check(0, numbers=range(2, len(SIZES)))
    dc.cleanup()


@STAGES
@pytest.mark.parametrize("is_in_autograd", [False, True], ids=["by hand", "autograd"])
def test_what_only_earlier_micro_batches_had_is_in_the_update(worlds, stage, is_in_autograd):
    worlds(2).run(leave_out_at_the_boundary, stage, is_in_autograd)


def leave_out_all_at_the_boundary():
    """Its graph has nothing to reduce, so that no end_backward comes."""
    partition = Partition(1)
    for step in range(2):
        for last in (False, True):
            x = torch.ones(2, device=DEVICE, requires_grad=True)
            numbers = [] if last else ALL
            y = Reducing.apply(x, (partition, GRAPH, numbers, True, step))
            y.register_hook(lambda grad, last=last: dc.start_backward(last))
            y.sum().backward()
        partition.check(step)
    dc.cleanup()


def test_an_update_has_what_its_last_micro_batch_has_not(worlds):
    worlds(2).run(leave_out_all_at_the_boundary)


def several_graphs(stage):
    """Parameter 1 is in both graphs; the second one is another after each micro-batch."""
    partition = Partition(stage)
    for step in (0, 10):
        for micro in range(2):
            graph = 100 + step + micro
            partition.register(graph)
            dc.start_backward(micro == 1)
            partition.reduce(step + micro, GRAPH)
            torch.ops.dc.end_backward([None], GRAPH, False)
            partition.reduce(step + micro + 5, graph, range(1, 2))
            torch.ops.dc.end_backward([None], graph, True)
        partition.check(step, step + 1, numbers=range(2, 5))
        partition.check(step, step + 1, step + 5, step + 6, numbers=range(1, 2))
    dc.cleanup()


@STAGES
def test_a_parameter_of_several_graphs_gets_all_its_gradients(worlds, stage):
    worlds(2).run(several_graphs, stage)


def bind_for_a_step():
    """As the optimizer of stage 1 does: memory of its own for each step."""
    partition = Partition(1)
    for step in range(3):
        targets = []
        for number, (view, offset) in enumerate(partition.views):
            targets.append((torch.full_like(view, math.nan), offset))
            dc.update_param_grad_buffer(number, *targets[number])
        partition.views = targets
        dc.start_backward(True)
        partition.reduce(step)
        torch.ops.dc.end_backward([None], GRAPH, True)
        partition.check(step)
        for number in range(len(SIZES)):
            dc.update_param_grad_buffer(number, torch.empty(0, device=DEVICE), 0)
            held = targets[number][0]
            held.fill_(math.nan)  # nobody has it any more
    dc.cleanup()


def test_targets_live_for_a_step(worlds):
    worlds(2).run(bind_for_a_step)


def profile(stage):
    partition = Partition(stage)
    dc.enable_profiling(True)
    dc.start_backward(True)
    partition.reduce(1)
    torch.ops.dc.end_backward([None], GRAPH, True)
    assert torch.count_nonzero(partition.flat) == 0
    dc.enable_profiling(False)
    dc.start_backward(True)
    partition.reduce(2)
    torch.ops.dc.end_backward([None], GRAPH, True)
    partition.check(2)
    dc.cleanup()


@STAGES
def test_reductions_do_nothing_while_profiling(worlds, stage):
    worlds(2).run(profile, stage)


def misuse():
    partition = Partition(2)
    dc.start_backward(True)
    with pytest.raises(RuntimeError, match=r"parameter 9 is not registered: .* \(EINVAL\)"):
        torch.ops.dc.reduce_grad(torch.ones(1, device=DEVICE), GRAPH, 9)
    with pytest.raises(RuntimeError, match="parameter 0 has 5 elements, its gradient 4"):
        torch.ops.dc.reduce_grad(torch.ones(4, device=DEVICE), GRAPH, 0)
    with pytest.raises(PenstockError, match="graphs of ZeRO-2 are registered"):
        dc.register_graph_z1(3, [0])
    with pytest.raises(PenstockError, match=r"elements \[3, 6\) are not all of its 5"):
        dc.update_param_grad_buffer(0, torch.ones(3, device=DEVICE), 3)
    partition.reduce(1)
    torch.ops.dc.end_backward([None], GRAPH, True)
    partition.check(1)
    dc.cleanup()


def test_misuse_is_named_and_leaves_the_rest_as_it_was(worlds):
    worlds(2).run(misuse)


def go_back_over_two_forwards(lasts):
    """DeepSpeed says for each forward's output that the backward begins."""
    partition = Partition(2)
    for last in lasts:
        x = torch.ones(2, device=DEVICE, requires_grad=True)
        outputs = [Reducing.apply(x, (partition, GRAPH, ALL, False)) for _ in range(2)]
        for output in outputs:
            output.register_hook(lambda grad, last=last: dc.start_backward(last))
        sum(outputs).sum().backward()
    partition.check(*[3] * 2 * len(lasts))
    dc.cleanup()


@pytest.mark.parametrize("lasts", [(True,), (False, True)])
def test_a_backward_over_two_forwards_begins_once(worlds, lasts):
    worlds(2).run(go_back_over_two_forwards, lasts)


def let_a_buffer_go():
    """A backward is broken off when a bucket has left, and the buffer for its sums is replaced."""
    rank, size = dist.get_rank(), 1 << 20
    dc.init(dist.group.WORLD, {}, size)
    first = rank * (size // 2)
    buffers = [torch.zeros(size // 2, device=DEVICE) for _ in range(2)]
    dc.register_param(0, [size], torch.zeros(size, device=DEVICE), buffers[0], first)
    dc.register_graph_z1(GRAPH, [0])
    for factor in (1.0, 2.0):
        dc.start_backward(True)
        if factor > 1:
            time.sleep(0.5 * rank)
        torch.ops.dc.reduce_grad(torch.full((size,), factor, device=DEVICE), GRAPH, 0)
        if factor == 1:
            torch.ops.dc.end_backward([None], GRAPH, True)
    torch.ops.dc.reduce_grad(torch.ones(size, device=DEVICE), GRAPH, 0)  # the one before leaves
    dc.update_param_grad_buffer(0, buffers[1], first)
    buffers[0].fill_(7)  # it is somebody else's now
    dist.barrier()
    dc.start_backward(True)
    torch.ops.dc.reduce_grad(torch.full((size,), 3.0, device=DEVICE), GRAPH, 0)
    torch.ops.dc.end_backward([None], GRAPH, True)
    assert torch.all(buffers[0] == 7)
    assert torch.all(buffers[1] == 3)
    dc.cleanup()


def test_nothing_writes_to_a_buffer_that_was_replaced(worlds):
    worlds(2).run(let_a_buffer_go)
