"""Meshes of two dimensions: a model is sharded over one, and has replicas along the other."""

import os
import re

import equality
import models
import penstock
import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same_rows, save_and_go_on
from equality import (
    accumulate_reference,
    assert_same_gradients,
    assert_same_parameters,
    make_mesh,
    train_both,
    world,
)
from models import Net, loss_of, make
from penstock import PenstockError
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

NAMES = ("replicate", "shard")


def square(names=NAMES):
    """Two replicas of two ranks."""
    return make_mesh((2, 2), names)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def assert_equal_replicas(model, mesh):
    """Parameters, and gradients if there are any, have the same bits on both replicas."""
    group = mesh.get_group("replicate")
    for name, parameter in model.named_parameters():
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                assert_same_rows(name, tensor, group)


# ---- training -----------------------------------------------------------------------------------


def train_on_a_mesh(stage, kind, mesh_of, **options):
    mesh = mesh_of()
    model = train_both(
        kind,
        steps=4,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        between=lambda model: assert_equal_replicas(model, mesh),
        stage=stage,
        mesh=mesh,
        **options,
    )
    stats = penstock.stats(model)
    assert stats.all_reduces == stats.reduces > 0 and stats.replayed_passes > 0
    for parameter in model.parameters():
        assert parameter.device_mesh == mesh
        place = mesh.mesh_dim_names.index(options.get("shard_dim", "shard"))
        assert parameter.placements[place] == Shard(0)
        assert parameter.placements[1 - place] == Replicate()
    penstock.close(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_that_of_the_unsharded_model(worlds, stage):
    worlds(4).run(train_on_a_mesh, stage, Net, square, bucket_bytes=256)


def pair():
    """A replica a rank."""
    return make_mesh((2, 1), NAMES)


@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_of_one_rank_each_train_alike(worlds, stage):
    worlds(2).run(train_on_a_mesh, stage, Net, pair)


def test_gradients_that_one_replica_alone_has_count(worlds):
    worlds(4).run(train_on_a_mesh, 3, models.OnOneRank, square)


def transposed():
    return square(("shard", "replicate"))


def columns():
    return make_mesh((4, 1), NAMES)


@pytest.mark.parametrize("mesh_of", [transposed, columns])
def test_meshes_of_another_shape_train_alike(worlds, mesh_of):
    worlds(4).run(train_on_a_mesh, 2, Net, mesh_of)


def train_in_precision(param_dtype, reduce_dtype):
    """Beside a model that is sharded over all ranks."""
    rank, _ = world()
    mesh = square()
    options = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    ours = penstock.shard(make(Net), mesh=mesh, **options)
    others = penstock.shard(make(Net), **options)
    optimizers = [
        penstock.AdamW(model, lr=0.01, in_backward=model is ours) for model in (ours, others)
    ]
    for step in range(2):
        losses = [loss_of(model, step, rank) for model in (ours, others)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=0.02, atol=1e-3)
        for (name, mine), theirs in zip(ours.named_parameters(), others.parameters(), strict=True):
            got, want = mine.grad.full_tensor(), theirs.grad.full_tensor()
            assert (got - want).norm() <= 0.02 * max(want.norm().item(), 0.01), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_replicas(ours, mesh)
    penstock.close(ours)
    penstock.close(others)


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_precisions_are_those_of_a_model_without_replicas(worlds, reduce_dtype):
    worlds(4).run(train_in_precision, torch.bfloat16, reduce_dtype)


def accumulate(stage):
    rank, _ = world()
    mesh = square()
    reference, sharded = equality.pair(stage, mesh=mesh)
    for step in range(3):
        accumulate_reference(reference, step)
        if step == 0:
            with penstock.no_sync(sharded):
                loss_of(sharded, step, rank).backward()
        else:
            loss_of(sharded, step, rank).backward()
    assert_equal_replicas(sharded, mesh)
    equality.finish(reference, sharded)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_accumulate(worlds, stage):
    worlds(4).run(accumulate, stage)


def clip():
    rank, _ = world()
    reference, sharded = equality.pair(3, mesh=square())
    twins = adamw(reference), penstock.AdamW(sharded, lr=0.01)
    for step in range(2):
        accumulate_reference(reference, step)
        loss_of(sharded, step, rank).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        if step == 0:
            got = penstock.clip_grad_norm_(sharded, 0.01)
        else:
            got = nn.utils.clip_grad_norm_(sharded.parameters(), 0.01).full_tensor()
            assert_same_gradients(sharded, reference, equality.TOLERANCE)
        torch.testing.assert_close(got, norm)
        for optimizer in twins:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, reference, 1e-4)
    penstock.close(sharded)


def test_the_norm_is_that_of_all_gradients(worlds):
    worlds(4).run(clip)


# ---- states -------------------------------------------------------------------------------------


def on_square():
    return penstock.shard(make(Net, seed=4), mesh=square())


def over_all():
    return penstock.shard(make(Net, seed=5), mesh=make_mesh((4,)))


def by_fsdp2():
    model, mesh = make(Net, seed=6), square()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def step_once(model, optimizer, step):
    loss_of(model, step, world()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def go_round(folder):
    rank, _ = world()
    makers = (on_square, over_all, on_square, by_fsdp2, on_square)
    penstock.close(
        save_and_go_on(folder, makers, adamw, step_once, lambda model: loss_of(model, 0, rank))
    )


def test_checkpoints_go_to_other_meshes_and_to_fsdp2_and_back(worlds, tmp_path):
    worlds(4).run(go_round, str(tmp_path))


# ---- beginning ----------------------------------------------------------------------------------


def begin_differently():
    rank, _ = world()
    model = make(Net, seed=rank // 2)
    with pytest.raises(PenstockError, match="has other values on rank 2 than on rank 0"):
        penstock.shard(model, mesh=square())
    model = penstock.shard(make(Net, seed=10 + rank), mesh=square(), broadcast=True)
    assert_same_parameters(model, make(Net, seed=10), 0)
    penstock.close(model)


def test_replicas_begin_with_the_same_values(worlds):
    worlds(4).run(begin_differently)


def refuse_wrong_meshes():
    mesh = square()
    cube = make_mesh((1, 2, 2), (*NAMES, "tp"))
    plain = {"mesh": mesh}
    for given, text in (
        ({**plain, "shard_dim": "fsdp"}, r"shard_dim='fsdp': .*\('replicate', 'shard'\)"),
        ({**plain, "replicate_dim": "dp"}, "replicate_dim='dp': .*one of them, or give"),
        ({**plain, "replicate_dim": "shard"}, r"replicate_dim='shard': that is shard_dim too"),
        ({**plain, "process_group": dist.group.WORLD}, "there is a process_group= too"),
        ({"process_group": mesh}, r"process_group=.*one of its dimensions, .* or mesh="),
        ({"mesh": dist.group.WORLD}, "mesh=.*init_device_mesh"),
        ({"mesh": cube}, r"over its dimension 'tp': .* out, as mesh\['replicate', 'shard'\]"),
        ({"mesh": make_mesh((2, 2))}, "no names: give it mesh_dim_names="),
        ({"mesh": mesh["shard"], "shard_dim": "dp"}, "shard_dim='dp': .*one dimension"),
        ({"mesh": mesh["shard"], "replicate_dim": "dp"}, "replicate_dim='dp': .*one dimension"),
        ({"shard_dim": "dp"}, "shard_dim='dp': there is no mesh="),
    ):
        model = make(Net)
        with pytest.raises(PenstockError, match=text) as caught:
            penstock.shard(model, **given)
        assert caught.value.status == "EINVAL" and "\n" not in str(caught.value)
    model = parallelize_module(make(Net), mesh["shard"], {"head": ColwiseParallel()})
    with pytest.raises(PenstockError, match="shard_dim='shard': parameter 'head.weight' is"):
        penstock.shard(model, mesh=mesh)


def leave_out_dimensions_of_one_rank():
    mesh = make_mesh((2, 1, 2, 1), (*NAMES[:1], "pp", "dp", "tp"))
    model = penstock.shard(make(Net), mesh=mesh, shard_dim="dp")
    assert model.head.weight.device_mesh == mesh["replicate", "dp"]
    loss_of(model, 0, world()[0]).backward()
    assert_equal_replicas(model, mesh)
    penstock.close(model)


def test_dimensions_of_one_rank_do_not_matter(worlds):
    worlds(4).run(leave_out_dimensions_of_one_rank)


def test_meshes_that_say_too_little_are_refused(worlds):
    worlds(4).run(refuse_wrong_meshes)


# ---- failures -----------------------------------------------------------------------------------


def leave_the_path(plays):
    """As one of the ranks of a world of two plays, of which the first one takes another path."""
    rank, _ = world()
    model = penstock.shard(make(models.OnAnotherPath), mesh=square(), timeout=20.0)
    with pytest.raises(PenstockError) as caught:
        for step in range(3):
            loss_of(model, step, plays[rank]).backward()
    penstock.close(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("plays", "found_by", "first", "second"),
    [([1, 1, 0, 1], [2, 3], 2, 3), ([0, 0, 1, 1], [0, 2], 0, 2)],
    ids=["within a replica", "between replicas"],
)
def test_ranks_that_take_different_paths_are_named(worlds, plays, found_by, first, second):
    texts = worlds(4).run(leave_the_path, plays)
    for rank in found_by:
        named = f"different collectives: rank {first}: .*; rank {second}: "
        assert re.search(named, texts[rank]), texts[rank]


def train_until_one_dies():
    rank, _ = world()
    model = penstock.shard(make(Net), mesh=square(), timeout=20.0)
    try:
        for step in range(4):
            if step == 2 and rank == 3:
                os._exit(3)
            loss_of(model, step, rank).backward()
    except PenstockError as error:
        return error.status, str(error)
    finally:
        penstock.close(model)
    return "OK", ""


def test_a_rank_of_another_replica_that_dies_is_named(fresh_world):
    answers = fresh_world(4).collect(train_until_one_dies)
    assert answers[3] == (False, "died with exit code 3")
    for ok, answer in answers[:3]:
        assert ok and answer[0] in ("EPEER", "ETIMEDOUT"), answer
        assert "the process of rank 3 (" in answer[1] and "has ended" in answer[1], answer
