"""What bad input gets: an error that names the object and says what to do; nothing lost or hung."""

import gc
import os
import re
import threading
import time

import models
import penstock
import pytest
import torch
from equality import breaking_off, sgd, train_both, world
from models import Net, loss_of, make
from penstock import PenstockError
from penstock._world import local_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def refuses(status, text, function, *args, **kwargs):
    with pytest.raises(PenstockError, match=text) as caught:
        function(*args, **kwargs)
    assert caught.value.status == status


# ---- one process ------------------------------------------------------------------------------


def test_an_unknown_stage_is_refused():
    refuses("EINVAL", "stage=4.*1, 2 and 3", penstock.shard, make(Net), stage=4)


WRONG = [
    ("stage", [0, True, 3.0, "3", None], "1, 2 and 3"),
    ("communicator", ["gloo", None, 3], "give one of 'auto', 'ce'"),
    ("ranks_per_node", [0, "2"], "1 or more"),
    ("param_dtype", ["bf16", torch.int8, torch.complex64], "floating-point dtype of 16 bits"),
    ("reduce_dtype", ["fp32", torch.float8_e4m3fn], "floating-point dtype of 16 bits"),
    ("output_dtype", ["float", torch.int32], "floating-point dtype of 16 bits"),
    ("prefetch_ahead", [-1, 2.5, True, 2**32], "0 or more"),
    ("prefetch_bytes", [0, "1G", 1.5], "bytes, 1 or more, or leave it out"),
    ("bucket_bytes", [-1, None], "bytes, 1 or more$"),
    ("part_bytes", [-5, 2**63], "bytes, 1 or more"),
    ("timeout", ["10", 0, -1, float("nan"), float("inf"), True, None], "seconds, more than 0"),
    ("verify", ["no", 1], "True or False"),
    ("time_waits", [None], "True or False"),
    ("blocks", [5], "give names, patterns, classes"),
    ("forward_methods", [5, "sample", ["forward", "blocks"], [None]], "names of|is no method of"),
    ("process_group", ["gloo"], "give what torch.distributed.new_group"),
]


@pytest.mark.parametrize(("name", "values", "allowed"), WRONG, ids=[name for name, *_ in WRONG])
def test_an_argument_of_shard_that_is_wrong_is_named(name, values, allowed):
    for value in values:
        text = rf"^{name}={re.escape(repr(value))}: .*{allowed}"
        refuses("EINVAL", text, penstock.shard, make(Net), **{name: value})


def test_the_version_is_that_of_the_build():
    assert re.fullmatch(r"\d+\.\d+\.\d+", penstock.__version__)


@pytest.mark.skipif(models.DEVICE == "cuda", reason="on a GPU there are all communicators")
def test_a_communicator_of_gpus_is_refused_on_a_cpu():
    for name in ("ce", "nccl", "crossover"):
        refuses("EINVAL", f"'{name}'.*on cpu", penstock.shard, make(Net), communicator=name)


def test_what_is_no_model_is_named():
    for function in (penstock.shard, penstock.stats, penstock.close, penstock.invalidate):
        refuses("EINVAL", "model='x': give an nn.Module", function, "x")
    refuses("EINVAL", "model='x': give an nn.Module", penstock.clip_grad_norm_, "x", 1.0)
    for context in (penstock.no_sync, penstock.record, penstock.trace):
        refuses("EINVAL", "model=5: give an nn.Module", context(5).__enter__)
    refuses("EINVAL", "model='x': give", penstock.get_recorded_ops, "x")
    refuses("EINVAL", "model='x': give", penstock.compile, "x", recorded_ops=[])


def test_arguments_of_plans_figures_and_traces_that_are_wrong_are_named():
    model = penstock.shard(make(Net))
    wrong = {"recorded_ops": [5], "zero_stage": "3", "prefetch_ahead": -1, "prefetch_bytes": 0}
    for name, value in wrong.items():
        given = {"recorded_ops": [], name: value}
        text = rf"^{name}={re.escape(repr(value))}: "
        refuses("EINVAL", text, penstock.compile, model, **given)
    refuses("EINVAL", "training=1: give True", penstock.get_recorded_ops, model, training=1)
    refuses("EINVAL", "reset=1: give True or False", penstock.stats, model, reset=1)
    refuses("EINVAL", "path=5: give the file", penstock.trace(model, 5).__enter__)
    penstock.close(model)


def test_a_model_without_parameters_is_refused():
    refuses("EINVAL", "Tanh has no parameters", penstock.shard, nn.Tanh())


def test_a_sharded_model_is_refused():
    model = penstock.shard(make(Net))
    refuses("ESTATE", "Net: it is sharded already", penstock.shard, model)
    outer = nn.Sequential(nn.Linear(5, 5), model)
    refuses("ESTATE", "submodule '1' of it is sharded already", penstock.shard, outer)
    penstock.close(model)


class Quantized(torch.Tensor):
    """Its values are not what lies in its memory."""


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor(1.0), "parameter 'odd' .* is a scalar.*shape \\[1\\]"),
        (torch.zeros(3, dtype=torch.complex64), "parameter 'odd' .* complex"),
        (
            torch.zeros(3).as_subclass(Quantized),
            "parameter 'odd' .* is a Quantized.*plain nn.Parameter",
        ),
        (nn.UninitializedParameter(), "parameter 'odd' .* lazy.*run a forward before shard"),
    ],
    ids=["scalar", "complex", "subclass", "lazy"],
)
def test_a_parameter_that_cannot_be_sharded_is_named(tensor, text):
    model = make(Net)
    model.odd = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    refuses("EINVAL", text, penstock.shard, model)
    model.odd = None
    assert torch.isfinite(loss_of(penstock.shard(model), 0, 0))
    penstock.close(model)


def test_another_stream_is_refused_wherever_the_engine_and_the_caller_meet(monkeypatch):
    model = penstock.shard(make(Net))
    optimizer = sgd(model.parameters())
    stream = [0]
    monkeypatch.setattr("penstock._engine.stream_of", lambda device: stream[0])

    def switch(module, inputs, output):
        output.register_hook(lambda gradient: stream.__setitem__(0, 7))

    def elsewhere(text, function):
        stream[0] = 7
        refuses("ESTATE", f"Net {text} on another CUDA stream", function)
        stream[0] = 0

    loss_of(model, 0, 0).backward()
    elsewhere("is updated", optimizer.step)
    elsewhere("is updated", lambda: penstock.invalidate(model))
    elsewhere("runs", lambda: loss_of(model, 0, 0))
    loss = loss_of(model, 0, 0)
    elsewhere("runs a backward", loss.backward)
    hook = model.embed.register_forward_hook(switch)
    loss = loss_of(model, 0, 0)
    refuses("ESTATE", "Net ends a backward on another CUDA stream", loss.backward)
    stream[0] = 0
    hook.remove()
    loss_of(model, 0, 0)
    penstock.close(model)


def test_a_trace_goes_nowhere_else_than_it_was_told(tmp_path):
    model = penstock.shard(make(Net))
    path = f"{tmp_path}/a\0b.json"
    refuses("EINVAL", "NUL", penstock._engine.engine_of(model).runtime.trace_write, path, 0)
    assert not list(tmp_path.iterdir())
    penstock.close(model)


def test_an_optimizer_built_before_is_refused():
    model = make(Net)
    optimizer = sgd(model.parameters())
    refuses("ESTATE", "SGD holds parameter 'embed.weight'.*after", penstock.shard, model)
    del optimizer
    penstock.close(penstock.shard(model))


def test_blocks_that_match_nothing_are_refused():
    refuses("EINVAL", "'layers.*' matches|'layers", penstock.shard, make(Net), blocks=["layers.*"])
    refuses("EINVAL", "7", penstock.shard, make(Net), blocks=[7])


def test_a_refused_model_is_as_before():
    model = make(Net)
    before = dict(model.named_parameters())
    refuses("EINVAL", "layers", penstock.shard, model, blocks=["layers"])
    assert all(p is before[name] for name, p in model.named_parameters())
    loss_of(model, 0, 0).backward()


def test_a_plain_model_has_no_figures():
    refuses("ESTATE", "Net is not sharded", penstock.stats, make(Net))
    refuses("EINVAL", "0 sharded models", penstock.stats)


def test_a_closed_model_says_so():
    model = penstock.shard(make(Net))
    penstock.close(model)
    penstock.close(model)
    refuses("ESTATE", "Net was closed", loss_of, model, 0, 0)


def test_a_sharded_model_that_is_converted_says_so_and_stays_as_it_is():
    model = penstock.shard(make(Net))
    model.register_buffer("seen", torch.zeros(1, device=models.DEVICE))
    want = loss_of(model, 0, 0).item()
    for convert in (model.double, model.half, lambda: model.to("meta"), model.blocks[1].up.double):
        refuses("ESTATE", "parameter '.*weight' is sharded and cannot be moved", convert)
    assert model.seen.dtype == torch.float32
    assert loss_of(model, 0, 0).item() == want
    penstock.close(model)


def test_a_move_to_where_a_sharded_model_is_changes_nothing():
    model = penstock.shard(make(Net))
    before = [local_of(p).data_ptr() for p in model.parameters()]
    want = loss_of(model, 0, 0).item()
    device = next(model.parameters()).device
    for where in (device, torch.device(device.type, device.index or 0), torch.float32):
        assert model.to(where) is model
        assert model.blocks[1].up.to(where) is model.blocks[1].up
    assert [local_of(p).data_ptr() for p in model.parameters()] == before
    assert loss_of(model, 0, 0).item() == want
    penstock.close(model)


def move_in_place():
    test_a_move_to_where_a_sharded_model_is_changes_nothing()
    test_a_sharded_model_that_is_converted_says_so_and_stays_as_it_is()


def test_sharded_models_of_several_ranks_are_moved_and_converted_as_those_of_one(worlds):
    worlds(2).run(move_in_place)


def test_parameters_that_cannot_be_unfrozen_say_so(tmp_path):
    model = make(models.Frozen)
    last = model.blocks[-1]  # behind some that can be unfrozen
    last.eighth = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=False)
    penstock.shard(model.to(models.DEVICE))
    for parameter in (model.embed.weight, last.eighth):
        parameter.requires_grad_(True)
    refuses("EUNSUPPORTED", "'blocks.3.eighth' is torch.float8_e4m3fn and", loss_of, model, 0, 0)
    last.eighth.requires_grad_(False)
    with penstock.trace(model, tmp_path / "trace.json"):
        refuses("ESTATE", "'embed.weight' was unfrozen within", loss_of, model, 0, 0)
    loss_of(model, 0, 0).backward()
    assert model.embed.weight.grad is not None
    penstock.close(model)


def test_a_backward_after_one_that_was_broken_off_says_so():
    model = penstock.shard(make(Net))
    failures = ["once"]

    def fail(gradient):
        if failures:
            raise ValueError(failures.pop())

    def watch(module, inputs, output):
        output.register_hook(fail)

    model.embed.register_forward_hook(watch)
    loss = loss_of(model, 0, 0)
    with pytest.raises(ValueError, match="once"):
        loss.backward(retain_graph=True)
    refuses("ESTATE", "Net was broken off: run a forward", loss.backward)
    loss_of(model, 0, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
    penstock.close(model)


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_module_writes_to_its_gathered_parameters_is_refused(stage):
    model = make(Net)
    model.blocks[1].up = Clamped(models.WIDTH, 13, device=models.DEVICE)
    penstock.shard(model, stage=stage)
    for _ in range(2):
        refuses("ESTATE", "'blocks.1' were written.*outside of", loss_of, model, 0, 0)
    penstock.close(model)


class Replaced(nn.Linear):
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.01)
        return super().forward(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters_that_are_replaced_are_refused(stage):
    model = make(Net)
    up = model.blocks[1].up
    model.blocks[1].up = Replaced(models.WIDTH, up.out_features, device=models.DEVICE)
    penstock.shard(model, stage=stage)
    refuses("ESTATE", "'blocks.1' were written.*outside of", loss_of, model, 0, 0)
    model.blocks[1].up.forward = up.forward  # it stays so
    refuses("ESTATE", "'blocks.1' were written.*outside of", loss_of, model, 0, 0)
    penstock.close(model)


class Momentum(nn.Module):
    """An encoder that follows another one, in the forward."""

    def __init__(self):
        super().__init__()
        self.online, self.target = Net(), Net()
        self.target.requires_grad_(False)
        self.writes = True

    def forward(self, x, rank):
        if self.writes:
            with torch.no_grad():
                for follower, leader in zip(
                    self.target.parameters(), self.online.parameters(), strict=True
                ):
                    follower.lerp_(leader, 0.5)
        return self.online(x, rank) - self.target(x, rank)


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_that_are_written_in_a_forward_are_refused(stage):
    model = penstock.shard(make(Momentum), stage=stage)
    refuses("ESTATE", "Momentum were written while its forward ran", loss_of, model, 0, 0)
    model.writes = False
    loss_of(model, 0, 0).backward()
    penstock.close(model)


def interrupt(module, args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", [1, 3])
def test_a_load_into_what_an_interrupted_forward_has_left_is_refused(stage):
    model = penstock.shard(make(Net), stage=stage)
    state = make(Net, seed=7).state_dict()
    handle = model.blocks[1].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, 0, 0)
    handle.remove()
    model.load_state_dict(state)
    refuses("ESTATE", "were written.*run a forward before", loss_of, model, 0, 0)
    model.load_state_dict(state)
    assert loss_of(model, 0, 0).item() == pytest.approx(loss_of(make(Net, seed=7), 0, 0).item())
    penstock.close(model)


def test_a_parameter_that_was_replaced_says_so():
    model = penstock.shard(make(Net))
    loss_of(model, 0, 0).backward()
    bias = model.blocks[1].up.bias
    model.blocks[1].up.bias = nn.Parameter(torch.zeros(bias.shape))
    refuses("ESTATE", "'bias' of a Linear in 'blocks.1' was replaced", loss_of, model, 0, 0)
    model.blocks[1].up.bias = bias
    inputs, state = (models.batch(0, 0),), make(Net).state_dict()
    text = "'weight' of a Linear in 'embed' was replaced.*functional_call, export"
    refuses("ESTATE", text, torch.func.functional_call, model, state, inputs)
    refuses("ESTATE", text, torch.export.export, model, inputs)
    loss_of(model, 0, 0).backward()
    penstock.close(model)


def add_a_parameter(model):
    model.blocks[1].extra = nn.Parameter(torch.zeros(3))


def add_a_module(model):
    model.blocks[1].up = nn.Sequential(model.blocks[1].up, nn.Linear(13, 13))


def add_to_a_list(model):
    model.blocks.append(models.Block())


def add_a_module_without_parameters(model):
    model.blocks[0].more = nn.Sequential(nn.ReLU())


def add_a_bias(model):
    model.head.bias = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("add", "name"),
    [
        (add_a_parameter, "blocks.1.extra"),
        (add_a_module, "blocks.1.up.1.weight"),
        (add_to_a_list, "blocks.3.scale"),
        (add_a_bias, "head.bias"),
    ],
)
def test_a_parameter_added_after_shard_is_named(add, name):
    for begin in (lambda model: None, add_a_module_without_parameters):
        model = penstock.shard(make(Net))
        begin(model)
        loss_of(model, 0, 0)
        add(model)
        for _ in range(2):
            refuses("ESTATE", f"parameter '{name}' was added after shard", loss_of, model, 0, 0)
        penstock.close(model)


def test_sharded_models_can_be_put_into_each_other_and_modules_taken_out():
    model, inner = penstock.shard(make(Net)), penstock.shard(make(Net))
    model.inner = inner
    del model.blocks[2]
    loss_of(model, 0, 0).backward()
    penstock.close(model)
    penstock.close(inner)


def test_a_hook_that_cannot_be_called_is_refused():
    model = penstock.shard(make(Net))
    handle = model.head.weight.register_hook(torch.neg)
    refuses("EUNSUPPORTED", "'head.weight'.*post_accumulate", loss_of, model, 0, 0)
    handle.remove()
    loss_of(model, 0, 0)
    penstock.close(model)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_that_will_be_replaced_are_refused(kind):
    model = make(Net)
    handle = getattr(model.head.weight, kind)(lambda _: None)
    refuses("EINVAL", "'head.weight' of Net has hooks.*after", penstock.shard, model)
    handle.remove()
    penstock.close(penstock.shard(model))


def test_a_parameter_of_two_sharded_models_is_refused():
    first, second = make(Net), make(Net)
    second.head.weight = first.head.weight
    penstock.shard(first)
    refuses("EINVAL", "'head.weight' of Net is in another sharded", penstock.shard, second)
    penstock.close(first)
    penstock.close(penstock.shard(second))


def test_a_trace_needs_a_path():
    model = penstock.shard(make(Net))
    with pytest.raises(PenstockError, match="which file"), penstock.trace(model):
        pass
    penstock.close(model)


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_recorded(tmp_path):
    model = penstock.shard(make(Net))
    for path in (tmp_path / "no" / "such" / "folder.json", "nul\0in folder.json"):
        with pytest.raises(PenstockError, match="folder.json"), penstock.trace(model, path):
            pytest.fail("it was recorded")
    penstock.close(model)


def test_a_trace_is_written_when_what_it_records_fails(tmp_path):
    model = penstock.shard(make(Net))
    path = tmp_path / "trace.json"
    with pytest.raises(ValueError, match="once"), penstock.trace(model, path):
        loss_of(model, 0, 0).backward()
        raise ValueError("once")
    assert "presence" in path.read_text()  # what the ranks compare behind a backward
    penstock.close(model)


def trace_to_one_file(folder):
    model = penstock.shard(make(Net))
    refuses("EINVAL", r"2 ranks.*'rank\{rank\}.json'", penstock.trace(model, "rank.json").__enter__)
    with penstock.trace(model, f"{folder}/rank{{rank}}.json"):  # nothing was begun
        pass
    penstock.close(model)


def test_a_trace_that_ranks_would_write_over_is_refused(worlds, tmp_path):
    worlds(2).run(trace_to_one_file, str(tmp_path))


# ---- ranks that differ ------------------------------------------------------------------------


def shard_differing(change):
    rank, _ = world()
    model = make(Net)
    if rank == 1:
        change(model)
    before = list(model.parameters())
    try:
        penstock.shard(model, timeout=10)
    except PenstockError as error:
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
        return error.status, str(error)
    return "OK", ""


def widen(model):
    model.blocks[1].up = nn.Linear(models.WIDTH, 20, device=models.DEVICE)


def convert(model):
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data.double()


def freeze(model):
    model.blocks[1].up.weight.requires_grad_(False)


def shorten(model):
    del model.blocks[2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (widen, "blocks.1.up.weight"),
        (convert, "blocks.1"),
        (freeze, "blocks.1.up.weight"),
        (shorten, "blocks.2|parameters"),
    ],
    ids=["shape", "dtype", "frozen", "number"],
)
def test_models_that_differ_between_ranks_are_refused(worlds, change, named):
    for status, text in worlds(2).run(shard_differing, change):
        assert status == "EMISMATCH", text
        assert re.search(named, text), text
        assert "rank 0" in text and "rank 1" in text, text


def call_parts(stage):
    rank, _ = world()
    model = penstock.shard(make(models.Tied), stage=stage)
    for called, name, width in (("embed", "embed", 3), ("blocks.0", "blocks.0.up", models.WIDTH)):
        text = f"module '{name}' of the sharded Tied was called outside of the model's own forward"
        inputs = torch.ones(2, width, device=models.DEVICE)
        refuses("ESTATE", text, model.get_submodule(called), inputs)
    loss_of(model, 0, rank).backward()
    assert all(m._is_fsdp_managed_module and m._fsdp_use_orig_params for m in model.modules())
    penstock.close(model)


def test_a_part_of_the_root_that_is_called_by_itself_says_so(worlds):
    worlds(2).run(call_parts, 1)


class Sibling(Net):
    """The last block's forward uses the first one's matrix."""

    class Reader(models.Block):
        def forward(self, x):
            return super().forward(x) @ (self.first[0].weight.T @ self.first[0].weight)

    def __init__(self, shares):
        super().__init__()
        self.blocks[2] = self.Reader()
        self.blocks[2].first = [self.blocks[0].up]  # no submodule of it
        if shares:
            self.blocks[2].shared = self.blocks[0].up.weight


def read_a_sibling(stage):
    rank, _ = world()
    model = penstock.shard(make(lambda: Sibling(shares=False)), stage=stage)
    text = (
        r"mixed torch.Tensor and DTensor(.|\n)*sharded Sibling was used outside .*as an attribute"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            loss_of(model, 0, rank)
    penstock.close(model)
    penstock.close(train_both(lambda: Sibling(shares=True), stage=stage))


@pytest.mark.parametrize("stage", [1, 3])
def test_what_another_block_reads_is_named_unless_both_have_it(worlds, stage):
    worlds(2).run(read_a_sibling, stage)


def run_until_error(kind, steps=3, timeout=20.0, sabotage=None, **options):
    """Train until something fails; returns (status, text, seconds that the failing step took)."""
    rank, _ = world()
    model = penstock.shard(make(kind), timeout=timeout, **options)
    begin = time.monotonic()
    try:
        for step in range(steps):
            begin = time.monotonic()
            if step == 1 and sabotage is not None:
                sabotage(model, rank)
            loss_of(model, step, rank).backward()
    except PenstockError as error:
        return error.status, str(error), time.monotonic() - begin
    finally:
        penstock.close(model)
    return "OK", "", 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_call_different_blocks_get_an_error(worlds, stage):
    for status, text, _ in worlds(2).run(run_until_error, models.OnAnotherPath, stage=stage):
        assert status == "EMISMATCH", text
        assert "rank 1: " in text and re.search("different coll|not the same coll", text), text


def die(model, rank):
    if rank == 1:
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: os._exit(3))


def die_in_backward(model, rank):
    def watch(module, inputs, output):
        output.register_hook(lambda gradient: os._exit(3))

    if rank == 1:
        model.blocks[1].register_forward_hook(watch)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("sabotage", [die, die_in_backward])
def test_the_others_get_an_error_when_a_rank_dies(fresh_world, sabotage, stage):
    answers = fresh_world(3).collect(run_until_error, Net, sabotage=sabotage, stage=stage)
    assert answers[1] == (False, "died with exit code 3")
    for ok, answer in (answers[0], answers[2]):
        assert ok, answer
        assert answer[0] in ("EPEER", "ETIMEDOUT"), answer
        assert "the process of rank 1 (" in answer[1] and "has ended" in answer[1], answer


def stall(model, rank):
    if rank == 1:
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: time.sleep(8))


def test_the_others_get_an_error_when_a_rank_stalls(fresh_world):
    answers = fresh_world(2).collect(run_until_error, Net, sabotage=stall, timeout=3.0)
    ok, answer = answers[0]
    assert ok, answer
    status, text, seconds = answer
    assert status in ("ETIMEDOUT", "EPEER"), text
    assert seconds < 8, "the stalled rank was waited for"


def drop_in_mid_backward(key):
    """The collector ends an engine whose reductions wait for a peer, which waits for a thread."""
    rank, _ = world()
    store = torch.distributed.distributed_c10d._get_default_store()

    def wait_for_key(gradient):
        if rank == 1:
            store.wait([key])

    def let_peer_go():
        time.sleep(0.3)
        store.set(key, "go on")

    sharded = penstock.shard(make(Net), stage=2, bucket_bytes=256, timeout=600)
    sharded.blocks[2].register_forward_hook(
        lambda module, inputs, output: output.register_hook(wait_for_key) and None
    )
    if rank == 0:
        threading.Thread(target=let_peer_go).start()
    with breaking_off(sharded.blocks[1]):
        loss_of(sharded, 0, rank).backward()
    del sharded
    gc.collect()


def test_a_model_that_is_dropped_in_mid_backward_holds_nobody_up(worlds):
    worlds(2).run(drop_in_mid_backward, f"dropped at {time.time()}", answer_within=30)


# ---- process groups ----------------------------------------------------------------


def group_of_others():
    import torch.distributed as dist

    rank, _ = world()
    group = dist.new_group([1])
    for wrong, text in (
        (
            DeviceMesh(models.DEVICE, [[0, 1]]),
            r"DeviceMesh.*one of its dimensions, as mesh\['dp'\]",
        ),
        (DeviceMesh("meta", [0, 1]), f"DeviceMesh.*the model is on {models.DEVICE}"),
    ):
        refuses("EINVAL", text, penstock.shard, make(Net), process_group=wrong)
    if rank == 0:
        refuses("EINVAL", "not a rank", penstock.shard, make(Net), process_group=group)
    else:
        model = penstock.shard(make(Net), process_group=group)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        loss_of(model, 0, 0).backward()
        penstock.close(model)


def test_meshes_of_others_and_a_group_without_this_rank_are_refused(worlds):
    worlds(2).run(group_of_others)
