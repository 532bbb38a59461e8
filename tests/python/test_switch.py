"""What somebody who comes from FSDP2 does: it works as there, or says why not."""

import penstock
import pytest
import torch
from equality import both_ways, finish, make_mesh, pair, train_both, whole, world
from models import DEVICE, WIDTH, Block, LookedUp, Net, batch, loss_of, make
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def train_and_close(kind, **options):
    penstock.close(train_both(kind, **options))


def shard_over_a_mesh():
    _, size = world()
    mesh = make_mesh((1, size), ("of one", "all"))["all"]
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


class Measuring(Block):
    def measure(self, x):
        return self.down(torch.tanh(self.up(x)) * self.scale)


class Sampling(Net):
    """Uses its parameters in methods of its own and of its blocks, which call each other."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Measuring() for _ in range(3))
        self.gain = torch.nn.Parameter(torch.rand(3) + 0.5)

    def run_blocks(self, x, rank):
        for block in self.blocks:
            x = block(x) + block.measure(x)
        return x

    def score(self, x, rank):
        again = self(x, rank) + self.head(self.blocks[0](self.embed(x)))
        return again * self.gain + self.embed.weight.sum()

    def fail(self, x, rank):
        raise ValueError(self.gain.shape)


def loss_of_score(model, step, rank):
    return model.score(batch(step, rank), rank).square().mean()


def call_methods(stage):
    rank, _ = world()
    options = {"stage": stage, "forward_methods": ["score", "measure", "fail"]}
    recomputing = train_both(Sampling, loss=loss_of_score, checkpoint="blocks.*", **options)
    penstock.close(recomputing)
    model = train_both(Sampling, loss=loss_of_score, **options)
    with pytest.raises(ValueError, match="3"):
        model.fail(batch(0, rank), rank)
    want = loss_of_score(model, 0, rank)
    with torch.no_grad():
        assert torch.equal(loss_of_score(model, 0, rank), want)
        block = model.blocks[1]
        assert torch.isfinite(block.measure(torch.ones(2, WIDTH, device=DEVICE))).all()
    loss_of_score(model, 0, rank).backward()
    penstock.close(model)


@both_ways
def test_methods_that_count_as_forwards_equal_those_of_an_unsharded_model(worlds, stage):
    worlds(2).run(call_methods, stage)


def test_methods_of_a_model_of_one_process_count_as_forwards():
    call_methods(3)


def save_by_safetensors(path):
    from safetensors.torch import save_file

    model = penstock.shard(make(Net))
    with pytest.raises(penstock.PenstockError, match=r"no storage.*full_state_dict=True"):
        save_file(model.state_dict(), path)
    whole_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    save_file(whole_state, path)
    penstock.close(model)


def test_what_saves_whole_tensors_is_told_how_to_get_them(worlds, tmp_path):
    pytest.importorskip("safetensors.torch", reason="safetensors writes the file")
    worlds(1).run(save_by_safetensors, tmp_path / "model.safetensors")


class Returning(Net):
    """Gives, beside its output, whole numbers and one of its parameters."""

    def forward(self, x, rank=0):
        y = super().forward(x, rank)
        return {"y": y, "rank": torch.tensor(rank, device=DEVICE), "gain": (self.norm.weight,)}


def loss_of_returned(model, step, rank):
    found = model(batch(step, rank), rank)
    assert found["rank"].dtype == torch.int64
    return (found["y"].square().mean() + found["gain"][0].sum()).double()


def cast_outputs():
    for dtype in (torch.float64, torch.bfloat16):
        model = penstock.shard(make(Returning), output_dtype=dtype)
        found = model(batch(0, 0))
        assert found["y"].dtype == found["gain"][0].dtype == dtype
        penstock.close(model)
    options = {"output_dtype": torch.float64, "loss": loss_of_returned}
    train_and_close(Returning, **options)


def test_outputs_are_cast(worlds):
    worlds(2).run(cast_outputs)


class Dot(torch.nn.Module):
    """Its gradient is its input."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.row = torch.nn.Parameter(torch.zeros(5, dtype=dtype))

    def forward(self, x):
        return (self.row * x).sum()


def gradient_of(model, value, dtype):
    model(torch.full((5,), value, dtype=dtype, device=DEVICE)).backward()
    found = whole(model.row.grad)
    model.zero_grad()
    return found


def reduce_small_and_large():
    model = penstock.shard(make(lambda: Dot(torch.float16)))
    for value in (2.0**-24, 65504.0):  # the ends of float16
        assert (gradient_of(model, value, torch.float16) == value).all()
    penstock.close(model)


def test_gradients_in_float16_neither_underflow_nor_overflow(worlds):
    worlds(2).run(reduce_small_and_large)


def accumulate_ones():
    model = penstock.shard(make(Dot), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with penstock.no_sync(model):
        for _ in range(599):  # bfloat16 has no 257
            model(torch.ones(5, device=DEVICE)).backward()
    assert (gradient_of(model, 1.0, torch.float32) == 600).all()
    penstock.close(model)


def test_gradients_that_stay_add_up_in_the_dtype_of_reductions(worlds):
    worlds(2).run(accumulate_ones)


def call_repeatedly(stage):
    plain, model = pair(stage)
    for each in (plain, model):
        given = each.blocks[0](torch.ones(2, WIDTH, device=DEVICE))
        for factor in (1, 2, 3):
            each.blocks[1](given * factor).sum().backward(retain_graph=True)
    finish(plain, model)


@both_ways
def test_an_output_may_go_through_several_forwards_with_backwards_between(worlds, stage):
    worlds(2).run(call_repeatedly, stage)


def step_unsupported(kind):
    model = penstock.shard(make(Net))
    loss_of(model, 0, 0).backward()
    ordinary = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for parameter, sharded in zip(ordinary, model.parameters(), strict=True):
        parameter.grad = sharded.grad.clone()
    with pytest.raises((RuntimeError, NotImplementedError), match="aten"):
        kind(ordinary).step()  # once torch can, nothing needs to be refused
    before = whole(model.head.weight)
    with pytest.raises(penstock.PenstockError, match=f"{kind.__name__} cannot step sharded"):
        kind(model.parameters()).step()
    assert torch.equal(whole(model.head.weight), before)
    penstock.close(model)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop])
def test_optimizers_that_cannot_step_sharded_parameters_say_so(worlds, kind):
    worlds(2).run(step_unsupported, kind)


class Again(Net):
    """Calls itself, and uses a parameter of its own behind that."""

    def forward(self, x, rank=0, again=True):
        y = super().forward(x, rank)
        return y + self(2 * x, rank, again=False) * self.norm.weight[:3] if again else y


@both_ways
def test_a_model_may_call_itself(worlds, stage):
    worlds(2).run(train_and_close, Again, stage=stage)


class Renormed(LookedUp):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(31, WIDTH, max_norm=0.1)


def renorm(stage):
    model = penstock.shard(make(Renormed), stage=stage)
    with pytest.raises(penstock.PenstockError, match="'embed' were written.*outside of forward"):
        loss_of(model, 0, 0)
    penstock.close(model)


@both_ways
def test_an_embedding_that_writes_to_its_rows_is_refused(worlds, stage):
    worlds(2).run(renorm, stage)
