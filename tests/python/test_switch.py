"""What somebody who comes from FSDP2 does: it works as there, or says why not."""

import penstock
from equality import train_both, world
from models import DEVICE, Net
from torch.distributed.device_mesh import init_device_mesh


def shard_over_a_mesh():
    _, size = world()
    mesh = init_device_mesh(DEVICE, (1, size), mesh_dim_names=("of one", "all"))["all"]
    model = train_both(Net, process_group=mesh)
    assert all(parameter.device_mesh is mesh for parameter in model.parameters())
    penstock.close(model)


def test_a_mesh_of_one_dimension_stands_for_its_ranks(worlds):
    worlds(2).run(shard_over_a_mesh)
