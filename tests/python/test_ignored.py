"""Parameters that `shard` leaves alone."""

import penstock
import pytest
import torch
import torch.distributed.checkpoint as dcp
from equality import assert_close, sgd, whole, world
from models import WIDTH, Net, loss_of, make
from penstock import PenstockError
from torch import nn


def ignored_of(model):
    """A part of a block, a whole block, and a large module beside them."""
    return {model.blocks[0].scale, *model.blocks[1].parameters(), *model.embed.parameters()}


def sharded_beside(seed=0, **options):
    model = make(Net, seed)
    ignored = ignored_of(model)
    penstock.shard(model, ignored_params=ignored, **options)
    assert ignored == ignored_of(model)
    assert {id(p) for p in ignored} == {id(p) for p in model.parameters() if not is_sharded(p)}
    return model


def is_sharded(parameter):
    return type(parameter) is not nn.Parameter


def train_beside(stage):
    """Gradients of what is ignored are this rank's own."""
    rank, size = world()
    model, reference = sharded_beside(stage=stage), make(Net)
    optimizers = [
        sgd([p for p in each.parameters() if id(p) not in {id(i) for i in ignored_of(each)}])
        for each in (model, reference)
    ]
    for step in range(3):
        loss_of(model, step, rank).backward()
        loss_of(reference, step, rank).backward()
        own = {name: p.grad.clone() for name, p in reference.named_parameters()}
        for other in range(size):
            if other != rank:
                loss_of(reference, step, other).backward()
        for (name, parameter), twin in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            want = twin.grad / size if is_sharded(parameter) else own[name]
            assert_close(name, whole(parameter.grad), want, 1e-5)
            if is_sharded(parameter):
                twin.grad /= size
        for optimizer in optimizers:
            optimizer.step()
        for each in (model, reference):
            each.zero_grad()
    penstock.close(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_ignored_stays_as_it_is(worlds, stage):
    worlds(2).run(train_beside, stage)


def save_and_load(folder):
    model, other = sharded_beside(), sharded_beside(seed=1)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    penstock.load(other, folder)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two)), name
    penstock.close(model)
    penstock.close(other)


def test_what_is_ignored_is_loaded_too(worlds, tmp_path):
    worlds(2).run(save_and_load, str(tmp_path))


def test_what_is_no_parameter_of_the_model_cannot_be_ignored():
    model = make(Net)
    for wrong, text in (
        (nn.Parameter(torch.ones(2)), "give parameters of the model, as a set"),
        (["head.weight"], "give parameters of the model, as a set"),
        ({nn.Parameter(torch.ones(2, WIDTH))}, r"parameter of shape \(2, 7\).*Net does not have"),
        (model.parameters(), "no parameters but those of ignored_params="),
    ):
        with pytest.raises(PenstockError, match=text) as caught:
            penstock.shard(model, ignored_params=wrong)
        assert caught.value.status == "EINVAL"
