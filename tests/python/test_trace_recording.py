"""What `penstock.trace` records of a training: steps, phases and collectives, in which files."""

import gzip
import json
import logging
import os
import re

import penstock
import penstock.trace as tool
import pytest
import torch
from chrome_rules import check_file
from equality import world
from models import DEVICE, Net, batch, loss_of, make
from penstock import PenstockError
from penstock._engine import engine_of

BLOCKS = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]


def begin(**options):
    model = penstock.shard(make(Net), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps):
        for step in range(steps):
            loss_of(model, step, world()[0]).backward()
            optimizer.step()
            optimizer.zero_grad()

    return model, train


def slices_of(path):
    """All slices of a rank's trace by name, after its text has been checked."""
    check_file(path)
    found = {}
    for track in tool.load(path).of_rank(world()[0]):
        for one in track.slices:
            found.setdefault(one.name, []).append(one)
    return found


def is_within(inner, outer):
    return outer.begin <= inner.begin and inner.end <= outer.end


def record_phases(folder):
    model, train = begin()
    train(1)
    with penstock.trace(model, f"{folder}/rank{{rank}}.json") as recording:
        train(3)
        with torch.no_grad():
            model(batch(0, 0))
    train(1)
    found = slices_of(recording)
    assert len(found["step"]) == len(found["backward"]) == len(found["optimizer"]) == 3
    assert len(found["forward"]) == 4  # the last one trains nothing, and is no step
    for number, step in enumerate(found["step"]):
        assert step.end <= found["forward"][number + 1].begin
        phases = [found[name][number] for name in ("forward", "backward", "optimizer")]
        assert all(is_within(phase, step) for phase in phases)
        assert phases[0].end <= phases[1].begin and phases[1].end <= phases[2].begin
        for kind, phase in zip(("forward", "backward"), phases, strict=False):
            parts = [found[f"{kind} {name}"][number] for name in BLOCKS]
            assert all(is_within(part, phase) for part in parts)
            order = sorted(parts, key=lambda part: part.begin)
            assert order == (parts if kind == "forward" else parts[::-1])
    row = tool.report(recording.path)["ranks"][world()[0]]
    assert row["steps"] == 3 and row["exposed_step_us"] > 0
    penstock.close(model)


@pytest.mark.skipif(DEVICE == "cuda", reason="backwards of GPUs run on a thread of their own")
def test_steps_have_forwards_backwards_and_optimizers_with_their_blocks(worlds, tmp_path):
    worlds(2).run(record_phases, str(tmp_path))


def record_recomputing(folder):
    model, train = begin(checkpoint="blocks.*")
    with penstock.trace(model, f"{folder}/rank{{rank}}.json") as recording:
        train(2)
    found = slices_of(recording)
    assert len(found["recompute blocks.1"]) == 2 and "recompute head" not in found
    assert len(found["forward blocks.1"]) == 2
    penstock.close(model)


def test_forwards_that_are_run_anew_are_told_from_others(worlds, tmp_path):
    worlds(2).run(record_recomputing, str(tmp_path))


def record_reductions(bucket_bytes, folder):
    model, train = begin(bucket_bytes=bucket_bytes)
    with penstock.trace(model, f"{folder}/rank{{rank}}.json") as recording:
        train(1)
    (lane,) = [t for t in tool.load(recording).of_rank(world()[0]) if t.name == "reduce"]
    penstock.close(model)
    return [one.name for one in lane.slices if one.name.startswith("gradients")]


@pytest.mark.skipif(DEVICE == "cuda", reason="one lane has gathers and reductions of copy engines")
def test_reductions_are_named_after_what_they_carry(worlds, tmp_path):
    for names in worlds(2).run(record_reductions, 1, str(tmp_path)):
        assert names == [f"gradients {name}" for name in reversed(BLOCKS)]
    for names in worlds(2).run(record_reductions, 1 << 20, str(tmp_path)):
        assert names == ["gradients head to embed (6 groups)"]


def record_little_memory(prefetch_bytes, folder):
    model, train = begin(prefetch_bytes=prefetch_bytes)
    train(3)  # until they go by a plan
    with penstock.trace(model, f"{folder}/rank{{rank}}.json") as recording:
        train(3)
    marks = [name for name in slices_of(recording) if name.startswith("memory full ")]
    groups = tool.report(recording.path)["exposed"]["groups"]
    penstock.close(model)
    return marks, sum(row["causes"].get("memory_full", 0) for row in groups)


def test_gathers_that_memory_holds_back_are_told_and_only_those(worlds, tmp_path):
    for marks, waited in worlds(2).run(record_little_memory, 1, str(tmp_path)):
        assert set(marks) == {f"memory full {name}" for name in BLOCKS}
        assert waited > 0 or DEVICE == "cuda"  # where a gather may take no time to speak of
    for marks, waited in worlds(2).run(record_little_memory, 1 << 30, str(tmp_path)):
        assert marks == [] and waited == 0


def record_some_steps(folder):
    model, train = begin()
    path = f"{folder}/rank{{rank}}.json"
    with penstock.trace(model, path, steps=(2, 3, 6)) as recording:
        train(8)
    with penstock.trace(model, path.replace("rank{", "last{"), steps=range(1, 9)) as last:
        train(3)
    penstock.close(model)
    own = f"{folder}/rank{world()[0]}"
    assert recording.path == f"{own}.2.json"
    counts = [len(slices_of(f"{own}{part}.json")["step"]) for part in ("", ".2")]
    return counts, len(slices_of(last)["step"])


def test_only_steps_that_were_asked_for_are_recorded(worlds, tmp_path):
    for found in worlds(2).run(record_some_steps, str(tmp_path)):
        assert found == ([2, 1], 2)


def test_a_recording_does_not_stop_within_a_capture(tmp_path):
    model, train = begin()
    phases, root = engine_of(model).phases, engine_of(model).root
    with penstock.trace(model, tmp_path / "trace.json", steps=[0]) as recording:
        loss_of(model, 0, 0).backward()
        phases.end_optimizer(is_captured=True)
        phases.begin_forward(root, False, is_captured=True)
        assert recording.is_on
        phases.begin_forward(root, False, is_captured=False)
        assert not recording.is_on
    penstock.close(model)


def test_a_recording_ends_with_its_last_step(tmp_path):
    model, _ = begin()
    halves = [model.blocks.parameters(), [*model.embed.parameters(), *model.norm.parameters()]]
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in [*halves, model.head.parameters()]]
    with penstock.trace(model, tmp_path / "trace.json", steps=range(2)) as recording:
        for number in range(2):
            for _ in range(2):  # gradients add up
                loss_of(model, number, 0).backward()
            for optimizer in optimizers:
                assert recording.is_on
                optimizer.step()
        assert recording.files == 1 and not recording.is_on
        with torch.no_grad():
            model(batch(0, 0))
        assert recording.files == 1
    found = slices_of(tmp_path / "trace.json")
    assert [len(found[name]) for name in ("step", "forward", "optimizer")] == [2, 4, 6]
    penstock.close(model)


def test_a_recording_whose_optimizers_lack_a_parameter_ends_before_the_next_step(tmp_path):
    model, _ = begin()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    with penstock.trace(model, tmp_path / "trace.json", steps=[0]) as recording:
        loss_of(model, 0, 0).backward()
        optimizer.step()
        assert recording.is_on
        model(batch(0, 0))
        assert not recording.is_on
    penstock.close(model)


def test_steps_that_never_come_are_told_and_leave_no_file(tmp_path, caplog):
    model, train = begin()
    with (
        caplog.at_level(logging.WARNING, "penstock"),
        penstock.trace(model, tmp_path / "trace.json", steps=[9]),
    ):
        train(2)
    assert "none of the steps [9] began" in caplog.text
    assert not list(tmp_path.iterdir())
    penstock.close(model)


def test_recordings_start_and_stop_within_a_trace(tmp_path):
    model, train = begin()
    with penstock.trace(model, tmp_path / "trace.json", steps=()) as recording:
        train(2)
        recording.start()
        with pytest.raises(PenstockError, match="recording already"):
            recording.start()
        train(1)
        assert recording.stop() == str(tmp_path / "trace.json")
        with pytest.raises(PenstockError, match="not recording"):
            recording.stop()
        train(2)
        recording.start()
        train(4)
    assert recording.path == str(tmp_path / "trace.2.json")
    counts = [len(slices_of(tmp_path / name)["step"]) for name in ("trace.json", "trace.2.json")]
    assert counts == [1, 4]
    penstock.close(model)


def test_a_recording_that_fails_within_a_pass_has_what_was_done(tmp_path):
    model, train = begin()
    with pytest.raises(ZeroDivisionError), penstock.trace(model, tmp_path / "trace.json"):
        train(1)
        model(batch(0, 0)).sum().backward()
        model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        train(1)
    found = slices_of(tmp_path / "trace.json")
    assert len(found["step"]) == 1 and len(found["backward"]) == 2
    assert len(found["forward blocks.0"]) == 3
    penstock.close(model)


def test_a_path_that_ends_in_gz_is_compressed_and_read_by_all_tools(tmp_path):
    model, train = begin()
    path = tmp_path / "trace.json.gz"
    with penstock.trace(model, path):
        train(2)
    penstock.close(model)
    assert os.listdir(tmp_path) == ["trace.json.gz"]
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert tool.report(path)["ranks"][0]["steps"] == 2
    tool.draw(path, tmp_path / "step.svg")
    tool.merge([path], tmp_path / "merged.json.gz")
    assert tool.report(tmp_path / "merged.json.gz") == tool.report(path)


def test_a_file_of_limited_size_says_what_was_dropped(tmp_path):
    model, train = begin()
    path = tmp_path / "trace.json"
    with penstock.trace(model, path, max_bytes=20_000):
        train(20)
    penstock.close(model)
    assert 5_000 < path.stat().st_size < 20_000
    lost = check_file(path)["penstock"]["overwritten"]
    assert f"oldest dropped, {lost} records" in path.read_text()
    result = tool.report(path)
    assert 1 <= result["ranks"][0]["steps"] < 20
    assert f"oldest dropped, {lost} records" in tool.format_report(result)


def test_the_rank_stands_where_other_tools_look_for_it(tmp_path):
    model, train = begin()
    with penstock.trace(model, tmp_path / "trace.json"):
        train(1)
    penstock.close(model)
    assert re.findall(r'"rank":\s+(\d+)', (tmp_path / "trace.json").read_text()) == ["0"]


@pytest.mark.parametrize("wrong", [{"steps": 5}, {"max_bytes": 0}, {"max_bytes": "1 MB"}])
def test_arguments_of_a_trace_that_are_wrong_are_named(tmp_path, wrong):
    model, _ = begin()
    (name,) = wrong
    with (
        pytest.raises(PenstockError, match=f"{name}="),
        penstock.trace(model, tmp_path / "trace.json", **wrong),
    ):
        pass
    penstock.close(model)
