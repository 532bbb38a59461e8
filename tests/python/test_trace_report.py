"""Why a step takes as long as it does, on traces built here: causes, critical paths, the page."""

from __future__ import annotations

import json
import os
import re
import sys
from html.parser import HTMLParser
from random import Random

import penstock.trace as tool
import pytest
from made_traces import RankTrace, a_step, merged
from penstock._trace_kinds import kind_of
from penstock._trace_text import format_report


def late_in_a_block(rank, late_rank=1, steps=1):
    """Steps of 100 us in which a rank computes a block for 40 us longer than the others.

    Behind it comes a gather, and behind that, at once, another one; then gradients.
    """
    trace = RankTrace(rank)
    for step in range(steps):
        at, late = step * 100, 40 if rank == late_rank else 0
        trace.host("step", at, at + 100)
        trace.host("forward", at, at + 80)
        trace.host("forward blocks.0", at + 1, at + 11 + late)
        trace.task("gather", "blocks.1", at + 11 + late, at + 60, ticket=3, bytes=8)
        trace.task("gather", "blocks.2", at + 60.01, at + 70, ticket=4, bytes=8)
        trace.host("wait blocks.1", at + 12 + late, at + 61)
        trace.host("wait blocks.2", at + 62, at + 72)
        trace.host("optimizer", at + 80, at + 100)
    return trace


def reported(tmp_path, *traces, step=None):
    merged(tmp_path, *traces)
    return tool.report(tmp_path / "merged.json", step)


def parts_of(path):
    return {(p["kind"], p["rank"], p["lane"], p["name"]): p["us"] for p in path["parts"]}


# ---- captured steps -----------------------------------------------------------------------------


def captured(rank):
    """Three steps that the host launches as graphs, and one that it does not."""
    trace = RankTrace(rank)
    for step in range(3):
        trace.host("step", step * 10, step * 10 + 2)
        trace.task("gather", "graph of a step", step * 50, step * 50 + 40 + step)
    trace.host("step", 200, 220)
    trace.host("forward", 201, 210)
    trace.task("gather", "blocks.0", 200, 205, ticket=1, bytes=8)
    return trace


def test_captured_steps_are_as_long_as_their_graphs(tmp_path):
    result = reported(tmp_path, captured(0), captured(1))
    assert [round(step["ranks"][0]["us"]) for step in result["steps"]] == [40, 41, 42, 20]
    row = result["ranks"][0]
    assert (row["steps"], row["graphs"], row["step_us"]) == (4, 3, pytest.approx(40.5))
    path = result["steps"][1]["critical_path"]
    assert parts_of(path) == pytest.approx({("compute", 1, "", "compute"): 41})
    assert "3 of them CUDA graphs" in format_report(result)


def test_a_graph_is_no_task_of_its_lane(tmp_path):
    result = reported(tmp_path, captured(0))
    lane = result["ranks"][0]["lanes"]["gather"]
    assert (lane["count"], lane["bytes"], lane["busy_us"]) == (1, 8, pytest.approx(5))
    assert [one["name"] for one in result["longest"]] == ["blocks.0"]
    assert kind_of("graph of a step", "gather") == "compute" != kind_of("blocks.0", "gather")


# ---- the critical path --------------------------------------------------------------------------


def test_a_path_goes_from_the_end_over_the_collectives_to_the_rank_that_came_last(tmp_path):
    result = reported(tmp_path, *(late_in_a_block(rank) for rank in range(3)))
    path = result["steps"][0]["critical_path"]
    assert path["length_us"] == pytest.approx(100)
    assert parts_of(path) == pytest.approx(
        {
            ("compute", 2, "", "optimizer"): 20,
            ("compute", 2, "", "forward"): 8,
            ("waking", 2, "gather", "blocks.2"): 2,
            ("moving", None, "gather", "blocks.2"): 9.99,
            ("launching", 2, "gather", "blocks.2"): 0.01,
            ("moving", None, "gather", "blocks.1"): 9,
            ("compute", 1, "", "forward blocks.0"): 50,
            ("compute", 1, "", "forward"): 1,
        }
    )
    assert path["ranks"] == pytest.approx({1: 51, 2: 30.01})
    told = tool.format_report(result)
    assert "critical path of step 0: 0.100 ms" in told
    assert "rank 1 forward blocks.0 0.050 ms" in told


def test_a_path_goes_behind_the_begin_of_a_step_to_the_rank_that_began_late(tmp_path):
    traces = [RankTrace(0), RankTrace(1)]
    for rank, begin in enumerate((0, 30)):
        traces[rank].host("step", begin, 60).host("optimizer", 50, 60)
        traces[rank].task("gather", "root", begin + 1, 40, ticket=1)
        traces[rank].host("wait root", begin + 1, 40)
    path = reported(tmp_path, *traces)["critical_path"]
    assert parts_of(path)["compute", 1, "", "between steps"] == 30


def test_a_rank_that_launched_late_within_a_wait_is_told_from_compute(tmp_path):
    trace = RankTrace(0).host("step", 0, 100).host("wait root", 20, 90)
    trace.task("gather", "root", 80, 90, ticket=1)
    path = reported(tmp_path, trace)["critical_path"]
    assert parts_of(path) == {
        ("launching", 0, "gather", "root"): 60,
        ("moving", None, "gather", "root"): 10,
        ("compute", 0, "", "step"): 30,
    }


def test_compute_of_a_gpu_has_no_names_of_threads(tmp_path):
    trace = RankTrace(0).host("step", 0, 100).host("forward", 0, 10)
    trace.host("wait root", 20, 90, "compute stream").task("gather", "root", 5, 90, ticket=1)
    path = reported(tmp_path, trace)["critical_path"]
    assert parts_of(path) == {
        ("compute", 0, "", "compute"): 15,
        ("moving", None, "gather", "root"): 85,
    }


def test_what_a_wait_is_for_may_be_missing(tmp_path):
    trace = RankTrace(0).host("step", 0, 100).host("wait root", 20, 90)
    result = reported(tmp_path, trace)
    assert parts_of(result["critical_path"])["unknown wait", 0, "", ""] == 70
    assert result["exposed"]["groups"][0]["causes"] == {"unknown": 70}


def test_the_average_of_paths_is_that_of_all_steps(tmp_path):
    traces = [late_in_a_block(rank, steps=3) for rank in range(2)]
    result = reported(tmp_path, *traces)
    assert [step["step"] for step in result["steps"]] == [0, 1, 2]
    assert parts_of(result["critical_path"])["compute", 1, "", "forward blocks.0"] == 50
    assert "critical path of a step, on average of 3: 0.100 ms" in tool.format_report(result)
    (only,) = tool.report(tmp_path / "merged.json", 1)["steps"]
    assert (only["step"], only["critical_path"]["length_us"]) == (1, pytest.approx(100))


def odd_trace(random, rank):
    """Slices as no run has them: without order, nested, empty, of tickets that come again."""
    trace = RankTrace(rank)
    for _ in range(40):
        begin = random.randrange(100)
        end = begin + random.choice((0, 1, 5, 40))
        name = random.choice(("root", "blocks.0"))
        kind = random.randrange(4)
        if kind == 0:
            trace.task("gather", name, begin, end, ticket=random.randrange(3))
        elif kind == 1:
            trace.slice("main", f"wait {name}", begin, end, "host", ticket=random.randrange(3))
        else:
            trace.host(random.choice(("step", "forward", "wait gradients")), begin, end)
    return trace


def test_paths_through_odd_traces_end_and_have_no_gap(tmp_path):
    seed = int(os.environ.get("PST_SEED", "1"))
    print(f"PST_SEED={seed}")
    random = Random(seed)
    for _ in range(30):
        traces = [odd_trace(random, rank) for rank in range(3)]
        tool.merge([trace.save(tmp_path) for trace in traces], tmp_path / "merged.json")
        result = tool.report(tmp_path / "merged.json")
        tool.format_report(result)
        for step in result["steps"]:
            path = step["critical_path"]
            longest = max(rank["us"] for rank in step["ranks"].values())
            assert path["length_us"] >= longest - 1e-6
            assert path["length_us"] == pytest.approx(sum(part["us"] for part in path["parts"]))


def calls_of(tmp_path, steps):
    """Count the calls of functions in a report on so many steps."""
    merged(tmp_path, *(late_in_a_block(rank, steps=steps) for rank in range(2)))
    count = 0

    def note(*_):
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        tool.report(tmp_path / "merged.json")
    finally:
        sys.setprofile(None)
    return count


def test_a_report_takes_time_in_proportion_to_the_steps(tmp_path):
    fewer, few, many = (calls_of(tmp_path, steps) for steps in (20, 40, 160))
    assert many - few <= 1.2 * 6 * (few - fewer)  # sorting alone grows faster


# ---- causes -------------------------------------------------------------------------------------


def test_each_part_of_a_wait_has_its_cause(tmp_path):
    traces = [RankTrace(0), RankTrace(1)]
    for rank, begin in enumerate((30, 46)):
        traces[rank].task("gather", "blocks.0", 0, 20, ticket=1)
        traces[rank].task("gather", "blocks.1", begin, 60, ticket=2)
        traces[rank].task("reduce", "gradients blocks.0", 70, 90, ticket=1)
    traces[0].host("wait blocks.1", 10, 63).host("wait gradients", 80, 92)
    result = reported(tmp_path, *traces)
    blocks, gradients = result["exposed"]["groups"]
    assert (blocks["group"], blocks["kind"], blocks["us"]) == ("blocks.1", "gather", 53 / 2)
    assert blocks["causes"] == {
        "lane_busy": 10 / 2,
        "late_launch": 10 / 2,
        "late_rank": 16 / 2,
        "moving": 14 / 2,
        "waking": 3 / 2,
    }
    assert gradients["causes"] == {"reduction_tail": 10 / 2, "waking": 2 / 2}
    assert result["exposed"]["late"] == {0: 0, 1: 16 / 2}
    told = tool.format_report(result)
    assert "compute waited 0.008 ms for it" in told
    assert "late rank 0.008 ms" in told


def test_gradients_that_compute_waits_for_by_the_last_are_the_reduction_tail(tmp_path):
    trace = RankTrace(0)
    for ticket in (1, 2, 3):
        trace.task("reduce", "gradients a", 20 * ticket, 20 * ticket + 18, ticket=ticket)
    trace.slice("main", "wait gradients", 10, 80, "host", ticket=3)
    (row,) = reported(tmp_path, trace)["exposed"]["groups"]
    assert row["causes"] == {"late_launch": 10 + 2 + 2, "reduction_tail": 3 * 18, "waking": 2}


def pushed(rank, begin):
    """Two gradients that a rank pushes from then on, added up where both ranks' are there."""
    trace = RankTrace(rank).host("step", 0, 100)
    for ticket, (since, until), (added, end) in (
        (1, (begin, 50), (52, 62)),
        (2, (50, 60), (62, 80)),
    ):
        trace.task("gather", f"gradient {ticket}", since, until, ticket=ticket)
        trace.task("sum", f"gradient {ticket}", added, end, ticket=ticket)
    return trace.slice("compute stream", "wait gradients", 20, 82, "host", ticket=2)


def test_gradients_that_are_pushed_begin_with_the_push(tmp_path):
    result = reported(tmp_path, pushed(0, begin=10))
    (row,) = result["exposed"]["groups"]
    assert row["causes"] == {"reduction_tail": 60, "waking": 2}  # not launched late
    assert parts_of(result["critical_path"]) == {
        ("compute", 0, "", "compute"): 18 + 10,
        ("waking", 0, "sum", "gradient 2"): 2,
        ("moving", None, "sum", "gradient 2"): 18,  # behind what was added up before it
        ("moving", None, "sum", "gradient 1"): 10,
        ("launching", 0, "sum", "gradient 1"): 2,
        ("moving", None, "gather", "gradient 1"): 40,
    }


def test_the_path_of_gradients_that_are_pushed_goes_to_the_rank_that_came_last(tmp_path):
    traces = [pushed(0, begin=10), RankTrace(1).host("step", 0, 90)]
    traces[1].task("gather", "gradient 1", 40, 50, ticket=1)
    traces[1].task("sum", "gradient 1", 52, 62, ticket=1)
    path = reported(tmp_path, *traces)["critical_path"]
    assert parts_of(path)["moving", None, "gather", "gradient 1"] == 10
    assert parts_of(path)["compute", 1, "", "step"] == 40


def full(trace, group, *times):
    for time in times:
        trace.host(f"memory full {group}", time, time)
    return trace


def causes_of_b(tmp_path, trace):
    (row,) = reported(tmp_path, trace)["exposed"]["groups"]
    return row["causes"]


def test_what_memory_held_back_is_late_by_the_time_that_its_lane_was_idle(tmp_path):
    trace = RankTrace(0).task("gather", "a", 0, 20, ticket=1).task("gather", "b", 50, 90, ticket=2)
    full(trace.host("wait b", 40, 95), "b", 10, 30)
    # From 20 to 50 it would have moved: of the wait's last 10 before it began, and 20 behind that.
    assert causes_of_b(tmp_path, trace) == {"memory_full": 30, "moving": 20, "waking": 5}


def test_memory_that_was_full_before_the_gather_before_or_for_others_does_not_count(tmp_path):
    trace = RankTrace(0).task("gather", "b", 5, 20, ticket=1).task("gather", "b", 50, 90, ticket=2)
    full(full(trace.host("wait b", 40, 90), "b", 2, 60), "a", 30)
    assert causes_of_b(tmp_path, trace) == {"late_launch": 10, "moving": 40}


def test_memory_that_was_full_while_the_lane_was_busy_cost_nothing(tmp_path):
    trace = RankTrace(0).task("gather", "a", 0, 50, ticket=1).task("gather", "b", 50, 90, ticket=2)
    full(trace.host("wait b", 40, 90), "b", 10)
    assert causes_of_b(tmp_path, trace) == {"lane_busy": 10, "moving": 40}


def test_a_hint_for_memory_that_is_full_names_the_option(tmp_path):
    trace = RankTrace(0).host("step", 0, 100).host("wait b", 40, 90)
    full(trace.task("gather", "b", 41, 90, ticket=1), "b", 1)
    (hint,) = reported(tmp_path, trace)["hints"]
    assert "raise prefetch_bytes=" in hint


def test_what_the_optimizer_waits_is_told(tmp_path):
    trace = RankTrace(0).host("optimizer", 10, 50).host("wait gradients", 20, 30)
    trace.task("reduce", "gradients root", 5, 30, ticket=1)
    (row,) = reported(tmp_path, trace)["exposed"]["groups"]
    assert row["causes"] == {"optimizer": 10}


def test_waits_of_replayed_tickets_go_with_the_last_task_that_began(tmp_path):
    trace = RankTrace(0)
    for step in range(3):
        trace.task("gather", "root", step * 100, step * 100 + 50, ticket=1)
        trace.slice("main", "wait root", step * 100 + 10, step * 100 + 50, "host", ticket=1)
    (row,) = reported(tmp_path, trace)["exposed"]["groups"]
    assert row["causes"] == {"moving": 120}


def test_a_hint_names_the_rank_and_what_it_computes(tmp_path):
    result = reported(tmp_path, *(late_in_a_block(rank, steps=4) for rank in range(3)))
    assert (
        "rank 1: look at what it computes before, most of all forward blocks.0"
        in (result["hints"][0])
    )


def test_a_hint_for_threads_that_wake_late_speaks_of_cpus(tmp_path):
    trace = RankTrace(0).host("step", 0, 100).host("wait root", 20, 60)
    trace.task("gather", "root", 5, 25, ticket=1)
    (hint,) = reported(tmp_path, trace)["hints"]
    assert "as many CPUs" in hint


def test_a_hint_for_data_that_moves_asks_for_the_ranks_that_are_not_there(tmp_path):
    traces = [RankTrace(rank).host("step", 0, 100).host("wait root", 20, 60) for rank in range(2)]
    for trace in traces:
        trace.task("gather", "root", 5, 60, ticket=1)
    (hint,) = reported(tmp_path, traces[0])["hints"]
    assert "memory='auto'" in hint
    assert "merge the other ranks' traces" in hint
    (hint,) = reported(tmp_path, *traces)["hints"]
    assert "memory='auto'" in hint
    assert "merge" not in hint


def steps_of_two_ranks(late_step, late_us, moving_us):
    """Six steps of 100 us; in one of them rank 1 computes for longer, or a gather moves data."""
    traces = [RankTrace(rank) for rank in range(2)]
    at = 0
    for step in range(6):
        late, moving = (late_us, moving_us) if step == late_step else (0, 0)
        for rank, trace in enumerate(traces):
            came, ended = at + 30 + rank * late, at + 40 + late + moving
            trace.host("step", at, ended + 60).host("forward blocks.0", at, came)
            trace.task("gather", "blocks.1", came, ended, ticket=step + 1)
            trace.host("wait blocks.1", came, ended)
        at = ended + 60
    return traces


@pytest.mark.parametrize(
    ("late", "moving", "told"),
    [
        (80, 0, "compute took 0.1 ms longer, most of all rank 1 forward blocks.0, 0.1 ms"),
        (0, 90, "data moved for 0.1 ms longer, .* on the link, most of all gather of blocks.1"),
    ],
)
def test_a_hint_names_a_step_that_took_longer_than_others_and_why(tmp_path, late, moving, told):
    result = reported(tmp_path, *steps_of_two_ranks(3, late, moving))
    assert re.match(f"step 3 took 0.2 ms, where 0.1 ms is the median: {told}", result["hints"][0])


def test_steps_of_much_the_same_length_are_not_unusual(tmp_path):
    result = reported(tmp_path, *steps_of_two_ranks(3, 20, 0))
    assert not [hint for hint in result["hints"] if "median" in hint]


# ---- files --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page has: text by tags, and attributes."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def page_of(tmp_path, *traces, arguments=()):
    merged(tmp_path, *traces)
    out = tmp_path / "report.html"
    assert tool.main(["report", str(tmp_path / "merged.json"), "--html", str(out), *arguments]) == 0
    return Page(out)


def test_the_page_has_all_parts(tmp_path, capsys):
    page = page_of(tmp_path, *(late_in_a_block(rank, steps=3) for rank in range(2)))
    assert capsys.readouterr().out == ""
    assert page.tags.count("svg") == 1 and page.tags.count("table") >= 6
    for text in (
        *("Steps", "Critical path", "Exposed communication", "Who comes last", "Lanes"),
        *("rank 1 forward blocks.0", "late rank", "critical path over the ranks"),
    ):
        assert text in page.texts


def test_the_page_refers_to_nothing_outside(tmp_path):
    page = page_of(tmp_path, a_step(0), a_step(1))
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "data", "action", "onload", "xlink:href"}
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object", "embed", "base"}
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text and "url(" not in text
    assert text.count("://") == text.count('xmlns="http://www.w3.org/2000/svg"')


def test_names_cannot_add_to_the_page(tmp_path):
    name = '</td><script>alert("x")</script>&\x1b'
    trace = RankTrace(0).host("step", 0, 100).host(f"wait {name}", 20, 60)
    page = page_of(tmp_path, trace.task("gather", name, 5, 60, ticket=1))
    assert "script" not in page.tags
    assert name.replace("\x1b", "\ufffd") in page.texts


def test_a_trace_without_slices_makes_a_page(tmp_path):
    assert "svg" in page_of(tmp_path, RankTrace(0)).tags


def test_the_page_of_a_step_has_that_step_alone(tmp_path):
    page = page_of(tmp_path, late_in_a_block(0, steps=3), arguments=("--step", "2"))
    assert any(text.startswith("Step 2 of merged.json") for text in page.texts)
    assert not any(text.startswith("Step 1 of") for text in page.texts)


def test_a_report_is_written_as_json_where_a_file_is_named(tmp_path, capsys):
    path, out = a_step(0).save(tmp_path), tmp_path / "report.json"
    assert tool.main(["report", str(path), "--json", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text()) == json.loads(json.dumps(tool.report(path)))
