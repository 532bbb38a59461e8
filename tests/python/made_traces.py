"""Traces written by hand, and by the C library, for the tests of the trace tool."""

import json
import os
import subprocess
from pathlib import Path

import penstock.trace as tool
import pytest
from chrome_rules import check_file

BUILD = Path(os.environ.get("PENSTOCK_BUILD", Path(__file__).resolve().parents[2] / "build"))
BASE_NS = 1_700_000_000_123_456_789
SVG = "{http://www.w3.org/2000/svg}"


class RankTrace:
    """A trace of one rank, written by hand; times are microseconds."""

    def __init__(self, rank, base_ns=BASE_NS, world_size=2, overwritten=0):
        self.pid, self.tracks = rank + 1, {}
        self.content = {
            "distributedInfo": {"backend": "penstock", "rank": rank, "world_size": world_size},
            "baseTimeNanoseconds": base_ns,
            "penstock": {"records": 10 + overwritten, "overwritten": overwritten},
            "traceEvents": [],
        }
        name = {"name": f"rank {rank}"}
        self.event(ph="M", name="process_name", tid=self.pid + 1, args=name)

    def event(self, **fields):
        self.content["traceEvents"].append({"pid": self.pid, **fields})
        return self

    def tid(self, track):
        if track not in self.tracks:
            tid = self.tracks[track] = self.pid + len(self.tracks) + 1
            self.event(ph="M", name="thread_name", tid=tid, args={"name": track})
            self.event(ph="M", name="thread_sort_index", tid=tid, args={"sort_index": tid})
        return self.tracks[track]

    def slice(self, track, name, begin, end, cat, **args):
        return self.event(
            ph="X", name=name, tid=self.tid(track), cat=cat, ts=begin, dur=end - begin, args=args
        )

    def task(self, track, name, begin, end, **args):
        return self.slice(track, name, begin, end, "task", **args)

    def host(self, name, begin, end, track="main"):
        return self.slice(track, name, begin, end, "host")

    def overlap(self, track, name, begin, end, number):
        common = {"name": name, "tid": self.tid(track), "cat": "task", "id": number}
        return self.event(ph="b", ts=begin, **common).event(ph="e", ts=end, **common)

    def flow(self, number, from_track, at, to_track, to):
        common = {"name": "edge", "cat": "edge", "id": number}
        self.event(ph="s", tid=self.tid(from_track), ts=at, **common)
        return self.event(ph="f", tid=self.tid(to_track), ts=to, bp="e", **common)

    def count(self, name, at, value):
        return self.event(ph="C", name=name, tid=self.tid("main"), ts=at, args={"value": value})

    def save(self, folder):
        path = folder / f"rank{self.pid - 1}.json"
        path.write_text(json.dumps(self.content), encoding="utf-8")
        return path


def a_step(rank, base_ns=BASE_NS, late=0.0):
    """A step of which everything happens `late` microseconds later."""
    trace = RankTrace(rank, base_ns)
    trace.host("step", late, late + 100)
    trace.host("launch", late + 1, late + 3)
    trace.host("wait blocks.0", late + 10, late + 40)
    trace.task("gather", "all_gather 0", late + 5, late + 38, ticket=1, bytes=1000)
    trace.task("reduce", "reduce_scatter 0", late + 50, late + 90, ticket=2, bytes=500)
    trace.flow(rank * 2**32 + 1, "main", late + 2, "gather", late + 5)
    return trace.count("arena bytes", late + 5, 4096)


def slices_of(content, name):
    return {e["pid"] - 1: e for e in content["traceEvents"] if e["ph"] == "X" and e["name"] == name}


def end_of(event):
    return event["ts"] + event["dur"]


def merged(tmp_path, *traces):
    out = tmp_path / "merged.json"
    tool.merge([trace.save(tmp_path) for trace in traces], out)
    return check_file(out)


def run_built(name, *arguments, **environment):
    """Run a program of the build's tests; skip the test where it is not built."""
    program = BUILD / "tests" / name
    if not program.exists():
        pytest.skip(f"{program} is not built: run ./dev build, or set PENSTOCK_BUILD")
    subprocess.run(
        [program, *arguments], env=os.environ | environment, check=True, capture_output=True
    )


def written_by_the_library(folder):
    """Two ranks' files, with every kind of event, by the test program of tracing."""
    run_built("tracing_test_chrome", PST_TRACE_SAMPLES=str(folder))
    return [folder / "rank0.json", folder / "rank1.json"]
