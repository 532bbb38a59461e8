"""Models that parallelize_module has divided over an axis of a mesh are sharded over others."""

import os
from functools import cache, partial

import penstock
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same_rows, save_and_go_on
from equality import assert_same_gradients, assert_same_parameters, make_mesh, whole
from models import DEVICE
from penstock import PenstockError
from penstock._axes import Axes
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

WORDS, WIDTH, LENGTH = 30, 8, 8  # ranks do not divide words evenly
STRIDED = _StridedShard(0, split_factor=2)
PLACES = {  # on ("dp", "tp")
    "embed.weight": (STRIDED, Shard(0)),
    "blocks.0.norm.weight": (Shard(0), Replicate()),
    "blocks.0.up.weight": (STRIDED, Shard(0)),
    "blocks.0.up.bias": (STRIDED, Shard(0)),
    "blocks.1.down.weight": (Shard(0), Shard(1)),
    "blocks.1.down.bias": (Shard(0), Replicate()),
    "temperature": (Shard(0), Replicate()),
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head, and a parameter that parallelize_module leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.temperature = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.temperature.mean()


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Model().to(DEVICE)


def divide(model, mesh, local=True):
    """Divide layers over ranks, and what lies between them, maybe as DTensors, in its length."""
    between = {"output_layouts": Shard(1), "use_local_output": local}
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), **between),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(**between),
    }
    return parallelize_module(model, mesh, plan)


def square(shape=(2, 2), names=("dp", "tp")):
    return make_mesh(shape, names)


REPLICAS = {"shard_dim": "dp_shard", "replicate_dim": "dp_replicate"}


def cube(shape=(2, 2, 2)):
    return square(shape, ("dp_replicate", "dp_shard", "tp"))


@cache
def unflattened():
    whole = make_mesh((4,), ("world",))
    return whole._unflatten(0, (2, 2), ("dp", "tp"))  # as torchtitan makes its meshes


def ours(mesh, seed=0, **options):
    dims = REPLICAS if mesh.ndim == 3 else {"shard_dim": "dp"}
    return penstock.shard(divide(make(seed), mesh["tp"]), mesh=mesh, **dims, **options)


def fsdp2(mesh, seed=0):
    model = divide(make(seed), mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh[mesh.mesh_dim_names[:-1]])
    return model


def loss_of(model, step, place):
    """The loss on the batch of a place along "dp", which all ranks along "tp" have."""
    generator = torch.Generator().manual_seed(100 * step + place)
    tokens = torch.randint(WORDS, (2, LENGTH + 1), generator=generator).to(DEVICE)
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def step_reference(model, step, places=2):
    """Backward of the mean over all batches; returns their losses."""
    losses = [loss_of(model, step, place) for place in range(places)]
    (sum(losses) / places).backward()
    return [loss.item() for loss in losses]


def torchs(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def step_and_forget(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_along(model, mesh):
    """What is the same on the ranks of an axis has the same bits there."""
    group, (axis,) = mesh.get_group(), mesh.mesh_dim_names
    for name, parameter in model.named_parameters():
        if parameter.placements[parameter.device_mesh.mesh_dim_names.index(axis)].is_replicate():
            assert_same_rows(name, parameter, group)


# ---- training -----------------------------------------------------------------------------------


def clip(model, optimizer):
    if isinstance(optimizer, penstock.AdamW):
        return penstock.clip_grad_norm_(model, 0.5)
    return whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def train(stage):
    """Beside the unsharded model, and FSDP2."""
    mesh = square()
    place = mesh.get_local_rank("dp")
    reference, model, theirs = make(), divide(make(), mesh["tp"], local=stage != 2), fsdp2(mesh)
    options = {"checkpoint": Block} if stage == 3 else {}
    penstock.shard(model, mesh=mesh, shard_dim="dp", stage=stage, **options)
    how = {1: {"foreach": True}, 2: {"fused": True}, 3: None}[stage]
    mine = torchs(model, **how) if how else penstock.AdamW(model, lr=0.01)
    pairs = [(reference, torchs(reference)), (model, mine)]
    optimizers = [*(optimizer for _, optimizer in pairs), torchs(theirs, foreach=False)]
    for step in range(3):
        losses = step_reference(reference, step)
        for each in (model, theirs):
            loss = loss_of(each, step, place)
            loss.backward()
            assert loss.item() == pytest.approx(losses[place], rel=1e-5)
        assert_same_gradients(model, reference, 1e-5)
        norm, got = (clip(each, optimizer) for each, optimizer in pairs)
        torch.testing.assert_close(got, norm)
        for parameter in theirs.parameters():  # on two meshes, which torch does not clip as one
            parameter.grad.mul_(0.5 / (norm.item() + 1e-6))
        assert norm > 0.5
        step_and_forget(*optimizers)
    assert_same_parameters(model, reference, 1e-4)
    for name, placements in PLACES.items():
        assert model.get_parameter(name).placements == placements, name
    for (name, parameter), twin in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_local(), twin.to_local(), rtol=1e-3, atol=1e-4)
        assert name == "temperature" or parameter.placements == twin.placements, name
    assert_equal_along(model, mesh["tp"])
    penstock.close(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_that_of_the_unsharded_model_and_of_fsdp2(worlds, stage):
    worlds(4).run(train, stage)


def accumulate(**options):
    """Without reductions, then with one; returns all gradients, and the norm of them."""
    mesh = unflattened()
    model = ours(mesh, **options)
    model.blocks[1].up.weight.requires_grad_(False)
    place = mesh.get_local_rank("dp")
    with penstock.no_sync(model):
        loss_of(model, 0, place).backward()
    loss_of(model, 1, place).backward()
    optimizer = penstock.AdamW(model)
    norm = penstock.clip_grad_norm_(model, 1.0)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    del optimizer
    penstock.close(model)
    return gradients, norm


def accumulate_in_precisions():
    reference = make()
    reference.blocks[1].up.weight.requires_grad_(False)
    for step in range(2):
        step_reference(reference, step)
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    for options, tolerance in (
        ({}, 1e-5),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, 0.03),
    ):
        gradients, norm = accumulate(**options)
        torch.testing.assert_close(norm, wanted, rtol=tolerance, atol=0.0)
        for name, twin in reference.named_parameters():
            assert (gradients[name] is None) == (twin.grad is None), name
            if twin.grad is not None:
                distance = (whole(gradients[name]) - twin.grad).norm()
                assert distance <= tolerance * max(twin.grad.norm().item(), 0.1), name


def test_gradients_accumulate_in_any_precision_and_frozen_ones_stay_out(worlds):
    worlds(4).run(accumulate_in_precisions)


# ---- other axes ----------------------------------------------------------------------------------


class Experts(nn.Module):
    """As many experts as its ranks have, each of which sees all; plain layers around them."""

    def __init__(self, axis=None) -> None:
        super().__init__()
        self.axis = axis
        self.enter = nn.Linear(5, WIDTH)
        bank = torch.randn(6, WIDTH, WIDTH) / 3
        self.bank = nn.Parameter(distribute_tensor(bank, axis, [Shard(0)]) if axis else bank)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        bank = self.bank
        if self.axis is not None:
            x = DTensor.from_local(x, self.axis, [Replicate()])
            x = x.to_local(grad_placements=[Partial()])
            bank = bank.to_local()
        y = torch.tanh(torch.einsum("bi,eio->ebo", x, bank)).sum(dim=0)
        if self.axis is not None:
            y = DTensor.from_local(y, self.axis, [Partial()]).full_tensor()
        return self.leave(y)


def make_experts(axis=None):
    torch.manual_seed(3)
    return Experts(axis).to(DEVICE)


def loss_of_experts(model, step, place):
    generator = torch.Generator().manual_seed(100 * step + place)
    return model(torch.randn(4, 5, generator=generator).to(DEVICE)).square().mean()


def train_on_two_axes():
    """Experts over an axis, a layer over another, which is of one rank."""
    mesh = square((1, 2, 2), ("tp", "ep", "dp"))  # that of the ranks is the last one
    place = mesh.get_local_rank("dp")
    reference, model = make_experts(), make_experts(mesh["ep"])
    parallelize_module(model, mesh["tp"], {"leave": ColwiseParallel(output_layouts=Replicate())})
    penstock.shard(model, mesh=mesh["dp"])
    optimizers = torchs(reference), torchs(model)
    for step in range(3):
        losses = [loss_of_experts(reference, step, place) for place in range(2)]
        (sum(losses) / 2).backward()
        loss = loss_of_experts(model, step, place)
        loss.backward()
        assert loss.item() == pytest.approx(losses[place].item(), rel=1e-5)
        assert_same_gradients(model, reference, 1e-5)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (reference, model)]
        torch.testing.assert_close(whole(norms[1]), norms[0])
        step_and_forget(*optimizers)
    assert_same_parameters(model, reference, 1e-4)
    assert {p.device_mesh.mesh_dim_names for p in model.parameters()} == {("tp", "ep", "dp")}
    assert model.bank.placements == (Replicate(), Shard(0), Shard(0))
    penstock.close(model)


def test_experts_and_layers_on_other_axes_train_alike(worlds):
    worlds(4).run(train_on_two_axes)


def train_with_replicas():
    """Replicas, shards and tensor parallelism at once, beside the unsharded model and FSDP2."""
    mesh = cube()
    place = 2 * mesh.get_local_rank("dp_replicate") + mesh.get_local_rank("dp_shard")
    reference, theirs = make(), fsdp2(mesh)
    model = divide(make(), mesh["tp"])
    frozen = model.blocks[1].up.weight.requires_grad_(False)
    assert type(frozen) is DTensor
    penstock.shard(model, mesh=mesh, **REPLICAS)
    optimizers = torchs(reference), torchs(model)
    for step in range(3):
        for each in (reference, model):
            each.blocks[1].up.weight.requires_grad_(step > 0)
        losses = step_reference(reference, step, places=4)
        loss = loss_of(model, step, place)
        loss.backward()
        assert loss.item() == pytest.approx(losses[place], rel=1e-5)
        assert_same_gradients(model, reference, 1e-5)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (reference, model)]
        torch.testing.assert_close(whole(norms[1]), norms[0])
        step_and_forget(*optimizers)
    for (name, parameter), twin in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert parameter.device_mesh == mesh
        assert name == "temperature" or parameter.placements == twin.placements, name
    assert model.embed.weight.placements == (Replicate(), STRIDED, Shard(0))
    assert_same_parameters(model, reference, 1e-4)
    for name in ("dp_replicate", "tp"):
        assert_equal_along(model, mesh[name])
    stats = penstock.stats(model)
    assert stats.all_reduces == stats.reduces > 0
    penstock.close(model)


def test_replicas_of_divided_models_train_alike(worlds):
    worlds(8).run(train_with_replicas)


# ---- states --------------------------------------------------------------------------------------


def make_one(seed, shard, mesh_of, *shape):
    return shard(mesh_of(*shape), seed)


def step_alike(model, optimizer, step):
    loss_of(model, step, 0).backward()  # the same batch everywhere: any mesh has one mean
    step_and_forget(optimizer)


def go_round(folder, *makers):
    """Each loads what the one before has saved, and goes on as that does."""
    model = save_and_go_on(
        folder,
        [partial(make_one, seed, *maker) for seed, maker in enumerate(makers)],
        lambda model: torchs(model, foreach=False),
        step_alike,
        lambda model: loss_of(model, 0, 0),
    )
    loss = loss_of(model, 0, 0).item()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        undivided = make(9)
        undivided.load_state_dict(full)
        assert loss_of(undivided, 0, 0).item() == pytest.approx(loss, rel=1e-5)
    loaded = make(7).state_dict()
    model.load_state_dict(loaded)
    assert_same_parameters(model, make(7), 0.0)
    penstock.close(model)


def test_checkpoints_go_to_other_meshes_and_to_fsdp2_and_back(worlds, tmp_path):
    shapes = [(ours, square, shape) for shape in ((2, 2), (4, 1), (1, 4))]
    worlds(4).run(go_round, str(tmp_path), *shapes, (fsdp2, square), (ours, square))


def test_checkpoints_of_replicas_go_to_other_meshes_and_to_fsdp2_and_back(worlds, tmp_path):
    others = (ours, square, (2, 4)), (fsdp2, cube)
    worlds(8).run(go_round, str(tmp_path), (ours, cube), *others, (ours, cube))


def load_from_files(folder):
    """From the meta device; a rank reads its part of its rows."""
    mesh = square()
    if dist.get_rank() == 0:
        from safetensors.torch import save_file

        save_file(make(5).state_dict(), f"{folder}/model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = Model()
    penstock.shard(divide(model, mesh["tp"]), mesh=mesh["dp"], device=DEVICE)
    penstock.load(model, f"{folder}/model.safetensors")
    assert_same_parameters(model, make(5), 0.0)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp")
    other = ours(mesh, seed=6)
    penstock.load(other, f"{folder}/dcp")
    assert_same_parameters(other, make(5), 0.0)
    with penstock.trace(model, f"{folder}/{{rank}}.json"):
        loss = loss_of(model, 0, 0).item()
    assert loss == pytest.approx(loss_of(make(5), 0, 0).item(), rel=1e-5)
    dist.barrier()
    assert all(os.path.exists(f"{folder}/{rank}.json") for rank in range(4))
    penstock.close(model)
    penstock.close(other)


def test_files_go_to_models_of_the_meta_device_and_each_rank_writes_a_trace(worlds, tmp_path):
    pytest.importorskip("safetensors.torch", reason="safetensors writes the files")
    worlds(4).run(load_from_files, str(tmp_path))


# ---- beginning -----------------------------------------------------------------------------------


def begin_differently():
    """Ranks along "tp" have other values of what is the same there."""
    mesh = square()
    place = mesh.get_local_rank("tp")
    with pytest.raises(PenstockError, match=r"'temperature' has other values.* along \('tp',\)"):
        model = divide(make(), mesh["tp"])
        model.temperature.data += place
        penstock.shard(model, mesh=mesh["dp"])
    with torch.device("meta"):
        model = Model()
    penstock.shard(divide(model, mesh["tp"]), mesh=mesh["dp"], device=DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.full_like(parameter, 0.1))
        model.norm.bias.to_local().fill_(mesh.get_local_rank("tp"))
    with pytest.raises(PenstockError, match=r"'norm.bias' does not have the same .* \('tp',\)"):
        loss_of(model, 0, 0)
    penstock.close(model)
    model = divide(make(), mesh["tp"])
    with torch.no_grad():
        model.temperature += dist.get_rank()
        model.norm.weight.to_local().add_(dist.get_rank())
    penstock.shard(model, mesh=mesh["dp"], broadcast=True)
    assert_same_parameters(model, make(), 0.0)
    penstock.close(model)


def places_along_two_axes():
    axes = Axes(square((2, 1, 2), ("pp", "dp", "tp")), ("pp", "tp"))
    place, count = axes.own
    return count, axes.all_gather(torch.tensor(place)).tolist()


def test_what_is_brought_together_along_axes_stands_at_its_places(worlds):
    assert worlds(4).run(places_along_two_axes) == [(4, [0, 1, 2, 3])] * 4


def test_ranks_begin_with_the_same_values(worlds):
    worlds(4).run(begin_differently)


def refuse(text, mesh, given, change=lambda model: None):
    model = divide(make(), mesh["tp"])
    change(model)
    with pytest.raises(PenstockError, match=text) as caught:
        penstock.shard(model, **given)
    assert caught.value.status == "EINVAL" and "\n" not in str(caught.value)


def refuse_what_cannot_be():
    mesh, other = square(), square(names=("replicate", "shard"))

    def half(model):
        spec = model.head.weight
        model.head.weight = nn.Parameter(
            DTensor.from_local(spec.to_local().detach(), mesh["tp"], [Partial()])
        )

    def on_unnamed(model):
        weight = torch.zeros(WIDTH, device=DEVICE)
        model.norm.weight = nn.Parameter(DTensor.from_local(weight, make_mesh((4,)), [Replicate()]))

    def too_small(model):
        spread = distribute_tensor(torch.ones(1, device=DEVICE), mesh["tp"], [Shard(0)])
        model.temperature = nn.Parameter(spread)

    dp = {"mesh": mesh, "shard_dim": "dp"}
    refuse(r"mesh=None: parameter 'embed.weight' is a DTensor over \('tp',\)", mesh, {})
    refuse("these ranks are no mesh with names", mesh, {"process_group": dist.group.WORLD})
    refuse("the two have 'tp' in common", mesh, {"mesh": mesh["tp"]})
    refuse(
        "shard_dim='tp': parameter 'embed.weight' is .*over that", mesh, {**dp, "shard_dim": "tp"}
    )
    refuse("replicate_dim='tp': parameter 'embed.weight'", mesh, {**dp, "replicate_dim": "tp"})
    refuse(r"shard_dim='shard': its dimensions are \('dp', 'tp'\)", mesh, {"mesh": mesh})
    refuse("replicate_dim='pp': its dimensions are", mesh, {**dp, "replicate_dim": "pp"})
    refuse("Cannot concatenate overlapping meshes", mesh, {"mesh": other})
    refuse("memory=100: parameter 'embed.weight' is a DTensor", mesh, {**dp, "memory": 100})
    refuse(r"'temperature' is .* some rank has no part of its shape \(1,\)", mesh, dp, too_small)
    refuse("placed as .*Partial.*divided", mesh, dp, half)
    refuse("'norm.weight' is a DTensor on this mesh.*mesh_dim_names=", mesh, dp, on_unnamed)


def test_what_cannot_be_sharded_on_top_is_refused(worlds):
    worlds(4).run(refuse_what_cannot_be)


def write_while_gathered():
    mesh = square()
    model = ours(mesh)

    def write(module, args):
        with torch.no_grad():
            module.weight.mul_(2.0)

    handle = model.blocks[0].up.register_forward_pre_hook(write)
    with pytest.raises(PenstockError, match="parameters of 'blocks.0' were written"):
        loss_of(model, 0, 0)
    handle.remove()

    def mix(module, args):
        return module.weight * torch.ones(WIDTH, device=DEVICE)

    model.norm.register_forward_pre_hook(mix)
    with pytest.raises(RuntimeError, match="name their module in the plan of"):
        loss_of(model, 0, 0)
    penstock.close(model)


def test_writes_to_a_gathered_parameter_and_mixtures_are_noticed(worlds):
    worlds(4).run(write_while_gathered)
