"""torch.func's transforms, and forward-mode differentiation, of a sharded model's inputs."""

import models
import penstock
import pytest
import torch
from equality import TOLERANCE, assert_close, assert_same_gradients
from models import Net, loss_of, make
from torch.autograd import forward_ad


class Two(models.Block):
    """Takes two inputs that have gradients."""

    def forward(self, x, y):
        return super().forward(x * y)


class TakesTwo(Net):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Two(11 + 2 * i) for i in range(3))

    def run_blocks(self, x, rank):
        for block in self.blocks:
            x = block(x, torch.sin(x))
        return x


def dual_tangent(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "forward mode": dual_tangent,
}


@pytest.mark.parametrize("kind", [Net, TakesTwo])
@pytest.mark.parametrize("stage", [1, 3])
def test_transforms_equal_those_of_an_unsharded_model(kind, stage):
    reference, sharded = make(kind), penstock.shard(make(kind), stage=stage)
    for step, (name, transform) in enumerate(TRANSFORMS.items()):
        x = models.batch(step, 0)
        for model in (reference, sharded):  # there are gradients, and kept ones
            loss_of(model, step, 0).backward()
        with penstock.no_sync(sharded):
            loss_of(sharded, step, 0).backward()
        found = [transform(lambda x, m=m: m(x).square().mean(), x) for m in (sharded, reference)]
        assert_close(name, *(tensor.detach() for tensor in found), TOLERANCE)
        for model in (reference, sharded):
            loss_of(model, step, 0).backward()
        loss_of(reference, step, 0).backward()  # the kept one
        assert_same_gradients(sharded, reference, TOLERANCE)
    penstock.close(sharded)
