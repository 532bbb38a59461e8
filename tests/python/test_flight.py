"""The flight record: what ranks leave when they fail, hang or are ended, and who is named by it."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import penstock
import penstock.trace as tool
import pytest
from chrome_rules import check_file
from equality import world
from made_dumps import SECOND, RankDump
from made_traces import BUILD
from models import DEVICE, Net, loss_of, make
from penstock._trace_hang import format_hang
from penstock._trace_hang import read as read_hangs
from test_beat import Called, train
from test_processes import store
from test_trace_tool import ODD

on_cpus = pytest.mark.skipif(
    DEVICE == "cuda", reason="a rank on a GPU does not wait for others, its device does"
)

# ---- faults of real ranks -----------------------------------------------------------------------


def fail(fault, folder):
    """Train two steps, then have rank 1 do something in a forward that it should not do."""
    rank, _ = world()
    os.environ["PENSTOCK_DUMP"] = folder
    model = make(Called)
    blocks = [*model.blocks]
    penstock.shard(model, timeout=2, blocks=blocks, verify=fault != "another branch, not compared")
    train(model, 2)
    if rank == 1 and isinstance(fault, signal.Signals):
        blocks[1].in_forward = lambda: os.kill(os.getpid(), fault)
    elif rank == 1:
        model.run_blocks = lambda x, _: blocks[1](blocks[2](blocks[0](x)))
    train(model)


def fail_and_read(world, fault, folder):
    """Return what is known of a fault when rank 0 has ended with it, and how that was."""
    answer = world.pipes[0]
    for pipe in world.pipes:
        pipe.send((fail, (fault, str(folder)), {}))
    assert answer.poll(60), f"{fault}: rank 0 does not end"
    is_well, text = answer.recv()
    assert not is_well
    if isinstance(fault, str):  # rank 1 comes to its end, too
        until = time.monotonic() + 30
        while len(list(folder.glob("*.json"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
    (hang,) = read_hangs(folder)
    for path in folder.iterdir():
        check_file(path)
    return hang, text


@on_cpus
@pytest.mark.parametrize(
    ("fault", "what"), [(signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "has ended")]
)
def test_a_rank_that_left_no_dump_is_missing_with_its_place(fresh_world, tmp_path, fault, what):
    ranks = fresh_world(2)
    hang, text = fail_and_read(ranks, fault, tmp_path)
    assert "verify" not in text
    assert hang.silent == [1]
    (blamed,) = hang.blamed
    assert (blamed.rank, blamed.why) == (1, "left no dump")
    place, _, process = blamed.place.partition("; ")
    assert place == "in 'blocks.1' (step 2, forward)"
    # Its connections may end a moment before the process is known to have ended.
    is_running = fault == signal.SIGKILL and not process
    assert is_running or process == f"its process {ranks.processes[1].pid} {what}"
    assert 0 <= blamed.seconds < 60
    wait = hang.dumps[0].head["waits"][0]
    assert (wait["ticket"], wait["lane"]) == (blamed.ticket, "gather")
    text = format_hang(hang)
    assert "missing: rank 1 left no dump; others wait at ticket " in text, text
    assert f"{place} since {blamed.seconds:.1f} s{process and ', '}{process}\n" in text, text


@on_cpus
@pytest.mark.parametrize("fault", ["another branch", "another branch, not compared"])
def test_of_two_ranks_on_two_paths_both_are_named_and_neither_is_blamed(
    fresh_world, tmp_path, fault
):
    hang, text = fail_and_read(fresh_world(2), fault, tmp_path)
    assert sorted(hang.dumps) == [0, 1]
    assert not hang.blamed
    (note,) = hang.notes
    assert "under ticket " in note and "rank 0 '" in note and "rank 1 '" in note
    if "compared" in fault:  # gloo ends the rank that gets more than it has room for
        assert "has ended" not in text or "may be because of any rank on another path" in text
    else:
        assert "ranks started different collectives: rank 0" in text


def test_a_gate_that_nobody_opens_is_named(tmp_path):
    program = BUILD / "tests" / "sched_test_flight"
    if not program.exists():
        pytest.skip(f"{program} is not built: run ./dev build, or set PENSTOCK_BUILD")
    environment = {**os.environ, "PST_TRACE_SAMPLES": str(tmp_path)}
    subprocess.run([program], env=environment, check=True, capture_output=True)
    check_file(tmp_path / "run-rank0.json")
    (hang,) = read_hangs(tmp_path)
    gate = "missing: nobody on rank 0 has opened the gate 'input ready' of graph 'step'"
    assert hang.notes == [gate]
    assert "for 'layer 1' (lane gather), and that for input ready" in format_hang(hang)


# ---- signals and requests -----------------------------------------------------------------------

ENDED = """
import ctypes, os, signal, sys, time
sys.path.insert(0, os.environ["TESTS"])
import penstock
from models import Net, loss_of, make
how = sys.argv[1]
def handle(*_):
    print("handled", flush=True)
    sys.exit(3)
if how != "plain":
    signal.signal(signal.SIGTERM, handle if how == "handled" else signal.SIG_IGN)
model = penstock.shard(make(Net))
loss_of(model, 0, 0).backward()
if how == "plain":
    child = os.fork()
    if child == 0:
        time.sleep(60)
    os.kill(child, signal.SIGTERM)  # as a loader's workers are ended
    print("child", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
os.kill(os.getpid(), signal.SIGTERM if how == "aborts" else 0)
assert not os.path.exists(os.environ["PENSTOCK_DUMP"])  # SIGTERM is ignored, or was a child's
os.kill(os.getpid(), signal.SIGABRT if how == "aborts" else signal.SIGTERM)
while True:
    ctypes.PyDLL(None).pause()  # nobody else has the interpreter meanwhile
"""


def ended(how, folder):
    tests = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-c", ENDED, how],
        env={**os.environ, "TESTS": tests, "PENSTOCK_DUMP": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [
        ("plain", -signal.SIGTERM, "child 15\n"),
        ("handled", 3, "handled\n"),
        ("aborts", -signal.SIGABRT, ""),
    ],
)
def test_a_process_that_is_ended_leaves_its_record_and_ends_as_ever(tmp_path, how, status, told):
    done = ended(how, tmp_path / "dumps")
    assert (done.returncode, done.stdout) == (status, told), done.stderr
    (hang,) = read_hangs(tmp_path / "dumps")
    head = hang.dumps[0].head
    assert (head["cause"], head["reason"]) == (
        "signal",
        "SIGABRT" if how == "aborts" else "SIGTERM",
    )
    assert head["places"][0]["place"] == "behind the backward (step 0)"
    assert head["launches"]


def write_when_asked(folder):
    """Write records while the interpreter is busy elsewhere, before and after a failure."""
    rank, _ = world()
    os.environ.pop("PENSTOCK_DUMP", None)
    models = [penstock.shard(make(Net)) for _ in range(2)]
    for model in models:
        loss_of(model, 0, rank).backward()
    with pytest.raises(penstock.PenstockError, match="set PENSTOCK_DUMP"):
        tool.dump()
    written = tool.dump(folder, "to look")
    assert tool.dump(folder, "again") == written
    store().set(f"asked {rank}", "")
    store().wait(["asked 0", "asked 1"])
    for model in models:
        penstock.close(model)
    assert tool.dump(folder) == []
    return written


def test_each_engine_of_each_rank_has_a_file(worlds, tmp_path):
    written = [path for paths in worlds(2).run(write_when_asked, str(tmp_path)) for path in paths]
    assert sorted(written) == sorted(map(str, tmp_path.iterdir()))
    assert len(written) == 4
    hangs = read_hangs(tmp_path)
    assert [sorted(hang.dumps) for hang in hangs] == [[0, 1]] * 2
    for hang in hangs:
        assert not hang.blamed and not hang.notes
        for rank, dump in hang.dumps.items():
            assert (dump.head["cause"], dump.head["reason"]) == ("request", "again")
            assert dump.place(rank)[0] == "behind the backward (step 0)"
            assert dump.place(1 - rank) is not None
            assert dump.arrived


def test_a_record_is_written_while_a_trace_goes_on(tmp_path):
    model = penstock.shard(make(Net))
    with penstock.trace(model, tmp_path / "trace.json") as recording:
        loss_of(model, 0, 0).backward()
        (written,) = tool.dump(tmp_path / "dumps")
        loss_of(model, 1, 0).backward()
    dumped, traced = (check_file(path)["traceEvents"] for path in (written, recording))
    names = [{event["name"] for event in events} for events in (dumped, traced)]
    assert "digest" in names[0] - names[1]  # of before the trace
    assert "backward" in names[0] & names[1]
    penstock.close(model)


def test_a_text_that_is_cut_within_a_character_does_not_hide_its_status():
    model = penstock.shard(make(Net))
    texts = []
    for start in ("", "x"):  # one of them is cut there
        with pytest.raises(penstock.PenstockError) as raised:
            tool.dump(start + 1000 * "é")
        assert raised.value.status == "EIO"
        texts.append(str(raised.value))
    assert any("\\xc3" in text for text in texts), texts
    penstock.close(model)  # the log has them, too


# ---- who is named, by dumps made by hand --------------------------------------------------------


def found(folder, *dumps):
    for dump in dumps:
        dump.save(folder)
    (hang,) = read_hangs(folder)
    return hang


def test_a_rank_that_came_to_less_than_others_wait_for_is_missing(tmp_path):
    waiting = [RankDump(rank).launched("b", 6).waits("c", 7) for rank in (0, 1)]
    late = RankDump(2, cause="failure", status="EPEER").launched("b", 6).place(2, "in 'd'", 4.0)
    hang = found(tmp_path, *waiting, late)
    (blamed,) = hang.blamed
    assert (blamed.rank, blamed.why) == (2, "did not come to 'c' (ticket 7, lane gather)")
    assert (blamed.place, blamed.seconds, blamed.ticket) == ("in 'd'", 4.0, 7)


@pytest.mark.parametrize(("graph", "is_closed"), [("forward", True), ("backward", False)])
def test_a_rank_that_has_not_opened_a_gate_that_others_wait_behind_is_told(
    tmp_path, graph, is_closed
):
    waiting = RankDump(0, world_size=2).launched("b", 6).waits("c", 7)
    gates = [{"gate": "c", "graph": graph}]
    late = RankDump(1, world_size=2, cause="signal", gates=gates).launched("b", 6)
    (blamed,) = found(tmp_path, waiting, late).blamed
    closed = ", whose gate it has not opened" if is_closed else ""
    assert blamed.why == f"did not come to 'c' (ticket 7, lane gather){closed}"


def test_a_rank_that_wrote_its_dump_before_it_could_come_is_not_missing(tmp_path):
    waiting = RankDump(0, world_size=2, cause="request").launched("b", 6).waits("c", 7, age=0.5)
    assert not found(tmp_path, waiting, RankDump(1, world_size=2).launched("b", 6)).blamed


def test_a_rank_that_came_when_another_had_given_up_is_missing(tmp_path):
    waiting = RankDump(0, world_size=2).waits("c", 7).place(1, "in 'slow'", 5.0)
    late = RankDump(1, world_size=2, cause="failure", status="EPEER").place(1, "in 'c'", 0.0)
    late.head["written"] += 3 * SECOND
    late.task("gather", "c", 12e6, 13e6, ticket=7)
    (blamed,) = found(tmp_path, waiting, late).blamed
    assert "came, 2.0 s after rank 0 had given up, to 'c' (ticket 7" in blamed.why
    assert (blamed.rank, blamed.place, blamed.seconds) == (1, "in 'slow'", 5.0)


def test_a_rank_on_another_path_than_most_is_named(tmp_path):
    dumps = [RankDump(rank).waits("c", 7) for rank in (0, 2)]
    hang = found(tmp_path, *dumps, RankDump(1).waits("d", 7))
    (blamed,) = hang.blamed
    assert (blamed.rank, blamed.ticket) == (1, 7)
    assert "came ranks 0, 2 'c', rank 1 'd'" in hang.notes[0]


def test_a_rank_that_failed_by_itself_is_named_before_its_victims(tmp_path):
    failed = RankDump(1, cause="failure", status="OK", reason="ValueError: boom")
    victims = [RankDump(rank, cause="failure", status="EPEER").waits("c", 7) for rank in (0, 2)]
    hang = found(tmp_path, *victims, failed.place(1, "in 'b'"))
    assert [blamed.rank for blamed in hang.blamed] == [1]
    assert "missing: rank 1 failed: ValueError: boom; in 'b' since 1.0 s" in format_hang(hang)


def test_without_a_witness_the_place_is_said_to_be_unknown(tmp_path):
    hang = found(tmp_path, RankDump(0, world_size=2).waits("c", 7))
    assert "rank 1 left no dump; others wait at ticket 7; where it was is not" in format_hang(hang)


def test_when_nothing_is_wrong_nobody_is_named(tmp_path):
    dumps = [RankDump(rank, cause="request", status="OK").launched("b", 6) for rank in range(3)]
    hang = found(tmp_path, *dumps)
    assert not hang.blamed and "no rank is missing" in format_hang(hang)


def test_engines_are_kept_apart_and_the_newest_comes_first(tmp_path):
    for name, later in (("Net-1", 0), ("Net-2", 5), ("Net-3", 1)):
        dump = RankDump(0, world_size=1, name=name)
        dump.head["written"] += later
        dump.save(tmp_path)
    assert [hang.name for hang in read_hangs(tmp_path)] == ["Net-2", "Net-3", "Net-1"]


def test_the_command_tells_it_or_what_is_wrong_in_a_line(tmp_path, capsys):
    RankDump(0, world_size=2).waits("c", 7).save(tmp_path)
    assert tool.main(["hang", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("missing: rank 1 left no dump")
    assert tool.main(["hang", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["blamed"][0]["rank"] == 1
    assert tool.main(["hang", str(tmp_path / "none")]) == 2
    assert "give the folder that PENSTOCK_DUMP named" in capsys.readouterr().err


def places_of(content):
    """Return all containers and keys below the head of a dump."""
    found, left = [], [content]
    while left:
        part = left.pop()
        keys = range(len(part)) if isinstance(part, list) else list(part)
        found += [(part, key) for key in keys]
        left += [part[key] for key in keys if isinstance(part[key], (list, dict))]
    return found


def test_dumps_that_are_damaged_are_refused_or_read(tmp_path):
    seed = int(os.environ.get("PST_SEED", time.time()))
    print(f"seed {seed}")
    chance = random.Random(seed)
    made = RankDump(0, world_size=2).launched("b", 6).waits("c", 7, why="d").place(1, "in 'b'")
    made.task("gather", "b", 1.0, 2.0, ticket=6)
    refused = 0
    for _ in range(300):
        dump = copy.deepcopy(made)
        part, key = chance.choice(places_of(dump.content))
        part[key] = chance.choice(ODD)
        (tmp_path / "Net-1-rank0.json").write_text(json.dumps(dump.content))
        try:
            "".join(map(format_hang, read_hangs(tmp_path)))
        except tool.TraceError:
            refused += 1
    assert 0 < refused < 300
