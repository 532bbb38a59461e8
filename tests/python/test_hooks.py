"""What the hooks of a unit leave behind: on tensors, in arguments, after failures."""

import gc
import weakref

import models
import penstock
import pytest
import torch
from equality import accumulate_reference, both_ways, finish, pair, world
from models import Net, loss_of, make
from penstock import PenstockError
from penstock._engine import engine_of
from penstock._units import Unit
from torch import nn


class WithPrompt(nn.Module):
    """A block that also returns a tensor of the user's which no backward of it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.prompt = torch.zeros(4, device=models.DEVICE, requires_grad=True)

    def forward(self, x):
        return self.linear(x), self.prompt


def test_no_hooks_are_left_on_a_leaf_that_a_block_returns():
    model = penstock.shard(WithPrompt().to(models.DEVICE))
    for _ in range(2):
        output, prompt = model(torch.ones(2, 4, device=models.DEVICE))
        (output + prompt).sum().backward()
    assert not model.prompt._backward_hooks
    assert model.prompt.grad.tolist() == [4.0] * 4
    penstock.close(model)


def test_a_block_called_by_itself_runs_again_after_its_gather_was_interrupted(monkeypatch):
    model = penstock.shard(make(Net))

    def interrupt(unit, rows):
        raise TimeoutError("a signal handler raised this")

    x = torch.ones(2, models.WIDTH, device=models.DEVICE)
    with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="signal handler"):
        patch.setattr(Unit, "hold", interrupt)
        model.blocks[0](x)
    model.blocks[0](x).sum().backward()
    assert model.blocks[0].up.weight.grad is not None
    penstock.close(model)


def interrupt(module, inputs):
    raise KeyboardInterrupt


def test_a_block_called_by_itself_trains_again_after_an_interrupt():
    """A forward hook runs behind an Exception, and behind nothing else."""
    model = penstock.shard(make(Net))
    x = torch.ones(2, models.WIDTH, device=models.DEVICE)
    handle = model.blocks[0].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.blocks[0](x)
    handle.remove()
    for _ in range(2):
        model.blocks[0](x).sum().backward()
    assert model.blocks[0].up.weight.grad is not None
    model(models.batch(0, 0)).sum().backward()
    penstock.close(model)


@pytest.mark.parametrize("path", ["", "blocks.0"])
def test_another_block_trains_behind_an_interrupted_forward(path):
    model = penstock.shard(make(Net))
    interrupted = model.get_submodule(path)
    handle = model.blocks[0].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted(torch.ones(2, models.WIDTH if path else 5, device=models.DEVICE))
    handle.remove()
    model.blocks[1](torch.ones(2, models.WIDTH, device=models.DEVICE)).sum().backward()
    assert model.blocks[0].up.weight.grad is None
    assert model.blocks[1].up.weight.grad is not None
    penstock.close(model)


def test_what_an_interrupted_forward_has_computed_is_freed():
    model = penstock.shard(make(Net))
    model.blocks[0].up.register_forward_pre_hook(interrupt)
    x = torch.ones(2, models.WIDTH, device=models.DEVICE, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        model.blocks[0](x)
    reference = weakref.ref(x)
    del model, x
    for _ in range(2):  # a tensor that a graph holds outlives what refers to it
        gc.collect()
    assert reference() is None


class Halving(nn.Linear):
    """A block that calls itself."""

    def forward(self, x):
        return super().forward(x) if len(x) == 1 else self(x[: len(x) // 2])


def test_a_block_may_call_itself():
    model = penstock.shard(nn.Sequential(Halving(4, 4)).to(models.DEVICE))
    model[0](torch.ones(4, 4, device=models.DEVICE)).sum().backward()
    assert model[0].weight.grad.tolist() == [[1.0] * 4] * 4
    penstock.close(model)


class Keeping(nn.Module):
    """A block that keeps what it has returned, and so the graph behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        self.last = self.linear(x) + y
        return self.last


@pytest.mark.parametrize("both", [False, True])
def test_a_model_that_keeps_its_output_is_freed(both):
    model = penstock.shard(Keeping().to(models.DEVICE))
    x = torch.ones(2, 4, device=models.DEVICE, requires_grad=True)
    y = torch.ones(2, 4, device=models.DEVICE, requires_grad=both)
    model(x, y).sum().backward()
    references = [weakref.ref(model), weakref.ref(engine_of(model))]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("both", [False, True])
def test_a_backward_of_a_model_that_is_gone_says_so(both):
    x = torch.ones(2, 4, device=models.DEVICE, requires_grad=True)
    y = torch.ones(2, 4, device=models.DEVICE, requires_grad=both)
    loss = penstock.shard(Keeping().to(models.DEVICE))(x, y).sum()
    gc.collect()
    with pytest.raises(PenstockError, match="a sharded model that is gone"):
        loss.backward()


def call_what_was_taken_out():
    model = penstock.shard(make(models.Tied))
    embed = model.embed
    del model.embed
    with pytest.raises(PenstockError) as caught:
        embed(torch.ones(1, 3, device=models.DEVICE))
    penstock.close(model)
    return str(caught.value)


def test_a_module_that_was_taken_out_is_refused_by_its_type(worlds):
    text, _ = worlds(2).run(call_what_was_taken_out)
    assert "module 'Linear' of the sharded Tied was called outside" in text


class Appending(nn.Linear):
    """A block that writes to a list which it is given, as to a cache."""

    def forward(self, x, cache):
        cache.append(x)
        return super().forward(x)


def test_a_list_without_inputs_that_get_gradients_is_the_callers_own():
    model = penstock.shard(Appending(4, 4).to(models.DEVICE))
    cache = []
    model(torch.ones(2, 4, device=models.DEVICE), cache=cache).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 4, device=models.DEVICE), cache=cache)
    assert len(cache) == 2
    penstock.close(model)


def register_in_a_forward(stage):
    """A hook on a parameter that is whole is its shard's, and not in place of the engine's."""
    rank, _ = world()
    reference, sharded = pair(stage)
    (unit,) = [unit for unit in engine_of(sharded).units if unit.name == "blocks.1"]
    weight, seen, handles, reported = sharded.blocks[1].up.weight, [], [], []

    def register(module, args):
        if not handles:
            handles.append(module.weight.register_post_accumulate_grad_hook(seen.append))

    def watch(module, args, output):
        output.register_hook(lambda _: reported.append(unit.groups[0].complete))

    sharded.blocks[1].up.register_forward_pre_hook(register)
    sharded.embed.register_forward_hook(watch)
    for step in range(2):
        accumulate_reference(reference, step)
        loss_of(sharded, step, rank).backward()
        assert seen.pop() is weight and not seen
    handles[0].remove()
    accumulate_reference(reference, 2)
    loss_of(sharded, 2, rank).backward()
    assert not seen and reported == [True] * 3
    finish(reference, sharded)


@both_ways
def test_a_hook_that_a_forward_registers_is_the_shards(worlds, stage):
    worlds(2).run(register_in_a_forward, stage)
