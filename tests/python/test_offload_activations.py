"""Blocks that offload their activations: the same bits as without, and what is where when."""

import gc
import logging
import time
import weakref
from contextlib import contextmanager
from itertools import groupby

import models
import penstock
import pytest
import test_tensor_parallel
import torch
from equality import breaking_off, train_both, world
from models import DEVICE, Net, batch, loss_of, make
from penstock import PenstockError, _host_memory, _offload
from penstock._engine import engine_of
from test_checkpoint import (
    KINDS,
    MIB,
    OF_A_BLOCK,
    ROWS,
    Block,
    Dropping,
    Messages,
    Trainer,
    assert_same,
    on_cpus,
    on_gpus,
    train,
    train_wide,
)
from test_offload import accumulating, evaluating, plainly, under_a_graph_that_is_kept, without_sync
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

OFFLOADED = {"offload": "activations"}
EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture(autouse=True)
def small_ones_leave():
    with offloading_all():
        yield


@contextmanager
def offloading_all():
    """Have whatever a block saves leave: the models of tests are small."""
    before, _offload._LEAST = _offload._LEAST, 1
    try:
        yield
    finally:
        _offload._LEAST = before


def offloader(model):
    return engine_of(model).offloading


# ---- what is trained is the same -----------------------------------------------------------------

WAYS = {
    "all": OFFLOADED,
    "one": OFFLOADED | {"checkpoint": "blocks.1"},
}
if DEVICE == "cpu":  # on GPUs the host's optimizer has bits of its own, and bytes are the peak's
    WAYS["with the optimizer's"] = {"offload": ("activations", "optimizer")}
    WAYS["with groups that stay"] = OFFLOADED | {"memory": 1 << 30}


def train_in_all_ways(stage, ways, compiled):
    torch._dynamo.reset()
    with offloading_all():
        for compiles in ("", *compiled):
            want = train(Dropping, stage=stage, compiles=compiles)
            for name in ("all",) if compiles else ways:
                found = train(Dropping, stage=stage, compiles=compiles, **WAYS[name])
                assert_same(found, want)


def test_training_is_the_same_bit_for_bit(worlds):
    worlds(2).run(train_in_all_ways, 3, list(WAYS), ("before", "after"))


def test_gathered_parameters_stay(worlds):
    worlds(2).run(train_in_all_ways, 1, ["all"], ())


def test_training_without_process_group_is_the_same_bit_for_bit():
    train_in_all_ways(3, list(WAYS), ())


def train_kinds(stage):
    with offloading_all():
        for kind in [*KINDS, models.ChangedInPlace, models.FrozenChangedInPlace]:
            sharded = train_both(kind, stage=stage, **OFFLOADED)
            assert all(block.offloads for block in engine_of(sharded).checkpointed)
            penstock.close(sharded)


def test_all_kinds_of_models_equal_unsharded(worlds):
    worlds(2).run(train_kinds, 3)


def of_two_forwards(model, number, rank):
    (loss_of(model, number, rank) * loss_of(model, number + 1, rank)).backward()


def of_two_forwards_in_turn(model, number, rank):
    first, second = loss_of(model, number, rank), loss_of(model, number + 1, rank)
    first.backward()
    second.backward()


def broken_off(model, number, rank):
    for block in (2, 0):
        with breaking_off(model.blocks[block]):
            loss_of(model, number + 1, rank).backward()
        model.zero_grad()
    plainly(model, number, rank)


def failing_forward(model, number, rank):
    """A forward that fails leaves nothing behind."""
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3, device=DEVICE))
    handle = model.blocks[2].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, number, rank)
    handle.remove()
    plainly(model, number, rank)


BACKWARDS = [
    plainly,
    accumulating,
    without_sync,
    evaluating,
    under_a_graph_that_is_kept,
    of_two_forwards,
    of_two_forwards_in_turn,
    broken_off,
    failing_forward,
]


def assert_nothing_stays(offloading):
    """Copies of what nobody has any more may be on their way; a traceback may hold a graph."""
    until = time.monotonic() + 20
    while offloading.stats()["host_bytes"] > 0:
        assert time.monotonic() < until, "something stays on the host"
        gc.collect()


def train_by(backward, options):
    model = penstock.shard(make(Net), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for number in range(4):
        backward(model, number, world()[0])
        seen += [penstock._world.local_of(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert_nothing_stays(offloader(model))
    penstock.close(model)
    return seen


def train_by_all():
    with offloading_all():
        for backward in BACKWARDS:
            try:
                assert_same(train_by(backward, OFFLOADED), train_by(backward, {}))
            except AssertionError as error:
                raise AssertionError(backward.__name__) from error


def test_backwards_of_all_kinds_are_the_same_bit_for_bit(worlds):
    worlds(2).run(train_by_all)


def divide_and_train():
    with offloading_all():
        found = []
        for options in (OFFLOADED, {"checkpoint": "selective"}, {}):
            model = test_tensor_parallel.ours(test_tensor_parallel.square(), **options)
            for step in range(2):
                test_tensor_parallel.loss_of(model, step, 0).backward()
            found.append([penstock._world.local_of(p.grad) for p in model.parameters()])
            left = penstock.stats(model).offload_bytes
            assert (left > 2 * 3 * 4 * 8 * 8) == (options == OFFLOADED)  # a tensor of a block
            penstock.close(model)
        assert_same(found[0], found[2])
        assert_same(found[1], found[2])


def test_dtensors_leave_or_are_recomputed_as_well(worlds):
    worlds(4).run(divide_and_train)


def test_parameters_may_be_unfrozen():
    found = []
    for options in (OFFLOADED, {}):
        trainer = Trainer(frozen=[1], **options)
        trainer.train(2)
        trainer.model.blocks[1].requires_grad_(True)
        trainer.train(3)
        found.append(trainer.finish())
    assert_same(*found)


# ---- what is where -------------------------------------------------------------------------------


class Watched(Net):
    """Notes the storages of what its blocks save."""

    def __init__(self):
        super().__init__()
        self.saved = {}

        def note(place, module, inputs, output):
            self.saved[place] = StorageWeakRef(output.untyped_storage())

        for place, block in enumerate(self.blocks):
            block.up.register_forward_hook(lambda *given, place=place: note(place, *given))

    def is_there(self):
        """Whether each block's is on the device."""
        return [not self.saved[place].expired() for place in range(3)]


class SavesInput(Block):
    def forward(self, x):
        up = self.up(x)
        return x + self.down(torch.sin(up))  # the sine's backward needs `up`


def watched():
    model = make(Watched)
    for block in model.blocks:
        block.__class__ = SavesInput
    return penstock.shard(model, **OFFLOADED)


def test_a_forward_holds_the_activations_of_the_last_call_alone():
    model = watched()
    loss = loss_of(model, 0, 0)
    assert model.is_there() == [False, False, True]
    loss.backward()
    assert model.is_there() == [False, False, False]
    penstock.close(model)


def test_activations_come_back_one_block_ahead():
    model = watched()
    loads = []

    def watch(module, inputs, output):
        output.register_hook(lambda _: loads.append(offloader(model).stats()["loads"]))

    for block in model.blocks:
        block.down.register_forward_hook(watch)
    loss_of(model, 0, 0).backward()
    stores = offloader(model).stats()["stores"]
    each = stores // 3
    assert stores == 3 * each
    # When the gradient of the second block's output is there, its activations were on their way,
    # and when its backward has begun, the first block's are; the third block's have never left.
    assert loads == [0, each, 2 * each], (loads, each)
    assert penstock.stats(model).offloaded_blocks == 3
    penstock.close(model)


class Listed:
    """What is stored, and notes what is asked of it."""

    def __init__(self, stored, note):
        self._stored, self._note = stored, note

    def __getattr__(self, name):
        self._note(name)
        return getattr(self._stored, name)


def listing(calls, block):
    """Return the class Offload, whose calls are noted with the block that they are for."""

    class Listing(penstock._C.Offload):
        def store(self, tensor):
            of = block[0]
            calls.append(("store", of))
            return Listed(super().store(tensor), lambda name: calls.append((name, of)))

    return Listing


def test_compute_comes_behind_each_copy_before_it_uses_memory_of_it(monkeypatch):
    calls, block = [], [None]
    monkeypatch.setattr(_offload._C, "Offload", listing(calls, block))
    model = penstock.shard(make(Net), **OFFLOADED)
    for place, one in enumerate(model.blocks):
        one.register_forward_hook(lambda *_, place=place: block.__setitem__(0, place))
    loss_of(model, 0, 0).backward()
    assert [call for call, _ in groupby(calls)] == [
        ("store", 0),
        ("wait_store", 0),  # when the second block's call has ended
        ("store", 1),
        ("wait_store", 1),
        ("store", 2),
        ("load", 1),  # when the third block's backward begins
        ("wait_store", 2),
        ("load", 0),
        ("wait_load", 1),
        ("wait_load", 0),
    ]
    for place in (0, 1):
        counts = {name: calls.count((name, place)) for name in ("store", "load", "wait_load")}
        assert len(set(counts.values())) == 1, counts
    penstock.close(model)


def test_figures_begin_anew_when_they_are_reset():
    model = penstock.shard(make(Net), **OFFLOADED)
    loss_of(model, 0, 0).backward()
    first = penstock.stats(model, reset=True)
    assert first.offload_bytes > first.reload_bytes > 0 and first.offload_host_peak > 0
    assert penstock.stats(model).offload_bytes == 0
    loss_of(model, 0, 0).backward()
    assert penstock.stats(model).offload_bytes == first.offload_bytes
    assert "penstock_offloaded_bytes_total" in penstock.stats(model, format="prometheus")
    penstock.close(model)


class Views(Block):
    """Saves one storage several times, as it is and as views, and a tensor of the CPU."""

    def forward(self, x):
        wide = self.up(x)
        first, second = wide[:, :5], wide[:, 5:10].t()
        self.scale_ = torch.tensor(2.0)  # on the CPU
        joined = (first * second.t()).sin() @ wide[:, :5].t()
        return x + self.scale * joined.mean() + self.down(wide) * self.scale_ * 3


class ViewsNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Views(11 + 2 * i) for i in range(3))


def test_a_storage_that_is_saved_several_times_leaves_once():
    with_views = penstock.shard(make(ViewsNet), **OFFLOADED)
    loss_of(with_views, 0, 0).backward()
    reference = make(ViewsNet)
    seen = []

    def pack(tensor):
        if all(tensor.untyped_storage().data_ptr() != p.data_ptr() for p in reference.parameters()):
            seen.append((tensor.untyped_storage().data_ptr(), tensor.untyped_storage()))
        return tensor

    block, inputs = reference.blocks[0], torch.rand(4, 7, requires_grad=True, device=DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = block(inputs)
    storages = {place for place, _ in seen} - {inputs.data_ptr(), out.data_ptr()}
    on_device = len(storages) - (DEVICE == "cuda")
    assert len(seen) > len(storages)
    assert offloader(with_views).stats()["stores"] == 3 * on_device
    penstock.close(with_views)
    penstock.close(train_both(ViewsNet, **OFFLOADED))


@on_cpus
def test_what_leaves_is_what_a_checkpoint_would_drop():
    trainer = Trainer(Dropping, **OFFLOADED)
    trainer.step(size=300)
    left = penstock.stats(trainer.model).offload_bytes
    trainer.finish()
    trainer = Trainer(Dropping, checkpoint="auto", memory=1 << 30)
    trainer.train(4, size=300)
    kept = penstock.stats(trainer.model).kept_activations_bytes
    trainer.finish()
    assert 0 <= kept - left < 3 * 4 * 512  # which is in multiples of 512


def test_what_is_small_stays():
    _offload._LEAST = 4096
    model = penstock.shard(make(Net), **OFFLOADED)
    loss_of(model, 0, 0).backward()
    assert penstock.stats(model).offload_bytes == 0
    penstock.close(model)


def test_a_model_that_holds_its_loss_is_collected():
    model = penstock.shard(make(Net), **OFFLOADED)
    model.loss = loss_of(model, 0, 0)  # whose graph the garbage collector does not look into
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# ---- what cannot be ------------------------------------------------------------------------------


@on_cpus
def test_what_the_host_has_no_memory_for_stays(monkeypatch):
    messages = Messages()
    monkeypatch.setattr(_offload, "host_share", lambda world: 2 * OF_A_BLOCK)
    found = []
    for options in (OFFLOADED, {}):
        trainer = Trainer(**options)
        trainer.train(3, size=9)
        if options:
            figures = penstock.stats(trainer.model)
            assert 0 < figures.offload_host_peak <= 2 * OF_A_BLOCK
        found.append(trainer.finish())
    assert_same(*found)
    told = [line for line in messages.lines if "no more memory for activations" in line]
    assert len(told) == 1


@pytest.mark.parametrize("place", [0, 2])  # whose activations have left, and have not
def test_what_is_changed_in_place_behind_is_told(place):
    model = watched()
    changed = []

    def change(module, inputs, output):
        changed[-1].detach().add_(1.0)

    block = model.blocks[place]
    block.up.register_forward_hook(lambda m, i, out: changed.append(out))
    block.register_forward_hook(change)
    loss = loss_of(model, 0, 0)
    changed.clear()
    with pytest.raises(PenstockError, match="modified by an inplace operation"):
        loss.backward()
    penstock.close(model)


def test_activations_of_a_closed_model_are_lost():
    model = penstock.shard(make(Net), **OFFLOADED)
    loss = loss_of(model, 0, 0)
    penstock.close(model)
    with pytest.raises(PenstockError):
        loss.backward()


def refuses(text, **options):
    with pytest.raises(PenstockError, match=text) as caught:
        penstock.shard(make(Net), **options)
    assert caught.value.status == "EINVAL"


def test_wrong_options_are_named():
    refuses("^offload='blocks': give one or several of 'optimizer'", offload="blocks")
    refuses("^offload=.'activations', 5.: give", offload=["activations", 5])
    refuses("^checkpoint= names 'norm', which matches no block", checkpoint="norm", **OFFLOADED)
    with pytest.raises(PenstockError, match="^offload='activations': Linear has no blocks"):
        penstock.shard(nn.Linear(3, 3).to(DEVICE), **OFFLOADED)


def test_a_step_is_not_captured(caplog):
    model = penstock.shard(make(Net), **OFFLOADED)

    @penstock.step(model)
    def step(inputs):
        model(inputs).square().mean().backward()

    with caplog.at_level(logging.WARNING, "penstock"):
        step(batch(0, 0))
    assert DEVICE != "cuda" or "offload='activations'" in caplog.text
    penstock.close(model)


# ---- the host's memory ---------------------------------------------------------------------------


def test_a_control_group_limits_what_is_free(tmp_path):
    names = ("memory.max", "memory.current", "inactive_file")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    assert list(_host_memory._limit_of(tmp_path, *names)) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert list(_host_memory._limit_of(tmp_path, *names)) == [(1000, 500)]
    assert list(_host_memory._limit_of(tmp_path / "none", *names)) == []


def share_of_host():
    trainer = Trainer()
    share = _host_memory.host_share(engine_of(trainer.model).world)
    trainer.finish()
    return share


def test_ranks_of_a_host_share_its_memory(worlds, monkeypatch):
    alone = share_of_host()
    total, available = _host_memory.host_memory()
    assert 0 <= alone <= available <= total
    shares = worlds(2).run(share_of_host)
    assert all(share < 0.6 * total for share in shares)


# ---- on GPUs -------------------------------------------------------------------------------------


def train_wide_offloaded():
    """Forwards hold two blocks' activations beside what they compute: not those of twelve."""
    kept, most = train_wide(lambda _: ROWS)
    values = [penstock._world.local_of(p).clone() for p in kept.parameters()]
    penstock.close(kept)
    del kept
    recomputed, least = train_wide(lambda _: ROWS, checkpoint="*")
    penstock.close(recomputed)
    del recomputed
    model, peak = train_wide(lambda _: ROWS, **OFFLOADED)
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(penstock._world.local_of(parameter), value)
    penstock.close(model)
    assert peak <= least + 2 * 128 * MIB + 64 * MIB < most, (least, peak, most)


@on_gpus
def test_a_gpu_holds_the_activations_of_two_blocks(worlds):
    worlds(1).run(train_wide_offloaded)
