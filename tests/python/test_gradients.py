"""What becomes of gradients that are kept, that a backward fails to bring, that nobody wants."""

import logging
from contextlib import contextmanager

import equality
import models
import penstock
import torch
from equality import (
    accumulate_reference,
    assert_close,
    both_ways,
    breaking_off,
    finish,
    pair,
    whole,
    world,
)
from models import Net, loss_of
from penstock._engine import engine_of
from penstock._world import local_of


@contextmanager
def logged():
    """What the package logs in the meantime."""

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    found, handler = [], Handler()
    logging.getLogger("penstock").addHandler(handler)
    yield found
    logging.getLogger("penstock").removeHandler(handler)


def fail_behind_reductions(stage):
    """What a backward was added to when it failed is gone, the rest is as before."""
    rank, _ = world()
    reference, sharded = pair(stage, bucket_bytes=256)
    accumulate_reference(reference, 0)
    loss_of(sharded, 0, rank).backward()
    before = {name: parameter.grad for name, parameter in sharded.named_parameters()}
    with breaking_off(sharded.blocks[0]), logged() as log:
        loss_of(sharded, 1, rank).backward()
    lost = [name for name, parameter in sharded.named_parameters() if parameter.grad is None]
    assert "head.weight" in lost and "embed.weight" not in lost, lost
    twins = dict(reference.named_parameters())
    for name, parameter in sharded.named_parameters():
        if name not in lost:
            assert parameter.grad is before[name], name
            assert_close(name, whole(parameter.grad), twins[name].grad, equality.TOLERANCE)
    assert "Net: a backward failed" in log[0] and f"and {len(lost) - 5} more" in log[0], log
    assert penstock.stats(sharded, reset=True).broken_backwards == 1
    assert penstock.stats(sharded).broken_backwards == 0
    for model in (reference, sharded):
        model.zero_grad()
    for step in (2, 3):
        accumulate_reference(reference, step)
        loss_of(sharded, step, rank).backward()
    finish(reference, sharded)


@both_ways
def test_a_backward_that_fails_gives_up_the_gradients_that_it_was_added_to(worlds, stage):
    worlds(2).run(fail_behind_reductions, stage)


def use_a_kept_graph(stage):
    """One forward of a block, several of another behind it, with backwards between them."""
    rank, size = world()
    reference, sharded = pair(stage)

    def losses(model, rank, share):
        first, second, third = model.blocks
        inputs = torch.ones(2, 7, device=models.DEVICE) + rank
        kept = first(inputs)
        for factor in (1.0, 2.0):
            yield second(kept * factor).square().mean()
        cut = kept.detach().requires_grad_()
        yield from (third(cut * factor).square().mean() for factor in (1.0, 2.0))
        yield (kept * cut.grad / share).sum()

    for other in range(size):
        for loss in losses(reference, other, 1 / size):
            (loss / size).backward(retain_graph=True)
    for loss in losses(sharded, rank, 1):
        loss.backward(retain_graph=True)
    finish(reference, sharded)


@both_ways
def test_a_graph_that_is_kept_over_other_passes_goes_backward_again(worlds, stage):
    for size in (1, 2):
        worlds(size).run(use_a_kept_graph, stage)


class Sum(torch.nn.Module):
    """Whose gradients are what goes in."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(5, 3, dtype=dtype))

    def forward(self, x):
        return (x * self.weight).sum(dtype=torch.float32)


def add_up(dtype, **options):
    """256, 1 and 1, of which the last backward reduces."""
    model = penstock.shard(Sum(dtype).to(models.DEVICE), **options)
    large, small = (torch.full((5, 3), value, device=models.DEVICE) for value in (256.0, 1.0))
    with penstock.no_sync(model):
        model(large).backward()
        model(small).backward()
    model(small).backward()
    gradient = whole(model.weight.grad)
    penstock.close(model)
    return gradient.dtype, gradient.unique().tolist()


def keep_gradients_in_their_dtype():
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, param_dtype, reduce_dtype in (
        (fp32, bf16, fp32),
        (bf16, None, fp32),
        (fp32, None, bf16),
        (fp32, torch.float16, bf16),
    ):
        options = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        assert add_up(dtype, **options) == (dtype, [258.0]), options


def test_gradients_that_are_kept_add_up_in_the_dtype_that_they_travel_in(worlds):
    """As FSDP2 does: 256 + 1 is 256 in bf16."""
    worlds(2).run(keep_gradients_in_their_dtype)


class OwnParameters(Net):
    """The root has some of its own, before and behind the blocks."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.rand(1, models.WIDTH) + 0.5)
        self.shift = torch.nn.Parameter(torch.rand(1, models.WIDTH))

    def run_blocks(self, x, rank):
        return super().run_blocks(x * self.gain, rank) + self.shift


def freeze_later(stage):
    rank, _ = world()
    for kind, frozen in ((Net, "blocks.1.up"), (OwnParameters, "gain")):
        reference, sharded = pair(stage, kind)
        for step in range(3):
            if step == 1:
                for model in (reference, sharded):
                    for name, parameter in model.named_parameters():
                        parameter.requires_grad_(not name.startswith(frozen))
                    model.zero_grad()
            accumulate_reference(reference, step)
            loss_of(sharded, step, rank).backward()
        finish(reference, sharded)


@both_ways
def test_parameters_frozen_after_shard_get_no_gradient(worlds, stage):
    worlds(2).run(freeze_later, stage)


def keep_alone(stage):
    """One rank: gradients are those of autograd until a backward adds to them."""
    reference, sharded = pair(stage, bucket_bytes=256)
    for step in range(3):
        accumulate_reference(reference, step)
        loss_of(sharded, step, 0).backward()
        local = [local_of(p.grad) for p in sharded.blocks[0].parameters()]
        memory = {gradient.untyped_storage().data_ptr() for gradient in local}
        assert len(memory) == (len(local) if step == 0 else 1), "copied, or not added to"
        if step == 1:
            before = [p.grad.clone() for p in sharded.parameters()]
            with breaking_off(sharded.head), logged():
                loss_of(sharded, step, 0).backward()
            for one, parameter in zip(before, sharded.parameters(), strict=True):
                assert parameter.grad is not None and torch.equal(one, parameter.grad)
    finish(reference, sharded)


@both_ways
def test_one_rank_keeps_the_gradients_of_autograd(worlds, stage):
    worlds(1).run(keep_alone, stage)


class Narrow(torch.nn.Module):
    """Its bias has one row, which is on one rank alone."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x)


def find_addresses():
    """By parameter: whether the engine sees a gradient, before a backward and behind it."""
    model = penstock.shard(Narrow().to(models.DEVICE))
    engine = engine_of(model)
    found = [engine.gradient_addresses()]
    model(torch.ones(2, 3, device=models.DEVICE)).sum().backward()
    found.append(engine.gradient_addresses())
    penstock.close(model)
    return [[address is not None and address != 0 for address in each] for each in found]


def test_ranks_without_rows_have_gradients_at_an_address_too(worlds):
    assert worlds(2).run(find_addresses) == [[[False, False], [True, True]]] * 2
