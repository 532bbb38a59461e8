"""Files for Holistic Trace Analysis, as its version 0.5.0 reads them."""

from __future__ import annotations

import json
import re

import penstock.trace as tool
import pytest
from made_traces import RankTrace, merged

MS = 1000  # HTA rounds to microseconds


def late_rank(rank, steps=4):
    """Steps in which rank 1 computes for 40 ms longer before a gather, and gradients at the end."""
    trace = RankTrace(rank)
    for step in range(steps):
        at, late = step * 100 * MS, 40 * MS if rank == 1 else 0
        trace.host("step", at, at + 90 * MS)
        trace.host("forward", at + 1 * MS, at + 21 * MS + late)
        trace.task("gather", "root", at + 21 * MS + late, at + 70 * MS, ticket=1, bytes=8)
        trace.host("wait root", at + 22 * MS + late, at + 70 * MS)
        trace.task("reduce", "gradients root", at + 75 * MS, at + 85 * MS, ticket=1, bytes=8)
        trace.task("copy", "root", at + 80 * MS, at + 82 * MS)
    return trace


@pytest.fixture
def folder(tmp_path):
    merged(tmp_path, *(late_rank(rank) for rank in range(3)))
    out = tmp_path / "hta"
    assert tool.main(["hta", str(tmp_path / "merged.json"), str(out)]) == 0
    return out


def test_each_rank_has_a_file_that_says_so_in_one_line(folder):
    assert sorted(path.name for path in folder.iterdir()) == [f"rank{i}.json" for i in range(3)]
    for rank in range(3):
        head = (folder / f"rank{rank}.json").read_text().splitlines()[0]
        assert re.search(r'"rank":\s+(\d+)', head)[1] == str(rank)


def test_kernels_have_streams_and_belong_to_steps_by_what_launched_them(folder):
    for path in folder.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
        launches = {e["args"]["correlation"]: e for e in events if e["cat"] == "cuda_runtime"}
        kernels = [event for event in events if event["cat"] == "kernel"]
        assert [step["name"] for step in steps] == [f"ProfilerStep#{i}" for i in range(1, 5)]
        assert len(kernels) == len(launches)
        for kernel in kernels:
            launch = launches[kernel["args"]["correlation"]]
            assert kernel["args"]["stream"] > 0
            assert any(s["ts"] <= launch["ts"] < s["ts"] + s["dur"] for s in steps)
        names = {(event["args"]["stream"], event["name"]) for event in kernels}
        assert {name for stream, name in names if stream > 7} == {
            "ncclKernel_AllGather root",
            "ncclKernel_ReduceScatter gradients root",
            "Memcpy root",
        }
        assert {name for stream, name in names if stream == 7} == {"forward", "step"}


def test_compute_of_a_gpu_is_what_lies_between_its_waits(tmp_path):
    trace = RankTrace(0).host("step", 0, 100).host("wait root", 20, 90, "compute stream")
    (path,) = tool.write_hta(trace.save(tmp_path), tmp_path / "hta")
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    kernels = [(e["name"], e["ts"], e["dur"]) for e in events if e["cat"] == "kernel"]
    assert kernels == [("compute", 0, 20), ("compute", 90, 10)]


def test_hta_returns_figures(folder):
    analysis = pytest.importorskip(
        "hta.trace_analysis", reason="HolisticTraceAnalysis, of PyPI, is not installed"
    )
    found = analysis.TraceAnalysis(trace_dir=str(folder))
    breakdown = found.get_temporal_breakdown(visualize=False).set_index("rank")
    assert list(breakdown.index) == [0, 1, 2]
    assert breakdown["compute_time_pctg"][1] > 1.5 * breakdown["compute_time_pctg"][0]
    overlap = found.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    assert ((overlap > 0) & (overlap < 100)).all()
    assert found.get_potential_stragglers(num_candidates=1) == [1]
