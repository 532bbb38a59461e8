"""What `python -m penstock.top` finds of jobs that train, hang, stop and end."""

import ctypes
import gc
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import penstock
import pytest
import torch
import torch.distributed as dist
from equality import world
from made_traces import BUILD
from models import DEVICE, Net, make
from penstock import _C, top
from penstock._engine import engine_of
from penstock._page import Head, open_page, read_page, unit_names
from penstock.top import Row, Task, Watch, choose, find_ranks, format_job, format_jobs
from test_beat import Called, train

ROW = Row(
    rank=0,
    pid=11,
    state="",
    step=7,
    phase="forward",
    unit="blocks.1",
    is_behind=False,
    place_seconds=0.25,
    step_seconds=0.0125,
    exposed_share=0.5,
    idle_share=None,
    bandwidths={"gather": 2.5e9},
    memory={"shards": 3 << 20, "gathers": 3 << 19, "buckets": 0, "pinned": 0},
    oldest=Task("gather", "blocks.2", 41, 1.5),
)


def ranks_of(*models):
    """Find the ranks of these models, which others of this process may live beside."""
    pages = [engine_of(model).world.roll.page.descriptor for model in models]
    ranks = choose(find_ranks(), str(os.getpid()))
    return sorted(
        (one for one in ranks if one.head.descriptor in pages),
        key=lambda one: pages.index(one.head.descriptor),
    )


def run_top(*arguments):
    command = [sys.executable, "-m", "penstock.top", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# ---- of this process ----------------------------------------------------------------------------


def test_a_page_says_what_the_engine_says():
    model = penstock.shard(make(Net), param_dtype=None)
    train(model, 3)
    (rank,) = ranks_of(model)
    row = rank.look()
    stats, seen = penstock.stats(model), rank.head.engine
    for name in ("gathers", "gather_bytes", "reduces", "reduce_bytes", "all_reduces", "exposed_ns"):
        assert getattr(seen, name) == getattr(stats, name), name
    assert seen.stalled_ns == stats.device_gather_ns + stats.device_reduce_ns
    assert (seen.timed_waits, seen.untimed_waits) == (stats.timed_waits, stats.untimed_waits)
    assert seen.passes == stats.forwards + stats.backwards == 6
    assert row.memory["gathers"] == stats.arena_reserved
    assert row.memory["buckets"] == stats.sources_reserved + stats.staging_reserved
    assert row.memory["shards"] >= sum(p.numel() * 4 for p in make(Net).parameters())
    assert (row.rank, row.pid, row.state, row.step) == (0, os.getpid(), "", 2)
    assert (row.phase, row.unit, row.is_behind) == ("optimizer", "", True)
    assert rank.head.place.steps == 2 and row.step_seconds > 0
    assert 0 <= row.exposed_share <= 1
    before = row.step_seconds
    assert rank.look().step_seconds == before  # none has ended since
    penstock.close(model)
    assert ranks_of(model) == []
    assert rank.look().state == "has closed its model"


def test_units_have_their_names():
    model = make(Called)
    penstock.shard(model, blocks=[*model.blocks])
    seen = []
    (rank,) = ranks_of(model)
    model.blocks[1].in_forward = lambda: seen.append(rank.look())
    train(model, 2)
    assert [(row.step, row.phase, row.unit, row.is_behind) for row in seen] == [
        (step, "forward", "blocks.1", False) for step in range(2)
    ]
    penstock.close(model)


def test_a_child_of_fork_is_no_rank_and_a_process_that_was_killed_leaves_nothing():
    page = _C.Page()
    model = penstock.shard(make(Net))
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        pids = {rank.pid for rank in find_ranks()}
        assert os.getpid() in pids and child not in pids
        assert os.path.exists(f"/proc/{child}/fd/{page.descriptor}")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert open_page(child, page.descriptor) is None
    assert read_page(open_page(os.getpid(), page.descriptor)) is None  # no runtime has it
    penstock.close(model)


def read_a_page():
    """Read this process's page as another one does; it has no descriptor left when it ends."""
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    page = _C.Page()
    page.name_units(["", "a"])
    seen = open_page(os.getpid(), page.descriptor)
    page.reach(3, 1, 2, True)
    found = _C.describe_page(seen), page.describe(), page.count, open_page(os.getpid(), -1)
    names = unit_names(seen, Head.from_buffer_copy(seen))
    mode = os.stat(f"/proc/self/fd/{page.descriptor}").st_mode & 0o777
    del page, seen
    gc.collect()
    return found, names, mode, sorted(os.listdir("/proc/self/fd")) == before


def leave_a_thread_behind():
    """A thread of the library stays in a signal's handler; the model is closed, and goes."""
    dist.destroy_process_group()  # whose threads are not the library's
    libc, pid = ctypes.CDLL(None), os.getpid()
    before = {*os.listdir("/proc/self/task")}
    model = penstock.shard(make(Net), timeout=0.5)
    libc.signal(signal.SIGFPE, ctypes.cast(libc.pause, ctypes.c_void_p))
    for thread in {*os.listdir("/proc/self/task")} - before:
        libc.tgkill(pid, int(thread), signal.SIGFPE)
    with pytest.raises(penstock.PenstockError, match="is not destroyed"):
        penstock.close(model)
    del model
    gc.collect()
    return "/memfd:penstock" in Path("/proc/self/maps").read_text()


def test_a_page_stays_where_a_thread_that_writes_it_does_not_end(fresh_world):
    assert fresh_world(1).run(leave_a_thread_behind) == [True]


def test_a_page_shows_what_is_written_later_is_its_owners_and_leaves_nothing():
    where = "behind 'a' (step 3, recompute)"
    assert read_a_page() == ((where, where, 1, None), ["", "a"], 0o600, True)


# ---- of several ranks ---------------------------------------------------------------------------


def stop_in_a_step(number):
    """Have rank 1 get a signal in a forward."""
    rank, _ = world()
    model = make(Called)
    penstock.shard(model, timeout=60, blocks=[*model.blocks])
    train(model, 2)
    if rank == 1:
        model.blocks[1].in_forward = lambda: os.kill(os.getpid(), number)
    train(model)


def until(look, holds):
    """Look until something holds of the ranks' rows; return them."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        rows = [row for _, _, rows in look() for row in rows]
        if holds(rows):
            return rows
        time.sleep(0.05)
    raise AssertionError(rows)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="a rank on a GPU does not wait for others, its device does"
)
def test_a_rank_that_is_stopped_and_one_that_waits_for_it_are_told(fresh_world):
    ranks = fresh_world(2)
    for pipe in ranks.pipes:
        pipe.send((stop_in_a_step, (signal.SIGSTOP,), {}))
    pids = [process.pid for process in ranks.processes]

    def find():
        return Watch(choose(find_ranks(), str(pids[0]))).look()

    def is_told(rows):  # what top shows of lanes may be as old as the last look at them
        if [row.state for row in rows] != ["", "is stopped"]:
            return False
        task = rows[0].oldest
        return task is not None and task.lane == "gather" and task.ticket > 0

    rows = until(find, is_told)
    assert [row.pid for row in rows] == pids
    assert (rows[1].step, rows[1].phase, rows[1].unit) == (2, "forward", "blocks.1")
    watch = Watch(choose(find_ranks(), str(pids[1])))
    (job, size, _) = watch.look()[0]
    assert size == 2 and re.fullmatch(r"Called-[0-9a-f]{8}", job)
    given = json.loads(run_top("--once", "--json", job).stdout)
    assert [row["state"] for row in given["jobs"][0]["ranks"]] == ["", "is stopped"]
    os.kill(pids[1], signal.SIGKILL)
    rows = until(watch.look, lambda rows: rows[1].state == "has ended")
    assert rows[1].unit == "blocks.1"
    until(find, lambda rows: all(row.pid != pids[1] for row in rows))


def test_a_program_in_c_is_seen():
    program = BUILD / "tests" / "sched_test_post"
    if not program.exists():
        pytest.skip(f"{program} is not built: run ./dev build, or set PENSTOCK_BUILD")
    command = f"{sys.executable} -m penstock.top --once --json $PPID"
    environment = {**os.environ, "PST_TOP": command}
    done = subprocess.run([program], env=environment, check=True, capture_output=True)
    (given,) = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    (job,) = json.loads(given)["jobs"]
    assert (job["job"], job["world_size"], len(job["ranks"])) == ("penstock", 1, 1)
    oldest = job["ranks"][0]["oldest"]
    assert (oldest["lane"], oldest["name"], oldest["ticket"]) == ("gather", "layer 7", 41)


# ---- the command --------------------------------------------------------------------------------


def test_it_needs_neither_torch_nor_the_library():
    program = "import penstock.top, sys; print({'torch', 'penstock._C'} & {*sys.modules})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr


def test_one_table_has_a_line_a_rank():
    model = penstock.shard(make(Net))
    train(model, 2)
    done = run_top("--once", ranks_of(model)[0].job)
    assert done.returncode == 0, done.stderr
    head, figures, rank, _, places, where = done.stdout.splitlines()
    assert re.fullmatch(r"Net-[0-9a-f]{8}: 1 of 1 ranks", head)
    assert figures.split()[:3] == ["rank", "process", "step"] and "shards" in figures
    assert rank.split()[:3] == ["0", str(os.getpid()), "1"] and "MiB" in rank
    assert places.split()[0] == "rank" and "behind the optimizer" in where
    penstock.close(model)


def test_it_goes_on_in_a_terminal_until_it_is_interrupted():
    model = penstock.shard(make(Net))
    ours, theirs = pty.openpty()
    program = (
        "import signal, sys; from penstock import top\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have it ignored
        "sys.exit(top.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "--interval", "0.05", ranks_of(model)[0].job]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    try:
        shown = b""
        while shown.count(b"\x1b[H\x1b[J") < 3:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert b"before the first forward" in shown
    penstock.close(model)


def test_it_ends_with_the_job():
    program = (
        "import penstock, sys; sys.path.insert(0, sys.argv[1]); from models import *\n"
        "model = penstock.shard(make(Net)); print('there', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, os.path.dirname(__file__)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout.readline() == b"there\n"
        arguments = ["--interval", "0.05", "--json", str(job.pid)]
        watch = subprocess.Popen(
            [sys.executable, "-m", "penstock.top", *arguments], stdout=subprocess.PIPE
        )
        first = json.loads(watch.stdout.readline())
        job.kill()
        job.wait()
        lines = watch.communicate(timeout=30)[0].splitlines()
    assert watch.returncode == 0
    assert [row["state"] for row in first["jobs"][0]["ranks"]] == [""]
    assert [row["state"] for row in json.loads(lines[-1])["jobs"][0]["ranks"]] == ["has ended"]


def test_without_a_job_it_says_so_and_several_are_listed():
    done = run_top("no such job")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == (
        "no job of this user runs on this machine with the name or process no such job\n"
    )
    models = [penstock.shard(make(Net)) for _ in range(2)]
    assert len(ranks_of(*models)) == 2
    done = run_top()
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and lines[0] == ["job", "ranks", "here", "step", "processes"]
    for rank in ranks_of(*models):
        assert [rank.job, "1", "of", "1", "0", str(os.getpid())] in lines
    for model in models:
        penstock.close(model)


def open_runtime():
    """Open one with a page of its own, as a program in C does."""
    roll = SimpleNamespace(page=_C.Page())
    return _C.Runtime("epochs", 0, 1, 60.0, torch.device("cpu"), 0, roll)


def test_a_job_that_opens_another_runtime_goes_on():
    runtime = open_runtime()
    watch = Watch([one for one in find_ranks() if one.job == "epochs"])
    runtime.destroy()
    assert [row.state for _, _, rows in watch.look() for row in rows] == ["has closed its model"]
    del runtime  # and its descriptor, which the next one gets
    runtime = open_runtime()
    assert [row.state for _, _, rows in watch.look() for row in rows] == [""]
    runtime.destroy()


# ---- in words -----------------------------------------------------------------------------------


def test_a_job_is_two_tables_and_says_who_is_not_seen():
    gone = Row(**{**vars(ROW), "rank": 3, "pid": 12, "state": "has ended", "oldest": None})
    assert format_job("run", 6, [ROW, gone]) == (
        "run: 2 of 6 ranks; not seen, as on other machines or ended: 1-2, 4-5\n"
        "rank  process  step  step time  exposed  idle     gather   shards  gathers\n"
        "   0       11     7    12.5 ms    50.0%     -  2.50 GB/s  3.0 MiB  1.5 MiB\n"
        "   3       12     7    12.5 ms    50.0%     -  2.50 GB/s  3.0 MiB  1.5 MiB\n"
        "\n"
        "rank  is                                  since  oldest unfinished task            age\n"
        "   0  in 'blocks.1' (forward)             0.2 s  blocks.2 on gather (ticket 41)  1.5 s\n"
        "   3  has ended; in 'blocks.1' (forward)  0.2 s  -                                   -\n"
    )


def test_what_is_not_known_is_a_dash():
    row = Row(0, 1, "", 0, "", "", False, None, None, None, None, {}, dict(ROW.memory), None)
    lines = format_job("run", 1, [row]).splitlines()
    assert lines[2].split()[3:6] == ["-", "-", "-"]
    assert lines[-1].split() == ["0", "before", "the", "first", "forward", "-", "-", "-"]


def page_of(**given):
    """Make a page's head of what is given."""
    head = Head()
    for name, value in given.items():
        part, _, field = name.partition("__")
        setattr(getattr(head, part) if field else head, field or part, value)
    return head


def test_shares_and_bandwidths_are_of_the_time_between_two_looks():
    before = page_of(place__count=1, place__steps=2, place__steps_ns=100, place__step_began=1000)
    before.engine.exposed_ns, before.engine.stalled_ns, before.engine.timed_waits = 50, 5, 2
    before.lane_count = 2
    for lane, (name, moved, busy) in zip(
        before.lanes, ((b"gather", 100, 10), (b"reduce", 7, 7)), strict=False
    ):
        lane.name, lane.bytes, lane.busy_ns = name, moved, busy
    watched = top.Watched(os.getpid(), None, before)
    first = watched._row_of("", top._sums_of(before, 1100), 1100)
    assert first.step_seconds == 50e-9 and first.exposed_share == 0.25
    assert first.idle_share == 0.025
    assert first.bandwidths == {"gather": 10e9, "reduce": 1e9}
    watched._before, watched._row = top._sums_of(before, 1100), first
    after = Head.from_buffer_copy(before)
    after.place.step_began, after.place.steps, after.place.steps_ns = 2000, 4, 1100
    after.engine.exposed_ns = 150
    after.lanes[0].bytes, after.lanes[0].busy_ns = 400, 20
    watched.head = after
    second = watched._row_of("", top._sums_of(after, 2100), 2100)
    assert second.step_seconds == 500e-9 and second.exposed_share == 0.1
    assert second.idle_share is None  # nothing was timed since
    assert second.bandwidths == {"gather": 30e9}
    after.engine.exposed_ns = 10  # counted anew
    assert watched._row_of("", top._sums_of(after, 2100), 2100).exposed_share == 10 / 1200


def test_jobs_are_listed_with_their_processes():
    model = penstock.shard(make(Net))
    (rank,) = ranks_of(model)
    lines = format_jobs([rank]).splitlines()
    assert lines[1].split() == [rank.job, "1", "of", "1", "0", str(os.getpid())]
    penstock.close(model)
