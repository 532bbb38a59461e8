"""What training scripts do beyond forward, backward, step: accumulation, evaluation, clipping."""

from contextlib import nullcontext

import equality
import models
import penstock
import pytest
import torch
from equality import (
    accumulate_reference,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    both_ways,
    breaking_off,
    finish,
    pair,
    sgd,
    train_both,
    whole,
    world,
)
from models import Net, loss_of, make
from torch.distributed.tensor import DTensor


def accumulate(stage, local):
    rank, _ = world()
    reference, sharded = pair(stage)
    for step in range(3):
        accumulate_reference(reference, step)
        if local and step < 2:
            with penstock.no_sync(sharded):
                loss_of(sharded, step, rank).backward()
            assert all(p.grad is None for p in sharded.parameters())
        else:
            loss_of(sharded, step, rank).backward()
    finish(reference, sharded)


@both_ways
@pytest.mark.parametrize("local", [False, True], ids=["sync", "no_sync"])
def test_gradients_accumulate_over_backwards(worlds, stage, local):
    worlds(2).run(accumulate, stage, local)


def accumulate_then_use_part():
    """What was accumulated locally is reduced even where the reducing backward does not come."""
    rank, size = world()
    reference, sharded = pair()

    def part(model, step, rank):
        return model.embed(models.batch(step, rank)).square().mean()

    accumulate_reference(reference, 0)
    for r in range(size):
        inputs = torch.ones(2, 7, device=models.DEVICE) + r
        (reference.blocks[0](inputs).square().mean() / size).backward()
    with penstock.no_sync(sharded):
        loss_of(sharded, 0, rank).backward()
    sharded.blocks[0](torch.ones(2, 7, device=models.DEVICE) + rank).square().mean().backward()
    finish(reference, sharded)


def test_local_gradients_are_reduced_by_a_backward_that_does_not_reach_them(worlds):
    worlds(2).run(accumulate_then_use_part)


def accumulate_onto_changed_gradients(stage):
    """Gradients that the caller zeroed, replaced or dropped between two backwards."""
    rank, _ = world()
    reference, sharded = pair(stage)
    for step in range(2):
        accumulate_reference(reference, step)
        loss_of(sharded, step, rank).backward()
        for model in (reference, sharded):
            model.head.weight.grad = model.head.weight.grad * 2
            model.blocks[0].up.weight.grad = None
            model.blocks[1].zero_grad(set_to_none=False)
    finish(reference, sharded)


def penalty_of(model):
    """A graph that uses the shards themselves."""
    norms = [p.square().sum() for p in model.parameters()]
    return sum(x.full_tensor() if isinstance(x, DTensor) else x for x in norms)


def add_a_penalty(stage, is_before):
    rank, _ = world()
    reference, sharded = pair(stage)
    for step in range(3):  # onto gradients of the step before
        accumulate_reference(reference, step)
        penalty_of(reference).backward()
        penalty = penalty_of(sharded) if is_before else None
        loss = loss_of(sharded, step, rank)
        (loss + (penalty_of(sharded) if penalty is None else penalty)).backward()
    finish(reference, sharded)


@both_ways
@pytest.mark.parametrize("is_before", [False, True], ids=["behind", "before"])
def test_gradients_of_shards_themselves_are_added(worlds, stage, is_before):
    worlds(2).run(add_a_penalty, stage, is_before)


def fail_in_a_hook(stage):
    """Old gradients, and new ones, are there when a hook of one parameter fails."""
    rank, _ = world()
    reference, sharded = pair(stage)
    for step in range(2):
        accumulate_reference(reference, step)
    loss_of(sharded, 0, rank).backward()

    def fail(parameter):
        raise ValueError("once")

    handle = sharded.head.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="once"):
        loss_of(sharded, 1, rank).backward()
    handle.remove()
    finish(reference, sharded)


@both_ways
def test_a_hook_that_fails_takes_no_gradients_along(worlds, stage):
    worlds(2).run(fail_in_a_hook, stage)


def fail_at_a_release(stage, name):
    """What was there before is there as soon as a backward has failed, and not again."""
    rank, _ = world()
    reference, sharded = pair(stage)
    accumulate_reference(reference, 0)
    loss_of(sharded, 0, rank).backward()
    module = sharded.get_submodule(name)

    @torch.no_grad()
    def write(gradient):
        module.bias.mul_(1.0)  # which its backward does not need

    def watch(module, inputs, output):
        output.register_hook(write)

    handle = module.register_forward_hook(watch)
    loss = loss_of(sharded, 1, rank)
    handle.remove()
    with pytest.raises(penstock.PenstockError, match="were written") as failure:
        loss.backward()
    assert_same_gradients(sharded, reference, equality.TOLERANCE)
    for model in (reference, sharded):
        model.zero_grad()
    del failure
    assert all(p.grad is None for p in sharded.parameters())
    loss_of(sharded, 2, rank).backward()
    accumulate_reference(reference, 2)
    finish(reference, sharded)


@both_ways
@pytest.mark.parametrize("name", ["blocks.1.up", "embed"])
def test_a_backward_that_fails_takes_no_gradients_along(worlds, stage, name):
    worlds(2).run(fail_at_a_release, stage, name)


@both_ways
def test_gradients_changed_by_the_caller_are_added_to(worlds, stage):
    worlds(2).run(accumulate_onto_changed_gradients, stage)


def evaluate_between(stage):
    rank, _ = world()

    def evaluate(model):
        with torch.no_grad():
            for step in (7, 8):
                assert torch.isfinite(loss_of(model, step, rank))

    penstock.close(train_both(Net, steps=4, between=evaluate, stage=stage))


@both_ways
def test_evaluation_between_steps_changes_nothing(worlds, stage):
    worlds(2).run(evaluate_between, stage)


def evaluate_inside(stage):
    """An evaluation between a forward and its backward."""
    rank, _ = world()

    def loss(model, step, rank):
        value = loss_of(model, step, rank)
        with torch.no_grad():
            model.eval()
            loss_of(model, step + 1, rank)
            model.train()
        return value

    penstock.close(train_both(Net, loss=loss, stage=stage))


@both_ways
def test_evaluation_between_forward_and_backward_changes_nothing(worlds, stage):
    worlds(2).run(evaluate_inside, stage)


def two_losses(model, step, rank):
    return loss_of(model, step, rank) + 0.5 * loss_of(model, step + 10, rank)


def train_two_forwards(stage):
    penstock.close(train_both(Net, loss=two_losses, stage=stage))


@both_ways
def test_several_forwards_before_one_backward(worlds, stage):
    worlds(2).run(train_two_forwards, stage)


def forwards_then_backwards(stage):
    rank, _ = world()
    reference, sharded = pair(stage)
    for step in range(2):
        accumulate_reference(reference, step)
    values = [loss_of(sharded, step, rank) for step in range(2)]
    for value in values:
        value.backward()
    finish(reference, sharded)


@both_ways
def test_several_forwards_before_several_backwards(worlds, stage):
    worlds(2).run(forwards_then_backwards, stage)


def backward_twice(stage):
    rank, _ = world()
    reference, sharded = pair(stage)
    accumulate_reference(reference, 0)
    accumulate_reference(reference, 0)
    value = loss_of(sharded, 0, rank)
    value.backward(retain_graph=True)
    value.backward()
    finish(reference, sharded)


@both_ways
def test_a_retained_graph_goes_backward_again(worlds, stage):
    worlds(2).run(backward_twice, stage)


def clip(stage, foreach):
    rank, _ = world()
    reference, sharded = pair(stage)
    accumulate_reference(reference, 0)
    loss_of(sharded, 0, rank).backward()
    norms = [
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
        for model in (reference, sharded)
    ]
    assert_close("norm", whole(norms[1]), norms[0], equality.TOLERANCE)
    finish(reference, sharded)


@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_norm_clips_by_the_norm_over_all_ranks(worlds, foreach):
    worlds(2).run(clip, 3, foreach)


def train_adamw(fused):
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, fused=fused, foreach=not fused)

    penstock.close(train_both(Net, optimizer=adamw, tolerance=2e-3, stage=3))


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_equals_unsharded(worlds, fused):
    worlds(2).run(train_adamw, fused)


def train_with(**options):
    penstock.close(train_both(Net, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch_ahead": 0},
        {"prefetch_ahead": 100},
        {"prefetch_bytes": 1},
        {"bucket_bytes": 256},
        {"bucket_bytes": 256, "part_bytes": 256},
        {"blocks": []},
        {"blocks": ["blocks.0", "blocks.2"]},
        {"verify": False},
    ],
    ids=str,
)
def test_options_do_not_change_results(worlds, options):
    worlds(2).run(train_with, **options)


def train_half():
    penstock.close(train_both(models.Half, tolerance=5e-2, stage=3))


def test_bf16_parameters_train(worlds):
    worlds(2).run(train_half)


def train_mixed_precision(stage):
    """bf16 for gathering and gradients, against fp32 throughout."""

    def loss(model, step, rank):
        return model(models.batch(step, rank), rank).float().square().mean()

    model = train_both(
        Net,
        loss=loss,
        tolerance=5e-2,
        stage=stage,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    assert all(p.dtype == torch.float32 for p in model.parameters())
    seen = []
    model.blocks[0].up.register_forward_hook(lambda m, a, o: seen.append((m.weight.dtype, o.dtype)))
    model(models.batch(0, 0))
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    penstock.close(model)


@both_ways
def test_mixed_precision_trains(worlds, stage):
    worlds(2).run(train_mixed_precision, stage)


class Pair(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, rank=0):
        return self.second(torch.cat([self.first(x), x[..., :2]], -1))


def train_two_in_a_row(stage):
    """Two sharded models, one of which feeds the other: one backward runs through both."""
    rank, size = world()
    reference = Pair(make(Net, 1), make(Net, 2))
    sharded = Pair(*(penstock.shard(make(Net, seed), stage=stage) for seed in (1, 2)))
    twins = sgd(reference.parameters()), sgd(sharded.parameters())
    for step in range(3):
        accumulate_reference(reference, step)
        loss_of(sharded, step, rank).backward()
        assert_same_gradients(sharded, reference, equality.TOLERANCE)
        for each in twins:
            each.step()
            each.zero_grad()
    assert_same_parameters(sharded, reference, equality.TOLERANCE)
    with pytest.raises(penstock.PenstockError, match="2 sharded models live"):
        penstock.stats()
    penstock.close(sharded.first)
    penstock.close(sharded.second)


@both_ways
def test_two_sharded_models_in_one_process(worlds, stage):
    worlds(2).run(train_two_in_a_row, stage)


def update_unseen(stage):
    rank, _ = world()
    reference, sharded = pair(stage)
    want = [loss_of(reference, 0, rank).item()]
    got = [loss_of(sharded, 0, rank).item()]
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.5)
        for p in sharded.parameters():
            p.mul_(0.5)  # noticed by the version
    want.append(loss_of(reference, 0, rank).item())
    got.append(loss_of(sharded, 0, rank).item())
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.5)
        for p in sharded.parameters():
            p.to_local().data.mul_(0.5)
    penstock.invalidate(sharded)
    want.append(loss_of(reference, 0, rank).item())
    got.append(loss_of(sharded, 0, rank).item())
    assert got == pytest.approx(want, rel=1e-5)
    penstock.close(sharded)


@both_ways
def test_changed_parameters_are_gathered_anew(worlds, stage):
    worlds(2).run(update_unseen, stage)


def write_to_data(stage):
    """What EMA, merged adapters and clipping do: torch counts none of it for plain tensors."""
    rank, size = world()
    reference, sharded = pair(stage)
    kept = [p.data for p in sharded.parameters()]

    def halve(model):
        for p in model.parameters():
            p.data.mul_(0.5)

    def add(model):
        for p in model.parameters():
            p.data += 0.25

    def set_anew(model):
        for p in model.parameters():
            p.data = p.data * 3

    def write_to_what_was_kept(model):
        for p in kept if model is sharded else model.parameters():
            p.data.mul_(2)

    def write_to_the_state(model):
        for value in model.state_dict().values():
            value.data.mul_(2)

    for write in (halve, add, set_anew, write_to_what_was_kept, write_to_the_state):
        for model in (reference, sharded):
            with torch.no_grad():
                loss_of(model, 0, rank)
            write(model)
        want = loss_of(reference, 0, rank).item()
        assert loss_of(sharded, 0, rank).item() == pytest.approx(want, rel=1e-5), write
    wrong = sharded.norm.weight.data.double()
    with pytest.raises(penstock.PenstockError, match=r"of shape \(7,\) stays a torch.float32"):
        sharded.norm.weight.data = wrong
    penstock.close(sharded)


@both_ways
def test_writes_through_data_are_noticed(worlds, stage):
    worlds(2).run(write_to_data, stage)


def break_off(stage, options):
    """A backward that raises half-way; the next step is right."""
    rank, _ = world()
    reference, sharded = pair(stage, **options)
    with breaking_off(sharded.blocks[1]):
        loss_of(sharded, 0, rank).backward()
    failing = sharded.blocks[2].up.register_forward_pre_hook(lambda m, a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(sharded, 0, rank)
    failing.remove()
    accumulate_reference(reference, 1)
    loss_of(sharded, 1, rank).backward()
    finish(reference, sharded)


@both_ways
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 256}], ids=["held", "reduced"])
def test_a_step_after_one_that_was_broken_off_is_right(worlds, stage, options):
    worlds(2).run(break_off, stage, options)


def clean_up_after_a_break(stage, way):
    """What the branch of an exception does has to reach the shards."""
    rank, _ = world()
    reference, sharded = pair(stage)
    optimizer = sgd(sharded.parameters())
    accumulate_reference(reference, 0)
    loss_of(sharded, 0, rank).backward()
    good = {name: value.clone() for name, value in sharded.state_dict().items()}
    with breaking_off(sharded.blocks[0]):
        loss_of(sharded, 1, rank).backward()
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    if way == "load":
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.zero_()
        sharded.load_state_dict(good)
    (optimizer if way == "optimizer" else sharded).zero_grad()
    assert all(p.grad is None for p in sharded.parameters())
    reference.zero_grad()
    accumulate_reference(reference, 2)
    loss_of(sharded, 2, rank).backward()
    finish(reference, sharded)


@both_ways
@pytest.mark.parametrize("way", ["model", "optimizer", "load"])
def test_gradients_are_zeroed_and_values_loaded_after_a_break(worlds, stage, way):
    worlds(2).run(clean_up_after_a_break, stage, way)


def step_in_the_backward(stage):
    """An optimizer a parameter, as a hook: torch calls it when the gradient is there."""
    rank, _ = world()
    reference, sharded = pair(stage)
    optimizers = {parameter: sgd([parameter]) for parameter in sharded.parameters()}
    seen = []

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        seen.append(parameter)

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    all_of_reference = sgd(reference.parameters())
    for i in range(3):
        accumulate_reference(reference, i)
        all_of_reference.step()
        all_of_reference.zero_grad()
        loss_of(sharded, i, rank).backward()
        assert len(seen) == len(optimizers) and set(seen) == set(optimizers)
        seen.clear()
    assert_same_parameters(sharded, reference, 1e-5)
    penstock.close(sharded)


@both_ways
def test_hooks_step_where_the_gradients_are_there(worlds, stage):
    worlds(2).run(step_in_the_backward, stage)


def forget_forwards(stage):
    """Losses that nobody goes back from leave nothing behind."""
    rank, _ = world()
    reference, sharded = pair(stage)
    for _ in range(3):
        loss_of(sharded, 7, rank)
    kept = loss_of(sharded, 8, rank)
    units = sharded.__dict__["_penstock_engine"].units
    blocks = [unit for unit in units if unit.name.startswith("blocks")]
    assert [len(unit.pending) for unit in blocks] == [1] * len(blocks)
    del kept
    accumulate_reference(reference, 0)
    loss_of(sharded, 0, rank).backward()
    assert not any(unit.pending for unit in units)
    finish(reference, sharded)


@both_ways
def test_a_forward_without_a_backward_is_forgotten(worlds, stage):
    worlds(2).run(forget_forwards, stage)


class FrozenDtype(Net):
    """All that is fp64 is frozen."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(models.MixedBlock() for _ in range(2))
        for block in self.blocks:
            block.down.requires_grad_(False)


def unfreeze_later(kind, stage):
    """One after the other; one with gradients of before, one with some that are not reduced yet."""
    rank, _ = world()
    reference, sharded = pair(stage, kind)
    optimizers = sgd(reference.parameters()), sgd(sharded.parameters())
    frozen = [name for name, p in reference.named_parameters() if not p.requires_grad]
    kept = [p.data for p in sharded.parameters()]
    for step, name in enumerate([None, *frozen]):
        for model in (reference, sharded) if name else ():
            model.get_parameter(name).requires_grad_(True)
        accumulate_reference(reference, step)
        with penstock.no_sync(sharded) if step == 1 else nullcontext():
            loss_of(sharded, step, rank).backward()
        if step % 3 == 2:
            assert_same_gradients(sharded, reference, equality.TOLERANCE)
            for each in optimizers:
                each.step()
                each.zero_grad()
    for rows in kept:
        if rows.to_local().numel():
            with pytest.raises(RuntimeError, match=r"were moved when parameters were unfrozen"):
                rows.to_local().sum()
    accumulate_reference(reference, 99)
    loss_of(sharded, 99, rank).backward()
    finish(reference, sharded)


@both_ways
@pytest.mark.parametrize("kind", [models.Frozen, FrozenDtype])
def test_parameters_frozen_before_shard_are_trained_once_they_are_unfrozen(worlds, kind, stage):
    worlds(2).run(unfreeze_later, kind, stage)


def shards_are_dtensors():
    rank, size = world()
    reference, sharded = pair(3)
    for (name, p), twin in zip(sharded.named_parameters(), reference.parameters(), strict=True):
        rows = twin.detach().chunk(size)
        mine = rows[rank] if rank < len(rows) else twin[:0]
        assert p.shape == twin.shape, name
        assert torch.equal(p.to_local().detach(), mine), name
    total = sum(p.to_local().untyped_storage().nbytes() for p in {*sharded.parameters()})
    assert total > 0
    penstock.close(sharded)


def test_every_rank_keeps_its_rows(worlds):
    worlds(4).run(shards_are_dtensors)


def gradients_are_freed():
    import weakref

    from torch.multiprocessing.reductions import StorageWeakRef

    rank, _ = world()
    sharded = penstock.shard(make(Net), stage=2)
    loss_of(sharded, 0, rank).backward()
    storages = {StorageWeakRef(p.grad.to_local().untyped_storage()) for p in sharded.parameters()}
    assert not any(s.expired() for s in storages)
    sharded.zero_grad(set_to_none=True)
    assert all(s.expired() for s in storages)
    gone = weakref.ref(sharded)
    penstock.close(sharded)
    assert gone() is sharded


def test_zero_grad_frees_the_gradients(worlds):
    worlds(2).run(gradients_are_freed)


def collect_unused():
    import gc
    import weakref

    rank, _ = world()
    for stage in (1, 3):
        model = penstock.shard(make(Net), stage=stage)
        optimizer = sgd(model.parameters())
        for step in range(2):
            loss_of(model, step, rank).backward()
            optimizer.step()
        gone = [weakref.ref(model), weakref.ref(model.blocks[0].up.weight)]
        del model, optimizer
        gc.collect()
        assert [each() for each in gone] == [None, None]
    with pytest.raises(penstock.PenstockError, match="0 sharded models"):
        penstock.stats()


def test_a_model_that_nobody_uses_is_collected(worlds):
    worlds(2).run(collect_unused)


def train_alone_in_a_group():
    penstock.close(train_both(Net, stage=3))


def test_a_process_group_of_one_rank_equals_unsharded(worlds):
    worlds(1).run(train_alone_in_a_group)


def write_to_its_weight(module, arguments, output):
    with torch.no_grad():
        module.weight.mul_(1)


def test_a_block_runs_alone_after_a_forward_that_failed_at_its_end():
    model = penstock.shard(make(Net))
    hook = model.blocks[1].down.register_forward_hook(write_to_its_weight)
    with pytest.raises(penstock.PenstockError, match="'blocks.1' were written"):
        loss_of(model, 0, 0)
    hook.remove()
    model.blocks[0](torch.ones(2, models.WIDTH, device=models.DEVICE)).sum().backward()
    assert model.blocks[0].scale.grad is not None
    penstock.close(model)


def test_a_trace_within_a_trace_is_refused_and_the_outer_one_goes_on(tmp_path):
    model = penstock.shard(make(models.Frozen))
    with penstock.trace(model, tmp_path / "outer.json"):
        with pytest.raises(penstock.PenstockError, match="recording already"):
            penstock.trace(model, tmp_path / "inner.json").__enter__()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        with pytest.raises(penstock.PenstockError, match="was unfrozen within penstock.trace"):
            loss_of(model, 0, 0)
    penstock.close(model)
