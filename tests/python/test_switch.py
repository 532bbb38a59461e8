"""What somebody who comes from FSDP2 does: it works as there, or says why not."""

import penstock
import torch
from equality import train_both, world
from models import DEVICE, Net, make
from torch.distributed.device_mesh import init_device_mesh


def shard_over_a_mesh():
    _, size = world()
    mesh = init_device_mesh(DEVICE, (1, size), mesh_dim_names=("of one", "all"))["all"]
    model = train_both(Net, process_group=mesh)
    assert all(parameter.device_mesh is mesh for parameter in model.parameters())
    penstock.close(model)


def test_a_mesh_of_one_dimension_stands_for_its_ranks(worlds):
    worlds(2).run(shard_over_a_mesh)


def show():
    plain, model = make(Net), penstock.shard(make(Net), param_dtype=torch.bfloat16, stage=2)
    how = f"sharded: stage=2, ranks={world()[1]}"
    lines = repr(model).splitlines()
    assert lines[1] == f"  {how}"  # all that it has is in modules that are gathered by themselves
    assert repr(model.blocks[1]).splitlines()[1] == f"  {how}, parameters=4 (float32 as bfloat16)"
    assert repr(model.blocks[1].up) == repr(plain.blocks[1].up)
    assert [line for line in lines if how not in line][2:5] == [
        f"    {plain.embed.extra_repr()}",
        "  )",
        "  (blocks): ModuleList(",
    ]
    penstock.close(model)
    assert how in repr(model)


def test_a_model_prints_how_each_block_is_sharded(worlds):
    show()
    worlds(2).run(show)
