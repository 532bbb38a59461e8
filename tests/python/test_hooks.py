"""What the hooks of a unit leave behind: on tensors, in arguments, after failures."""

import models
import penstock
import pytest
import torch
from models import Net, make
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

    def interrupt(unit):
        raise TimeoutError("a signal handler raised this")

    x = torch.ones(2, models.WIDTH, device=models.DEVICE)
    with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="signal handler"):
        patch.setattr(Unit, "hold", interrupt)
        model.blocks[0](x)
    model.blocks[0](x).sum().backward()
    assert model.blocks[0].up.weight.grad is not None
    penstock.close(model)


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
