"""What becomes of ranks when a process forks, is interrupted, stops or ends, and who says so."""

import atexit
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import penstock
import pytest
import torch.distributed as dist
from deepcompile_job import Job
from equality import sgd, world
from models import Net, loss_of, make
from penstock import PenstockError, dc
from penstock._roll import Roll, _leave_all, long_wait
from penstock._trace_hang import read as read_hangs


def error_of(function, *args, **kwargs):
    """Return what a call raises: its status, or the type's name, and text."""
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return getattr(error, "status", type(error).__name__), str(error)
    return "OK", ""


def store():
    return dist.distributed_c10d._get_default_store()


# ---- fork ---------------------------------------------------------------------------------------


def status_of_child(body):
    """Run `body` in a child of fork, then what an interpreter does at its end; None: it hangs."""
    child = os.fork()
    if child == 0:
        try:
            body()
            gc.collect()
            atexit._run_exitfuncs()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def drop_a_model():
    """Leave a sharded model to the collector."""
    dropped = make(Net)
    dropped.itself = [dropped]
    penstock.shard(dropped)
    loss_of(dropped, 0, 0).backward()


def fork_in_training():
    rank, _ = world()
    gc.disable()
    drop_a_model()
    model = penstock.shard(make(Net))
    optimizer = sgd(model.parameters())
    loss_of(model, 0, rank).backward()
    loss = loss_of(model, 1, rank)
    job = Job([(5, 3)])

    def train():
        for call in (
            lambda: loss_of(model, 1, rank),
            loss.backward,
            optimizer.step,
            lambda: penstock.stats(model),
            lambda: penstock.invalidate(model),
            lambda: penstock.get_recorded_ops(model),
            lambda: penstock.trace(model, "/dev/null{rank}").__enter__(),
            lambda: model.load_state_dict(model.state_dict()),
            lambda: penstock.shard(make(Net)),
            dc.start_forward,
            dc.reset,
            lambda: dc.start_backward(True),
            lambda: job.gather(0),
            lambda: dc.init(dist.group.WORLD),
        ):
            status, text = error_of(call)
            is_ours = status == "ESTATE" and "forked from" in text
            assert is_ours or ("RuntimeError" in status and "fork" in text), (status, text)
        assert model.state_dict()["head.weight"].to_local().isfinite().all()

    def end():
        penstock.close(model)
        dc.cleanup()

    def collect():
        model.__dict__.clear()
        gc.collect()

    statuses = [status_of_child(body) for body in (lambda: None, train, end, collect)]
    gc.enable()
    loss.backward()
    optimizer.step()
    loss_of(model, 2, rank).backward()
    job.gather(0)
    job.release(0)
    job.close()
    penstock.close(model)
    gc.collect()
    return statuses


def test_a_child_of_fork_leaves_its_parents_models_alone_and_cannot_train_them(fresh_world):
    assert fresh_world(2).run(fork_in_training) == [[0] * 4] * 2


def count_threads():
    return len(os.listdir("/proc/self/task"))


def threads_around_a_model(**options):
    rank, _ = world()
    counts = []
    for _ in range(2):  # the first time torch starts threads that stay
        counts = [count_threads()]
        model = penstock.shard(make(Net), **options)
        loss_of(model, 0, rank).backward()
        counts.append(count_threads())
        penstock.close(model)
        counts.append(count_threads())
    return counts


def test_closing_ends_every_thread(worlds):
    for before, during, after in worlds(2).run(threads_around_a_model):
        assert during > before
        assert after == before


# ---- signals ------------------------------------------------------------------------------------


def send_later(*signals):
    """Send signals to this process, which waits by then, half a second apart.

    Ctrl-C's raises KeyboardInterrupt then, also in tests that run in the background of a shell,
    which has them ignore it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def send():
        for number in signals:
            time.sleep(0.5)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def interrupt_a_wait(key):
    """Rank 1 does not come until rank 0 was interrupted, by SIGTERM's handler and by Ctrl-C."""
    rank, _ = world()
    model = penstock.shard(make(Net), timeout=60)
    loss_of(model, 0, rank).backward()
    if rank == 1:
        store().wait([key])
        found = [error_of(lambda: loss_of(model, 1, rank).backward())]
        penstock.close(model)
        return found
    handled = []
    before = signal.signal(signal.SIGTERM, lambda *_: handled.append(time.monotonic()))
    send_later(signal.SIGTERM, signal.SIGINT)
    begin = time.monotonic()
    found = [error_of(lambda: loss_of(model, 1, rank).backward())]
    seconds = time.monotonic() - begin
    signal.signal(signal.SIGTERM, before)
    found.append(error_of(loss_of, model, 2, rank))
    assert model.state_dict()["head.weight"].to_local().isfinite().all()
    penstock.close(model)
    store().set(key, "")
    assert len(handled) == 1 and handled[0] < begin + 10
    assert seconds < 30
    return found


def test_a_signal_ends_a_wait_at_once_if_its_handler_raises(fresh_world):
    first, second = fresh_world(2).run(interrupt_a_wait, "interrupted")
    assert first[0] == ("KeyboardInterrupt", "")
    assert first[1][0] == "ECANCELED" and "broken off by KeyboardInterrupt" in first[1][1]
    assert second[0][0] == "EPEER", second
    assert "rank 0 failed" in second[0][1] and "KeyboardInterrupt" in second[0][1]


def miss_a_rank(key):
    """Rank 1 comes when the others have given up, one of them because of a signal."""
    rank, _ = world()
    found = []
    if rank == 0:
        store().wait([key + "begun"])
        found = [error_of(penstock.shard, make(Net), timeout=3)]
        store().set(key + "0", "")
    elif rank == 2:
        store().set(key + "begun", "")
        send_later(signal.SIGINT)
        found = [error_of(penstock.shard, make(Net), timeout=seconds) for seconds in (60, 3)]
        store().set(key + "2", "")
    else:
        store().wait([key + "0", key + "2"])
    model = penstock.shard(make(Net))
    loss_of(model, 0, rank).backward()
    penstock.close(model)
    return found


def test_a_rank_that_does_not_call_shard_is_named(worlds):
    answers = worlds(3).run(miss_a_rank, f"missed at {time.time()}")
    assert answers[2][0] == ("KeyboardInterrupt", "")
    for rank in (0, 2):
        status, text = answers[rank][-1]
        assert status == "ETIMEDOUT", text
        assert f"rank {rank}: rank 1 did not come in time (3 s)" in text, text


def test_a_rank_that_gives_up_as_the_last_one_comes_is_named():
    shared = dist.HashStore()
    shared.set("here/0", "")
    shared.set("all", "here")
    with pytest.raises(PenstockError, match="rank 1: rank 0 had given up"):
        Roll(shared, 1, 2, 4.0).meet()


def lack_descriptors():
    """Rank 1 may open one file at a time, beside the pages, when its process groups are made."""
    rank, _ = world()
    penstock.close(penstock.shard(make(Net)))
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        lowest = [os.dup(0) for _ in range(3)]  # this rank's page takes one, and the other's
        for descriptor in lowest:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest[-1] + 1, limits[1]))
    found = error_of(penstock.shard, make(Net), timeout=60)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return found


def test_a_rank_that_cannot_join_is_named_at_once(fresh_world):
    (status, text), (status_of_1, text_of_1) = fresh_world(2).run(lack_descriptors)
    assert status_of_1 == "ESYSTEM" and "Too many open files" in text_of_1, text_of_1
    assert status == "EPEER" and "rank 1 failed: " in text and "Too many" in text, text


# ---- ranks that stop, fail or end ---------------------------------------------------------------


def stop_a_rank():
    """Rank 2 stops, and goes on when the others have given up; rank 0 is on another machine."""
    rank, _ = world()
    if rank == 0:
        sys.modules["penstock._roll"]._namespace = lambda: "another"
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    model = penstock.shard(make(Net), timeout=6)
    loss_of(model, 0, rank).backward()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = error_of(lambda: loss_of(model, 1, rank).backward())
    if rank != 2:
        store().set(f"gave up {rank}", "")
        store().wait([f"gave up {other}" for other in range(2)])
        os.kill(pids[2], signal.SIGCONT)
    penstock.close(model)
    return found, pids[2]


def test_a_rank_that_is_stopped_is_named_with_the_ticket_it_came_to(fresh_world):
    answers = fresh_world(3).run(stop_a_rank)
    for (status, text), pid in answers[:2]:
        assert status in ("ETIMEDOUT", "EPEER"), text
        assert f"the process of rank 2 ({pid}) is stopped" in text or "rank 2 did not come" in text
        assert "all came to ticket" in text, text
    (_, here), pid = answers[1]
    assert f"({pid}) is stopped" in here, here
    assert "rank 2 did not come" in answers[0][0][1] or "rank 1 failed" in answers[0][0][1]


def test_who_loses_a_connection_beside_a_rank_that_is_stopped_names_the_ticket_it_came_to():
    first = Roll(dist.HashStore(), 0, 2, 4.0)
    first.waits(1.0, "gather", 15, [("gather", "layers.0", 15), ("gather", "times", 14)])
    with subprocess.Popen(["sleep", "60"]) as process:
        first._pids = {1: process.pid}
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        text = first.lost("EPEER", "closed by peer")
        first._placed -= 10.0  # many tickets ago
        later = first.lost("EPEER", "closed by peer")
        process.kill()
    known = f"closed by peer; the process of rank 1 ({process.pid}) is stopped"
    assert (text, later) == (f"{known}; all came to ticket 14 ('times') before", known)


def listen():
    """Collect what is logged from here on."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage()))
    logging.getLogger("penstock").addHandler(handler)
    return lines, lambda: logging.getLogger("penstock").removeHandler(handler)


@pytest.mark.parametrize(("timeout", "seconds"), [(3, 1.5), (8, 4), (30, 4), (100, 10), (600, 30)])
def test_a_wait_is_logged_at_a_tenth_of_its_deadline(timeout, seconds):
    assert long_wait(timeout) == seconds


def come_late():
    rank, _ = world()
    lines, stop = listen()
    model = penstock.shard(make(Net), timeout=8)
    loss_of(model, 0, rank).backward()
    if rank == 1:
        time.sleep(5)
    loss_of(model, 1, rank).backward()
    penstock.close(model)
    stop()
    return lines


def test_who_waits_for_long_says_so_in_the_log_and_goes_on(worlds):
    lines, others = worlds(2).run(come_late)
    told = [text for level, text in lines if level >= logging.WARNING]
    assert any("watchdog: lane gather: task" in text for text in told), told
    late = "; rank 1 did not come: behind the backward (step 0)"
    assert any("rank 0 has waited 4 s" in text and late in text for text in told), told
    assert not [text for level, text in others if level >= logging.WARNING]


LEAVES = """
import os, sys, torch.distributed as dist
sys.path.insert(0, os.environ["TESTS"])
import penstock
from models import Net, loss_of, make
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
model = penstock.shard(make(Net), timeout=60)
loss_of(model, 0, rank).backward()
if os.fork() == 0:
    sys.exit(7)  # with all that an interpreter does at its end
print("child", os.waitstatus_to_exitcode(os.wait()[1]))
if rank == 1:
    raise ValueError("boom")
loss_of(model, 1, rank).backward()
"""


def test_an_exception_that_ends_a_rank_is_named_by_the_others(tmp_path):
    environment = {**os.environ, "TESTS": str(Path(__file__).parent)}
    environment["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] = "0"  # the child has none of its threads
    environment["PENSTOCK_DUMP"] = str(tmp_path / "dumps")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(tmp_path / "store"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120) for process in ranks]
    assert [out for out, _ in told] == ["child 7\n"] * 2, told
    assert [process.returncode for process in ranks] == [1, 1]
    assert "rank 1 failed: ValueError: boom, behind the backward (step 0)" in told[0][1], told[0][1]
    (hang,) = read_hangs(tmp_path / "dumps")
    assert [(blamed.rank, blamed.why) for blamed in hang.blamed] == [
        (1, "failed: ValueError: boom")
    ]
    assert hang.blamed[0].place == "behind the backward (step 0)"
    assert sorted(hang.dumps) == [0, 1]


def test_a_rank_that_ends_because_of_another_one_is_not_to_blame(monkeypatch):
    shared = dist.HashStore()
    first, second, third = (Roll(shared, rank, 3, 10.0) for rank in range(3))
    second.lost("EPEER", "closed by peer")
    monkeypatch.setattr(sys, "last_value", PenstockError("EPEER", "closed by peer"), raising=False)
    monkeypatch.setattr("penstock._roll._rolls", [second, third])
    _leave_all()
    assert first._inspect_others().to_blame == []
    told = [text.partition(";")[0] for text in first._inspect_others().victims]
    assert told == [
        "rank 1 failed: closed by peer",
        "rank 2 failed: PenstockError: closed by peer",
    ]


def test_the_end_of_the_process_closes_all_engines_also_where_one_fails(monkeypatch):
    sharded = [penstock.shard(make(Net)) for _ in range(3)]
    engines = [penstock._engine.engine_of(model) for model in sharded]

    def fail():
        raise penstock.PenstockError("ETIMEDOUT", "a thread did not come back")

    for engine in engines:
        monkeypatch.setattr(engine, "close", lambda close=engine.close: (close(), fail()))
    with pytest.raises(penstock.PenstockError, match="did not come back"):
        penstock._engine._close_all()
    assert all(engine.closed for engine in engines)
