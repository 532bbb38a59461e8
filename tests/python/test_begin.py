"""How ranks begin: equal, together, with all their memory and threads, or not at all."""

import os
import resource
import socket
import subprocess
import sys

import penstock
import pytest
import torch
from equality import assert_same_parameters, world
from models import Net, loss_of, make
from penstock import _C, PenstockError
from torch import nn


def refuses(status, text, function, *args, **kwargs):
    with pytest.raises(PenstockError, match=text) as caught:
        function(*args, **kwargs)
    assert caught.value.status == status


class Buffered(Net):
    """Buffers of any kind, a frozen parameter, one in bf16 that fills no words."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.norm.requires_grad_(False)
        self.register_buffer("table", torch.randn(3, 4).t())
        self.register_buffer("mask", torch.rand(9) > 0.5, persistent=False)


def begin_unequal():
    rank, _ = world()
    text = (
        "'odd' has other values on rank 1 than on rank 0, and so have 16 of 18: .* broadcast=True"
    )
    refuses("EMISMATCH", text, penstock.shard, make(Buffered, seed=rank))
    text = "'odd' has other values on rank 1 than on rank 0, and so have 1 of "
    for change in (lambda odd: odd[4].add_(rank), lambda odd: odd.copy_(odd.roll(rank))):
        model = make(Buffered)
        with torch.no_grad():
            change(model.odd)
        refuses("EMISMATCH", text, penstock.shard, model)
    assert all(type(p) is nn.Parameter for p in model.parameters())

    first, model = make(Buffered, seed=0), make(Buffered, seed=rank)
    penstock.shard(model, broadcast=True)
    assert_same_parameters(model, first, 0)
    for (name, buffer), twin in zip(model.named_buffers(), first.buffers(), strict=True):
        assert torch.equal(buffer, twin), name
    penstock.close(model)
    model = make(Buffered, seed=rank)
    model.register_buffer("more", torch.zeros(1 + rank))
    refuses("EMISMATCH", "other buffers on rank 1", penstock.shard, model, broadcast=True)


def test_ranks_that_begin_with_other_values_are_told_or_made_equal(worlds):
    worlds(2).run(begin_unequal)


def fail_to_allocate():
    rank, _ = world()
    model = make(Net)
    before = list(model.parameters())
    make_shard, asked = _C.Engine.make_shard, []

    def fail_at_the_third(native, group):
        asked.append(group)
        if rank == 1 and len(asked) == 3:
            raise MemoryError  # without words
        return make_shard(native, group)

    _C.Engine.make_shard = fail_at_the_third
    try:
        refuses("ENOMEM", "rank 1 has no memory.*as they were: MemoryError", penstock.shard, model)
    finally:
        _C.Engine.make_shard = make_shard
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert_same_parameters(model, make(Net), 0)
    penstock.shard(model)
    loss_of(model, 0, rank).backward()
    penstock.close(model)


def test_a_rank_without_memory_leaves_all_models_as_they_were(worlds):
    worlds(2).run(fail_to_allocate)


SCRIPT = """
import torch, penstock
torch.manual_seed(0)
model = penstock.shard(torch.nn.Linear(4, 4))
model(torch.ones(1, 4)).sum().backward()
print(type(model.weight.data).__mro__[1].__name__, model.weight.to_local().shape[0])
"""


def test_processes_that_torchrun_started_find_each_other():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(run, env={**os.environ, **given, "RANK": rank}, stdout=subprocess.PIPE)
        for rank in ("0", "1")
    ]
    for each in ranks:
        assert each.communicate(timeout=120)[0] == b"DTensor 2\n"


def test_one_of_several_processes_that_cannot_join_says_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    text = "WORLD_SIZE=2 says.*RANK.*init_process_group before shard, or unset WORLD_SIZE"
    refuses("EINVAL", text, penstock.shard, make(Net))
    monkeypatch.setenv("WORLD_SIZE", "1")
    penstock.close(penstock.shard(make(Net)))


THREADS = """
import os, resource
import penstock, torch
import torch.distributed as dist

GIB = 1 << 30  # of a thread's stack, by the limit that this process began with

def shard(threads):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(4, 4)
    penstock.shard  # imports it
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + threads * GIB + GIB // 2, -1))
    try:
        penstock.shard(model)
    except Exception as error:
        print(threads, error, flush=True)
        os._exit(1)
    os._exit(0)

threads, code = -1, 1
while code == 1:
    threads += 1
    child = os.fork()
    if child == 0:
        shard(threads)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("ended with", code)
"""


def test_a_thread_that_cannot_be_started_is_an_error():
    run = subprocess.run(
        [sys.executable, "-c", THREADS],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, -1)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *errors, end = run.stdout.splitlines()
    assert end == "ended with 0", run.stdout + run.stderr
    assert len(errors) > 2, errors
    for text in errors:
        assert "temporarily unavailable" in text or "could not be started" in text, errors


def ask_beside_a_comparison():
    """Rank 0 begins what a thread of its engine would, before it asks, and rank 1 behind it."""
    model = penstock.shard(make(Net))
    ranks, engine = world(), penstock._engine.engine_of(model)
    mine = torch.full((32,), ranks[0], dtype=torch.uint8)
    everyones = mine.new_empty(32 * ranks[1])

    def compare():
        return engine.world.gather._allgather_base(everyones, mine)

    begun = compare() if ranks[0] == 0 else None
    answers = engine.world.all_gather(torch.tensor([ranks[0]], dtype=torch.uint8))
    (begun or compare()).wait()
    assert answers.flatten().tolist() == [*range(ranks[1])]
    assert everyones.view(ranks[1], 32).float().mean(dim=1).tolist() == [*range(ranks[1])]
    penstock.close(model)


def test_questions_pass_beside_what_threads_of_the_engine_exchange(worlds):
    worlds(2).run(ask_beside_a_comparison)
