"""Parameters travel as float8: torchao's by hooks, beside FSDP2, and matrices with scales."""

import penstock
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from equality import make_mesh, whole
from models import DEVICE
from penstock import PenstockError
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed")
parallel = pytest.importorskip("torchao.float8.float8_tensor_parallel")
precompute = torchao.precompute_float8_dynamic_scale_for_fsdp

WORDS, WIDTH = 32, 64
WIDE, BF16, FLOAT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


class Block(nn.Module):
    """A residual block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(hidden: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return Model(hidden).to(DEVICE)


def convert(model: nn.Module) -> nn.Module:
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: "blocks" in name
    )


def converted() -> nn.Module:
    return convert(make())


def fsdp2(**options):
    model = converted()
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    return model


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        step * 4 + (dist.get_rank() if rank is None else rank)
    )
    return torch.randint(WORDS, (4, 8), generator=generator).to(DEVICE)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    return functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def train(model, then, steps=4):
    """Train by two backwards a step and evaluate behind it; return all losses and norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    figures = []
    for step in range(steps):
        for half in (0, 1):
            loss = loss_of(model, 2 * step + half)
            loss.backward()
            figures.append(loss.item())
        figures.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
        then(model)
        with torch.no_grad():
            figures.append(loss_of(model, step).item())
    return figures


def nothing(model: nn.Module) -> None:
    pass


# ---- torchao -------------------------------------------------------------------------------------


def plain(tensor):
    return getattr(tensor, "_tensor", tensor)


def train_both(options, policy, then):
    ours = penstock.shard(converted(), **options)
    theirs = fsdp2(mp_policy=MixedPrecisionPolicy(**policy))
    assert train(ours, then) == train(theirs, then)
    theirs.reshard()
    of_theirs = get_model_state_dict(theirs, options=StateDictOptions(full_state_dict=True))
    for name, value in ours.state_dict().items():
        assert type(value.to_local()) is torch.Tensor and value.dtype == WIDE, name
        assert torch.equal(whole(value), plain(of_theirs[name])), name
    assert penstock.stats(ours).planned_passes > 0
    penstock.close(ours)


HALF = {"param_dtype": BF16, "reduce_dtype": WIDE}
CASES = {  # options, policy of FSDP2's, what follows a step
    "fp32": ({}, {}, nothing),
    "bf16": (
        HALF | {"checkpoint": "blocks.*"},
        HALF,
        precompute,
    ),
    "stage 1": ({"stage": 1}, {}, precompute),
}


@pytest.mark.parametrize("case", CASES)
def test_what_torchao_has_converted_trains_bit_for_bit_as_under_fsdp2(worlds, case):
    worlds(2).run(train_both, *CASES[case])


def count_bytes():
    counts = []
    for model in (make(), converted()):
        penstock.shard(model, param_dtype=BF16)
        loss_of(model, 0).backward()
        counts.append(penstock.stats(model).gather_bytes)
        matrices = sum(p.numel() for name, p in model.named_parameters() if is_matrix(name))
        penstock.close(model)
    assert counts[0] - counts[1] == 2 * matrices  # a byte each, in forward and backward


def is_matrix(name):
    return name.startswith("blocks") and name.endswith(("up.weight", "down.weight"))


def test_half_the_bytes_of_matrices_travel(worlds):
    worlds(2).run(count_bytes)


def train_with(make_optimizer):
    model = penstock.shard(converted())
    reference = fsdp2()
    optimizers = [make_optimizer(model), torch.optim.AdamW(reference.parameters(), lr=1e-2)]
    for step in range(4):
        losses = [loss_of(each, step) for each in (model, reference)]
        assert torch.allclose(*losses, rtol=1e-5), step
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    penstock.close(model)


def in_backward(model):
    return penstock.AdamW(model.parameters(), lr=1e-2, in_backward=True)


def test_updates_in_the_backward_are_those_of_before(worlds):
    worlds(2).run(train_with, in_backward)


def begin_on_meta():
    with torch.device("meta"):
        model = convert(Model())
    penstock.shard(model, device=DEVICE)
    reference = penstock.shard(converted())
    model.load_state_dict(whole_state(reference))
    model.to(DEVICE)
    assert torch.equal(loss_of(model, 0), loss_of(reference, 0))
    for some in (model, reference):
        penstock.close(some)


def whole_state(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def test_a_converted_model_without_values_is_loaded(worlds):
    worlds(2).run(begin_on_meta)


def freeze_and_thaw():
    """Another engine begins, with memory for gradients; parts of a step are accumulated."""
    figures = []
    for is_frozen in (True, False):
        model = converted()
        model.blocks[1].up.weight.requires_grad_(not is_frozen)
        penstock.shard(model)
        with torch.no_grad():
            model(batch(0))
        model.blocks[1].up.weight.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with penstock.no_sync(model):
                loss_of(model, 10 + step).backward()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss_of(model, step).item())
        penstock.close(model)
    assert figures[:3] == figures[3:]


def test_they_are_unfrozen_and_accumulate(worlds):
    worlds(2).run(freeze_and_thaw)


def go_on(folder):
    """Checkpoints of FSDP2's are gone on with, and those of ours by FSDP2."""
    then = precompute
    ours, theirs = penstock.shard(converted()), fsdp2()
    figures = {}
    for before, behind in ((theirs, ours), (ours, theirs)):
        train(before, then, steps=1)
        theirs.reshard()
        dcp.save(before.state_dict(), checkpoint_id=f"{folder}/{before is ours}")
        state = behind.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{before is ours}")
        behind.load_state_dict(state)
        for model in (ours, theirs):
            then(model)
            with torch.no_grad():
                figures[model] = [loss_of(model, step).item() for step in range(2)]
        assert figures[ours] == figures[theirs]
    penstock.close(ours)


def test_checkpoints_go_from_fsdp2_and_back(worlds, tmp_path):
    worlds(2).run(go_on, str(tmp_path))


def train_divided():
    """Blocks are divided over two ranks, and sharded over two others."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    plan = {
        "blocks.*.up": parallel.Float8ColwiseParallel(),
        "blocks.*.down": parallel.Float8RowwiseParallel(),
    }
    ours, theirs = (parallelize_module(converted(), mesh["tp"], plan) for _ in range(2))
    plain_plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    scaled = parallelize_module(make(), mesh["tp"], plain_plan)
    penstock.shard(ours, mesh=mesh["dp"])
    penstock.shard(scaled, mesh=mesh["dp"], param_dtype=FLOAT8)
    for module in (*theirs.blocks, theirs):
        fully_shard(module, mesh=mesh["dp"])
    figures = []
    for model in (ours, theirs, scaled):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            tokens = batch(step, mesh.get_local_rank("dp"))
            logits = model(tokens).float()
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            precompute(model)
            figures.append(loss.item())
    assert figures[:3] == figures[3:6]
    assert figures[6:] == pytest.approx(figures[:3], rel=0.1)
    for model in (ours, scaled):
        penstock.close(model)


def test_what_is_divided_for_tensor_parallelism_trains_as_under_fsdp2(worlds):
    worlds(4).run(train_divided)


def use_outside():
    model = penstock.shard(converted())
    kept = []
    model.blocks[0].up.register_forward_hook(lambda module, *rest: kept.append(module.weight))
    loss_of(model, 0)
    with pytest.raises(RuntimeError, match="'blocks.0.up.weight' is sharded and not gathered now"):
        kept[0]._data.float()
    penstock.close(model)


def test_memory_of_before_is_refused(worlds):
    worlds(2).run(use_outside)


def test_one_process_alone_computes_with_plain_ones():
    model = penstock.shard(converted())
    assert type(model.blocks[0].up.weight) is nn.Parameter
    tokens = torch.arange(8, device=DEVICE)[None]
    assert torch.equal(model(tokens), converted()(tokens))
    penstock.close(model)


# ---- hooks of others -----------------------------------------------------------------------------


class Hooked(torch.Tensor):
    """A tensor whose hooks send what they are told to: bytes, or something else."""

    @staticmethod
    def __new__(cls, inner, sends):
        options = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)

    def __init__(self, inner, sends):
        self.inner, self.sends = inner, sends

    def __tensor_flatten__(self):
        return ["inner"], self.sends

    @staticmethod
    def __tensor_unflatten__(inner, sends, shape, strides):
        return Hooked(inner["inner"], sends)

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        sends = next((x.sends for x in args if isinstance(x, Hooked)), "bytes")
        args, kwargs = torch.utils._pytree.tree_map_only(
            Hooked, lambda tensor: tensor.inner, (args, kwargs or {})
        )
        made = function(*args, **kwargs)
        return Hooked(made, sends) if function is torch.ops.aten.detach.default else made

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert outer_size == (64, WIDTH) and outer_stride == (WIDTH, 1) and mesh.size() == 2
        assert isinstance(module, nn.Linear) and mp_policy.reduce_dtype == WIDE
        halves = self.inner.div(2).round().to(torch.int8)
        sent = {"bytes": (halves,), "more": (halves, halves), "words": (halves.short(),)}
        return sent[self.sends], 2

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (halves,) = outputs
        if out is None:
            whole = halves.to(param_dtype) * metadata
            return whole, (whole,)
        out.copy_(halves).mul_(metadata)
        return None


def hooked(sends):
    model = nn.Sequential(nn.Linear(WIDTH, 64, bias=False))
    values = torch.arange(64 * WIDTH, device=DEVICE).float().view(64, WIDTH) % 200
    model[0].weight = nn.Parameter(Hooked(values, sends))
    return model


def send_bytes():
    model = penstock.shard(hooked("bytes"), blocks="0", reduce_dtype=WIDE)
    x = torch.eye(WIDTH, device=DEVICE)
    for _ in range(3):
        values = torch.arange(64 * WIDTH, device=DEVICE).float().view(64, WIDTH) % 200
        out = model(x)
        assert torch.equal(out, (values / 2).round().mul(2).t())
        out.sum().backward()
        assert torch.equal(whole(model[0].weight.grad), torch.ones(64, WIDTH, device=DEVICE))
        model.zero_grad()
    assert model[0].weight.to_local().max() == 199  # what is trained is as it was
    model[0].weight._local_tensor.sends = "words"
    penstock.invalidate(model)
    with pytest.raises(PenstockError, match="'0.weight' gives torch.int16"):
        model(x)
    model[0].weight._local_tensor.sends = "bytes"
    assert torch.equal(model(x), out)
    penstock.close(model)


def test_other_hooks_are_called_as_fsdp2_does(worlds):
    worlds(2).run(send_bytes)


def send_other(sends, options, text):
    with pytest.raises(PenstockError, match=text):
        penstock.shard(hooked(sends), reduce_dtype=WIDE, **options)


@pytest.mark.parametrize(
    ("sends", "options", "text"),
    [
        ("more", {}, r"'0.weight' gives torch.int8 of \(32, 64\), torch.int8.*one"),
        ("words", {}, "'0.weight' gives torch.int16.*a dtype of one byte"),
        ("bytes", {"offload": "optimizer"}, "offload='optimizer'.*'0.weight'"),
    ],
)
def test_what_hooks_cannot_have_is_said(worlds, sends, options, text):
    worlds(2).run(send_other, sends, options, text)


# ---- matrices with scales ------------------------------------------------------------------------


def there_and_back(matrix):
    """What a matrix is behind a gather as float8 with a scale a row."""
    scales = matrix.abs().amax(-1, keepdim=True) / 448
    return ((matrix / scales).to(FLOAT8).to(BF16) * scales).to(BF16)


def train_scaled(options):
    """127 rows are not divided evenly by the ranks; an evaluation is in inference mode."""
    model, reference = make(127), make(127).to(BF16)
    penstock.shard(model, param_dtype=FLOAT8, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        state = whole_state_of(model)
        for name, value in state.items():
            state[name] = there_and_back(value) if is_matrix(name) else value
        reference.load_state_dict(state)
        with torch.inference_mode():
            assert torch.equal(model(batch(step)), reference(batch(step))), step
        loss = loss_of(model, step)
        loss.backward()
        loss_of(reference, step).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(theirs.grad)
            assert torch.allclose(whole(ours.grad), theirs.grad.to(WIDE) / 2, atol=1e-3, rtol=0.02)
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    penstock.close(model)


def whole_state_of(model):
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_matrices_of_blocks_travel_with_scales(worlds, stage):
    worlds(2).run(train_scaled, {"stage": stage})


def count_scaled():
    counts = []
    for dtype in (BF16, FLOAT8):
        model = penstock.shard(make(), param_dtype=dtype)
        loss_of(model, 0).backward()
        counts.append(penstock.stats(model).gather_bytes)
        matrices = [p for name, p in model.named_parameters() if is_matrix(name)]
        penstock.close(model)
    saved = sum(p.numel() - 4 * p.shape[0] for p in matrices)
    assert counts[0] - counts[1] == 2 * saved


def test_they_take_a_byte_an_element_and_four_a_row(worlds):
    worlds(2).run(count_scaled)
