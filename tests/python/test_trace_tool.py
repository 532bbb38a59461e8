"""The trace tool, on traces built here and on those that the C library writes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import penstock.trace as tool
import pytest
from chrome_rules import check_file, violations
from made_traces import (
    BASE_NS,
    SVG,
    RankTrace,
    a_step,
    end_of,
    merged,
    run_built,
    slices_of,
    written_by_the_library,
)

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "bindings" / "python" / "penstock" / "trace.py"


# ---- merge ------------------------------------------------------------------------------------


def test_merged_ranks_keep_all_their_events(tmp_path):
    traces = [a_step(0), a_step(1)]
    content = merged(tmp_path, *traces)
    assert content["traceEvents"] == sum((t.content["traceEvents"] for t in traces), [])


def test_clocks_are_aligned_by_the_time_at_which_each_trace_began(tmp_path):
    early, late = RankTrace(0, BASE_NS), RankTrace(1, BASE_NS + 2_000_000)
    early.task("copy", "copy", 5, 6)
    late.task("copy", "copy", 5, 6)
    content = merged(tmp_path, early, late)
    begins = {rank: event["ts"] for rank, event in slices_of(content, "copy").items()}
    assert begins == {0: 5.0, 1: 2005.0}
    assert content["baseTimeNanoseconds"] == BASE_NS


def test_the_earliest_rank_sets_the_base_whatever_the_order_of_files(tmp_path):
    first, earlier = RankTrace(0, BASE_NS), RankTrace(1, BASE_NS - 1_000_001)
    first.task("copy", "copy", 5, 6)
    earlier.task("copy", "copy", 5, 6)
    content = merged(tmp_path, first, earlier)
    assert content["baseTimeNanoseconds"] == BASE_NS - 1_000_001
    assert slices_of(content, "copy")[0]["ts"] == pytest.approx(1005.001, abs=1e-3)
    assert slices_of(content, "copy")[1]["ts"] == pytest.approx(5, abs=1e-3)


def test_collectives_complete_together_after_the_merge(tmp_path):
    content = merged(tmp_path, a_step(0), a_step(1, late=700), a_step(2, BASE_NS - 9_000, late=3))
    for name in ("all_gather 0", "reduce_scatter 0"):
        ends = [end_of(event) for event in slices_of(content, name).values()]
        assert ends == pytest.approx([ends[0]] * 3, abs=2e-3)


def test_arrows_stay_inside_their_slices_when_clocks_differ_by_half_a_nanosecond(tmp_path):
    traces = [a_step(0), a_step(1)]
    for rank, trace in enumerate(traces):
        for i in range(200):
            begin = round(1000 + i * 0.037, 3)
            inside = round(begin + 0.001, 3)
            trace.slice("main", "brief", begin, begin, "host")
            trace.content["traceEvents"][-1]["dur"] = 0.002
            trace.flow(rank * 2**32 + 10 + i, "main", inside, "main", inside)
        trace.task("copy", "a", 0, [0.002, 0.001][rank], ticket=9)
        trace.task("copy", "b", 0.01, [0.015, 0.013][rank], ticket=10)
    merged(tmp_path, *traces)


def test_one_late_collective_does_not_move_a_rank(tmp_path):
    traces = [RankTrace(0), RankTrace(1)]
    for rank, trace in enumerate(traces):
        for ticket in range(1, 6):
            late = 400 if rank == 1 and ticket == 3 else 0
            trace.task("gather", "g", ticket * 1000, ticket * 1000 + 10 + late, ticket=ticket)
    content = merged(tmp_path, *traces)
    begins = {e["pid"]: e["ts"] for e in content["traceEvents"] if e.get("args") == {"ticket": 1}}
    assert begins == {1: 1000.0, 2: 1000.0}


def test_replayed_tickets_go_with_the_nearest_completion(tmp_path):
    """Ranks may have lost different numbers of old records: counting would pair wrong steps."""
    traces = [RankTrace(0), RankTrace(1)]
    for rank, trace in enumerate(traces):
        for step in range(rank * 3, 10):
            begin = step * 1000 + rank * 20
            trace.task("gather", "g", begin, begin + 100, ticket=1, step=step)
    content = merged(tmp_path, *traces)
    begins = {
        e["pid"]: e["ts"] for e in content["traceEvents"] if e.get("args", {}).get("step") == 9
    }
    assert begins[1] == pytest.approx(begins[2], abs=2e-3)


def test_merging_adds_up_what_the_rings_lost(tmp_path):
    content = merged(tmp_path, RankTrace(0, overwritten=3), RankTrace(1, overwritten=4))
    assert content["penstock"] == {"records": 27, "overwritten": 7}


def test_one_trace_merges_into_itself(tmp_path):
    path = a_step(0).save(tmp_path)
    before = json.loads(path.read_text())
    tool.merge([path], path)
    assert check_file(path) == before


def test_a_rank_in_two_files_is_refused_by_name(tmp_path):
    (tmp_path / "again").mkdir()
    paths = [a_step(1).save(tmp_path), a_step(1).save(tmp_path / "again")]
    with pytest.raises(tool.TraceError, match=r"again.*rank 1 is in .*rank1\.json"):
        tool.merge(paths, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_merging_nothing_is_refused(tmp_path):
    with pytest.raises(tool.TraceError, match="nothing to merge"):
        tool.merge([], tmp_path / "out.json")


def profile(folder, rank, base_ns, begin):
    """A file as torch's profiler writes it: an operator at `begin`, an arrow, odd numbers."""
    common = {"pid": 1, "tid": 7, "cat": "cpu_op"}
    content = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2},
        "baseTimeNanoseconds": base_ns,
        "traceEvents": [
            {"ph": "X", "name": "aten::mm", "ts": begin, "dur": 5.0, **common},
            {"ph": "s", "name": "fwdbwd", "id": 1, "ts": begin + 1, **common},
            {"ph": "f", "name": "fwdbwd", "id": 1, "ts": begin + 2, "bp": "e", **common},
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "all", "ts": begin, "dur": 9, "pid": "Spans", "tid": "Profiler"},
            {"ph": "i", "name": "start", "ts": begin, "pid": "Traces", "tid": "Trace", "s": "g"},
        ],
    }
    path = folder / f"profile{rank}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_profilers_file_is_merged_beside_its_rank_and_moved_with_it(tmp_path):
    paths = [a_step(0).save(tmp_path), a_step(1, late=700).save(tmp_path)]
    before = [tool.report(path)["ranks"][rank] for rank, path in enumerate(paths)]
    day = 86_400_000_000_000
    profiles = [
        profile(tmp_path, rank, BASE_NS - day, day / 1000 + late)
        for rank, late in enumerate((10, 710))
    ]
    out = tmp_path / "merged.json"
    tool.merge([profiles[0], *paths, profiles[1]], out)
    content = json.loads(out.read_text())
    events = content["traceEvents"]
    operators = [event for event in events if event["name"] == "aten::mm"]
    begins = [slices_of(content, "step")[rank]["ts"] for rank in range(2)]
    wanted = [begin + 10 for begin in begins]
    assert [event["ts"] for event in operators] == pytest.approx(wanted, abs=2e-3)
    assert len({event["pid"] for event in operators}) == 2
    assert len({event["id"] for event in events if event["name"] == "fwdbwd"}) == 2
    assert all(isinstance(event["pid"], int) for event in events)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[2:] == ["python of rank 0", "python of rank 1"]
    assert tool.report(out)["ranks"] == dict(enumerate(before))


def test_clocks_that_differed_are_told(tmp_path):
    paths = [a_step(0).save(tmp_path), a_step(1, late=700).save(tmp_path)]
    assert tool.merge(paths, tmp_path / "merged.json") == {1: -700}
    assert "rank 1: its clock was 0.700 ms ahead" in run("merge", tmp_path / "out", *paths).stdout


def test_a_merged_file_is_of_no_single_rank(tmp_path):
    info = merged(tmp_path, a_step(0), a_step(1))["distributedInfo"]
    assert info == {"backend": "penstock", "world_size": 2}


def test_a_folder_is_merged_with_what_is_compressed_in_it(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        profile(folder, rank, BASE_NS, 10)
        path = a_step(rank).save(folder)
        path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    (folder / "notes.txt").write_text("no trace")
    out = folder / "merged.json.gz"
    for _ in range(2):  # the second time it finds its own result there
        tool.merge([folder], out)
        content = json.loads(gzip.decompress(out.read_bytes()))
        assert slices_of(content, "step").keys() == {0, 1}
        assert sum(event["name"] == "aten::mm" for event in content["traceEvents"]) == 2
    assert tool.report(out)["ranks"].keys() == {0, 1}
    tool.draw(out, tmp_path / "step.svg")


def test_threads_of_profilers_are_no_main_threads(tmp_path):
    out = tmp_path / "merged.json"
    tool.merge([a_step(0).save(tmp_path), profile(tmp_path, 0, BASE_NS, 10)], out)
    events = json.loads(out.read_text())["traceEvents"]
    assert not [event for event in events if event["pid"] == event.get("tid")]


def test_a_profilers_file_alone_is_refused(tmp_path):
    path = profile(tmp_path, 0, BASE_NS, 10)
    with pytest.raises(tool.TraceError, match=r"profile0\.json: a profiler wrote it.*merge it"):
        tool.report(path)
    with pytest.raises(tool.TraceError, match="at least one trace of Penstock's"):
        tool.merge([path], tmp_path / "out.json")


def test_a_compressed_file_that_was_cut_is_named(tmp_path):
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[]}')[:-9])
    with pytest.raises(tool.TraceError, match=r"cut\.json\.gz: not a trace"):
        tool.load(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"traceEvents":[{"ph":"X"',
        "[]",
        '{"traceEvents":{}}',
        '{"traceEvents":[{"ph":"X","pid":1,"tid":1,"name":"n","ts":1}]}',
        '{"traceEvents":[{"ph":"C","pid":1,"tid":1,"name":"n","ts":"late"}]}',
        '{"traceEvents":[7]}',
        '{"traceEvents":[{"ph":"M","pid":1,"name":"thread_name"}],"penstock":{}}',
        '{"traceEvents":[{"ph":"X","pid":"P","name":"n","ts":1,"dur":1}],"penstock":{}}',
        '{"traceEvents":[{"ph":"e","pid":1,"name":"n","ts":1,"id":[]}],"penstock":{}}',
        '{"traceEvents":[],"penstock":{"overwritten":"many"}}',
        '{"traceEvents":[],"baseTimeNanoseconds":NaN}',
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(tool.TraceError, match=r"broken\.json"):
        tool.merge([path], tmp_path / "out.json")


# ---- report -----------------------------------------------------------------------------------


def reported(tmp_path, trace):
    return tool.report(trace.save(tmp_path))


def test_exposed_communication_is_the_time_in_waits(tmp_path):
    rank = reported(tmp_path, a_step(0))["ranks"][0]
    assert rank["span_us"] == 100
    assert rank["exposed_us"] == 30
    assert rank["exposed_share"] == pytest.approx(0.3)


def test_waits_at_the_same_time_count_once(tmp_path):
    trace = RankTrace(0).host("wait a", 0, 10).host("wait b", 2, 8).host("wait c", 5, 20, "other")
    trace.host("waiter", 30, 32).host("no wait", 40, 50)
    assert reported(tmp_path, trace)["ranks"][0]["exposed_us"] == 22


def test_a_task_named_wait_is_no_exposed_time(tmp_path):
    trace = RankTrace(0).task("gather", "wait for a peer", 0, 10)
    assert reported(tmp_path, trace)["ranks"][0]["exposed_us"] == 0


def test_exposed_time_of_steps_is_their_median(tmp_path):
    trace = RankTrace(0)
    for step, wait in enumerate((90, 10, 20)):
        trace.host("step", step * 100, step * 100 + 100)
        trace.host("wait", step * 100, step * 100 + wait)
    rank = reported(tmp_path, trace)["ranks"][0]
    assert (rank["steps"], rank["exposed_step_us"]) == (3, 20)


def test_a_report_of_one_step_leaves_the_others_out(tmp_path):
    trace = RankTrace(0)
    for step, wait in enumerate((90, 10, 20)):
        trace.host("step", step * 100, step * 100 + 95)
        trace.host("wait gradients", step * 100, step * 100 + wait)
        trace.task("gather", "g", step * 100 + 50, step * 100 + 110, ticket=1, bytes=7)
    rank = tool.report(trace.save(tmp_path), step=1)["ranks"][0]
    assert (rank["steps"], rank["span_us"], rank["step_us"]) == (1, 95, 95)
    assert (rank["exposed_us"], rank["exposed_reduce_us"], rank["exposed_gather_us"]) == (10, 10, 0)
    assert rank["lanes"]["gather"]["busy_us"] == 10 + 45  # the rest of the step before, and its own
    told = run("report", tmp_path / "rank0.json", "--step", "1").stdout
    assert "1 steps, each 0.095 ms (median), exposed 0.010 ms" in told
    with pytest.raises(tool.TraceError, match="no step 3; it has 3"):
        tool.report(tmp_path / "rank0.json", step=3)


def with_a_straggler(rank, lane, wait):
    """Ten replays of a collective, to which rank 2 comes 60 us late, and rank 0 10."""
    trace = RankTrace(rank, world_size=3)
    for step in range(10):
        begin = step * 200 + {0: 10, 1: 0, 2: 60}[rank]
        trace.task(lane, "blocks.0", begin, step * 200 + 100, ticket=3)
        trace.host(wait, begin, step * 200 + 100)
    return trace


def test_waiting_for_the_last_rank_is_told_from_moving(tmp_path):
    merged(tmp_path, *(with_a_straggler(rank, "gather", "wait blocks.0") for rank in range(3)))
    result = tool.report(tmp_path / "merged.json")
    lane = result["arrivals"]["lanes"]["gather"]
    assert lane["count"] == 10
    assert lane["waiting_us"] == pytest.approx(10 * (50 + 60) / 3)
    assert lane["moving_us"] == pytest.approx(10 * 40)
    assert {r: last["count"] for r, last in result["arrivals"]["last"].items()} == {
        0: 0,
        1: 0,
        2: 10,
    }
    assert result["arrivals"]["last"][2]["behind_us"] == pytest.approx(50)
    text = tool.format_report(result)
    assert "waiting for the last rank 0.367 ms, moving 0.400 ms" in text
    assert "rank 2 came last to 10 of 10, 0.050 ms (median) behind the one before it" in text


def test_one_rank_has_nobody_to_wait_for(tmp_path):
    arrivals = reported(tmp_path, with_a_straggler(0, "gather", "wait"))["arrivals"]
    assert arrivals == {"lanes": {}, "last": {}}


def test_hints_name_what_to_change(tmp_path):
    (hint,) = reported(tmp_path, with_a_straggler(0, "gather", "wait blocks.0"))["hints"]
    assert "memory='auto'" in hint and "in 47.6% of the time" in hint
    (hint,) = reported(tmp_path, with_a_straggler(0, "reduce", "wait gradients"))["hints"]
    assert "bucket_bytes=" in hint
    assert reported(tmp_path, with_a_straggler(0, "gather", "no wait"))["hints"] == []


def test_a_hint_blames_the_rank_that_others_wait_for(tmp_path):
    traces = [with_a_straggler(rank, "reduce", "wait gradients") for rank in range(3)]
    for trace in traces:  # hardly any time is left for moving
        for event in trace.content["traceEvents"]:
            if event["ph"] == "X":
                event["dur"] -= 35
    merged(tmp_path, *traces)
    (hint,) = tool.report(tmp_path / "merged.json")["hints"]
    assert "mostly waits for rank 2" in hint and "bucket_bytes" not in hint


def test_lanes_report_busy_time_tasks_and_bytes(tmp_path):
    trace = RankTrace(0).host("step", 0, 100)
    trace.task("copy", "a", 0, 20, bytes=10).task("copy", "b", 50, 60, bytes=5)
    trace.overlap("copy", "c", 55, 65, 1)
    lane = reported(tmp_path, trace)["ranks"][0]["lanes"]["copy"]
    assert lane == {"busy_us": 35, "busy_share": pytest.approx(0.35), "count": 3, "bytes": 15}


def test_the_ten_longest_tasks_come_in_order(tmp_path):
    trace = RankTrace(0)
    for i in range(20):
        trace.task("copy", f"task {i}", i * 100, i * 100 + i)
    longest = reported(tmp_path, trace)["longest"]
    assert [row["name"] for row in longest] == [f"task {i}" for i in range(19, 9, -1)]
    assert longest[0] == {"name": "task 19", "rank": 0, "lane": "copy", "duration_us": 19}


def test_each_rank_of_a_merged_trace_is_reported(tmp_path):
    merged(tmp_path, a_step(0), a_step(3))
    result = tool.report(tmp_path / "merged.json")
    assert sorted(result["ranks"]) == [0, 3]
    assert result["ranks"][3]["lanes"]["gather"]["bytes"] == 1000


def test_a_trace_without_slices_is_reported(tmp_path):
    result = reported(tmp_path, RankTrace(0))
    assert result["ranks"][0]["span_us"] == 0
    assert "rank 0" in tool.format_report(result)


def test_the_table_tells_what_was_overwritten(tmp_path):
    text = tool.format_report(reported(tmp_path, RankTrace(0, overwritten=12)))
    assert "oldest dropped, 12 records" in text


# ---- the command line ---------------------------------------------------------------------------


def run(*arguments):
    """Run `python -m penstock.trace` without site-packages: the standard library alone."""
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parents[1])}
    return subprocess.run(
        [sys.executable, "-S", "-m", "penstock.trace", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_commands_work_with_the_standard_library_alone(tmp_path):
    paths = [a_step(rank).save(tmp_path) for rank in range(2)]
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    told = "rank 1: its clock was 0.000 ms ahead, and was set\n"
    for arguments, output in (
        (["merge", out, *paths], told),
        (["draw", out, picture, "--step", "0"], ""),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, output, "")
    check_file(out)
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    done = run("report", out)
    assert done.returncode == 0
    assert "rank 1: 0.100 ms, exposed communication 0.030 ms (30.0%)" in done.stdout


def test_the_report_comes_as_json_when_asked(tmp_path):
    path = a_step(0).save(tmp_path)
    done = run("report", path, "--json")
    assert json.loads(done.stdout)["ranks"]["0"] == tool.report(path)["ranks"][0]


def test_the_tool_runs_by_its_path(tmp_path):
    path = a_step(0).save(tmp_path)
    done = subprocess.run([sys.executable, TOOL, "report", path], capture_output=True, check=True)
    assert b"rank 0" in done.stdout


@pytest.mark.parametrize("name", ["missing.json", "broken.json"])
def test_errors_are_one_line_and_a_status(tmp_path, name):
    (tmp_path / "broken.json").write_text("{")
    done = run("report", tmp_path / name)
    assert done.returncode == 2
    assert done.stdout == ""
    assert name in done.stderr
    assert len(done.stderr.splitlines()) == 1


ODD = (None, True, 0, -1, 1e308, "x", "", [], [1], {}, {"a": 1}, 2**70, "1e5", -5.5, "\x1b]0;x\x07")


def spoil(random, content):
    """Put something odd in one to three places, or cut one out."""
    for _ in range(random.choice((1, 1, 2, 3))):
        at = content
        while True:
            key = random.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], dict | list) or not at[key] or random.random() < 0.1:
                break
            at = at[key]
        if random.random() < 0.75:
            at[key] = random.choice(ODD)
        else:
            del at[key]
        if not content:
            return


def spoil_text(random, text):
    """Change, cut out or cut off at one place; odd numbers."""
    at = random.randrange(len(text))
    wrong = random.choice(("", "\x00", "\udc80", "NaN", "1e999", "[" * 100_000))
    return text[:at] + wrong + text[at + random.choice((0, 1, 20, len(text))) :]


def test_spoilt_files_are_read_or_refused_in_one_line(tmp_path, capsys):
    seed = int(os.environ.get("PST_SEED", "1"))
    print(f"PST_SEED={seed}")
    random = Random(seed)
    own, other = tmp_path / "own.json", profile(tmp_path, 0, BASE_NS, 10)
    a_step(0).overlap("copy", "copy", 5, 10, 9).save(tmp_path).rename(own)
    out, spoilt = tmp_path / "out", tmp_path / "spoilt.json"
    for i in range(40):
        content = json.loads((own, own, other)[i % 3].read_text())
        spoil(random, content)
        text = json.dumps(content)
        if i % 4 == 0:
            text = spoil_text(random, text)
        spoilt.write_text(text, encoding="utf-8", errors="surrogateescape")
        for arguments in (
            ["report", spoilt],
            ["report", spoilt, "--json"],
            ["report", spoilt, "--html", out],
            ["hta", spoilt, tmp_path / "hta"],
            ["draw", spoilt, out],
            ["draw", spoilt, out, "--step", "0"],
            ["merge", out, spoilt],
            ["merge", out, own, spoilt],
        ):
            status = tool.main([str(argument) for argument in arguments])
            told = capsys.readouterr()
            lines = told.err.splitlines()
            assert status in (0, 2) and len(lines) == (status == 2), (i, arguments, told.err)
            assert "\x1b" not in told.out + told.err


# ---- the rules ----------------------------------------------------------------------------------


def broken(change):
    content = a_step(0).overlap("copy", "copy", 5, 10, 9).content
    assert violations(content) == []
    by_phase = {}
    for event in content["traceEvents"]:
        by_phase.setdefault(event["ph"], event)
    change(content, by_phase)
    return violations(content)


def drop(key, *names):
    def change(content, events):
        for name in names:
            del events[name][key]

    return change


def put(phase, **fields):
    return lambda content, events: events[phase].update(fields)


def remove(phase):
    return lambda content, events: content["traceEvents"].remove(events[phase])


def rename_track(content, events):
    names = [e for e in content["traceEvents"] if e["name"] == "thread_name"]
    content["traceEvents"].remove(names[0])


@pytest.mark.parametrize(
    "change",
    [
        drop("dur", "X"),
        drop("ts", "C"),
        drop("bp", "f"),
        drop("id", "s"),
        put("X", ts=-1),
        put("X", ts=BASE_NS / 1000),
        put("X", ts=float("nan")),
        put("X", tid=0),
        put("X", tid=1),
        put("X", pid=0),
        put("X", dur=35, ts=20),
        put("X", name=None),
        put("X", ph="Q"),
        put("C", args={"value": "many"}),
        put("C", args={}),
        put("s", ts=150),
        put("f", ts=38),
        put("f", ts=1.5),
        put("s", id=8),
        remove("s"),
        remove("f"),
        remove("b"),
        remove("e"),
        put("e", ts=4),
        rename_track,
        lambda content, events: content.pop("distributedInfo"),
        lambda content, events: content["distributedInfo"].pop("rank"),
        lambda content, events: content["distributedInfo"].pop("world_size"),
        lambda content, events: content.update(baseTimeNanoseconds=1.5),
        lambda content, events: content.pop("traceEvents"),
    ],
)
def test_the_checker_notices_each_broken_rule(change):
    assert broken(change)


# ---- files of the C library ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return written_by_the_library(tmp_path_factory.mktemp("samples"))


def test_files_of_the_library_keep_the_rules(samples):
    for rank, path in enumerate(samples):
        assert check_file(path)["distributedInfo"]["rank"] == rank


def test_files_of_the_library_hold_every_kind_of_event(samples):
    events = check_file(samples[0])["traceEvents"]
    assert {event["ph"] for event in events} == set("MXCsfbe")


def test_names_of_the_library_come_back_as_they_were(samples):
    names = {event["name"] for event in check_file(samples[0])["traceEvents"]}
    assert 'launch "quoted" \ufffd' in names


def test_a_full_ring_of_the_library_is_cut_and_told(samples):
    content = check_file(samples[0])
    tasks = [e for e in content["traceEvents"] if e["ph"] == "X" and e["name"] == "task"]
    assert len(tasks) + content["penstock"]["overwritten"] == 3 * 64


def test_files_of_the_library_merge_by_their_collectives(samples, tmp_path):
    tool.merge(samples, tmp_path / "merged.json")
    content = check_file(tmp_path / "merged.json")
    ends = [end_of(event) for event in slices_of(content, "all_gather blocks.0").values()]
    assert ends == pytest.approx([ends[0]] * 2, abs=2e-3)
    rank = tool.report(tmp_path / "merged.json")["ranks"][1]
    assert rank["exposed_us"] == pytest.approx(50, abs=1e-2)
    assert rank["lanes"]["gather"]["bytes"] == 2 * 1048576


def test_the_scheduler_draws_its_edges_as_arrows_between_lanes(tmp_path):
    path = tmp_path / "two_lanes.json"
    run_built("example_two_lanes", path)
    lanes = tool.load(path).of_rank(0)
    names = {tid: track.name for (_, tid), track in tool.load(path).tracks.items()}
    arrows = [event for event in check_file(path)["traceEvents"] if event["ph"] in "sf"]
    ends = {(event["ph"], names[event["tid"]]) for event in arrows}
    assert {track.name for track in lanes if track.is_lane} == {"load", "sum"}
    assert ("s", "load") in ends
    assert ("f", "sum") in ends
