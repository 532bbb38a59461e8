"""What a profiler is shown of a training that it is attached to."""

import ctypes
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import penstock
import pytest
from made_traces import BUILD
from models import Net, make
from test_beat import train

TRAINS = """
import ctypes, os, sys, threading
sys.path.insert(0, os.environ["TESTS"])
import penstock
from models import Net, loss_of, make
from test_beat import train
model = make(Net)
penstock.shard(model, blocks=[*model.blocks])
train(model, 2)
blocks, loss = [*model.blocks], loss_of(model, 0, 0)
blocks[1].forward = None
try:
    loss_of(model, 1, 0)
except TypeError:
    pass
penstock.close(model)
profiler = ctypes.CDLL(os.environ["PROFILER"])
profiler.recorded.restype = ctypes.c_char_p
print(threading.get_native_id())
for line in range(profiler.recorded_count()):
    print(profiler.recorded(line).decode())
"""


def profiler():
    """Return the profiler's path."""
    path = BUILD / "tests" / "libnvtx_injection.so"
    if not path.exists():
        pytest.skip(f"{path} is not built: NVTX's headers are missing, or ./dev build was not run")
    return path


def shown(attached):
    """Train; return the training's thread, and what a profiler was told: thread, what, text."""
    environment = {
        **os.environ,
        "TESTS": str(Path(__file__).parent),
        "PROFILER": str(profiler()),
        **({"NVTX_INJECTION64_PATH": str(profiler())} if attached else {}),
    }
    done = subprocess.run(
        [sys.executable, "-c", TRAINS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    thread, *lines = done.stdout.splitlines()
    parts = [line.split(" ", 3) for line in lines]
    return thread, [(of, what, text) for of, what, domain, text in parts if domain == "penstock"]


def test_steps_passes_and_blocks_are_ranges_of_the_process():
    thread, told = shown(attached=True)
    names, order = {}, []
    for of, what, text in told:
        number, _, name = text.partition(" ")
        if what == "begin":
            assert number not in names
            names[number] = name
            order.append(f"+{name}")
            assert name.startswith("backward") or of == thread
        elif what == "end":
            order.append(f"-{names[number]}")
    for name in ("step", "forward", "backward", "optimizer", "forward blocks.1"):
        assert order.count(f"+{name}") == order.count(f"-{name}") > 0, (name, order)
    assert sorted(part[1:] for part in order if part[0] == "+") == sorted(
        part[1:] for part in order if part[0] == "-"
    )
    first = order[: order.index("-optimizer")]
    for name in ("forward", "backward"):
        begin, end = first.index(f"+{name}"), first.index(f"-{name}")
        assert 0 == first.index("+step") < begin < first.index(f"+{name} blocks.1") < end
        assert first.index(f"-{name} blocks.1") < end
    assert first.index("-forward") < first.index("+backward")
    assert first.index("-backward") < first.index("+optimizer")
    assert order.count("+step") == 3  # the third one has no optimizer
    assert order.count("+forward") == 4 and order.count("+forward blocks.1") == 4


def train_profiled(path):
    """Attach the profiler to this process, train, and return what it was told."""
    os.environ["NVTX_INJECTION64_PATH"] = path
    model = penstock.shard(make(Net))
    train(model, 2)
    penstock.close(model)
    profiler = ctypes.CDLL(path)
    profiler.recorded.restype = ctypes.c_char_p
    lines = [profiler.recorded(i).decode() for i in range(profiler.recorded_count())]
    return [line.split(" ", 3) for line in lines]


def test_launches_of_tasks_are_ranges_of_their_threads(fresh_world):
    for told in fresh_world(2).run(train_profiled, str(profiler())):
        open_ranges, launched = defaultdict(list), set()
        for thread, what, _, text in told:
            if what == "push":
                open_ranges[thread].append(text)
                launched.add(text)
            elif what == "pop":
                open_ranges[thread].pop()
        assert open_ranges and not any(open_ranges.values())
        assert any("blocks.0" in name for name in launched), launched


def test_without_a_profiler_nothing_is_loaded():
    assert shown(attached=False)[1] == []
