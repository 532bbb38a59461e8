"""Record, look, compile, execute; figures; traces."""

import json

import penstock
import pytest
import torch
from equality import train_both, world
from models import Net, Twice, loss_of, make
from penstock import PenstockError


def train(model, steps=1):
    for step in range(steps):
        loss_of(model, step, world()[0]).backward()


def record_a_step(stage):
    model = penstock.shard(make(Net), stage=stage)
    with penstock.record(model):
        train(model)
    ops = penstock.get_recorded_ops(model)
    penstock.close(model)
    return ops


def test_a_recording_names_what_happened_in_order(worlds):
    ops, others = worlds(2).run(record_a_step, 3)
    assert ops == others
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    order = ["embed", *blocks, "norm", "head"]
    uses = [(op.group, op.backward) for op in ops if op.kind == "gather"]
    assert uses == [(name, False) for name in order] + [(name, True) for name in reversed(order)]
    reduced = [op.group for op in ops if op.kind == "reduce"]
    assert reduced == order[::-1]
    assert all(op.nbytes > 0 for op in ops if op.kind == "gather")


def compile_and_execute(stage):
    model = penstock.shard(make(Net), stage=stage, prefetch_ahead=0)
    with penstock.record(model):
        train(model, 2)
    assert penstock.stats(model).planned_passes == 0
    plan = penstock.compile(
        recorded_ops=penstock.get_recorded_ops(model), zero_stage=stage, prefetch_ahead=2
    )
    assert 0 < plan.lower_bound_bytes <= plan.peak_bytes
    assert plan.groups == 6 and plan.uses >= 6
    penstock.stats(model, reset=True)
    with plan.execute():
        train(model, 2)
    figures = penstock.stats(model)
    assert figures.planned_passes == 2 and figures.deviations == 0
    if stage == 3:
        assert figures.prefetches > 0
        assert figures.plan_peak == plan.peak_bytes
    with pytest.raises(PenstockError, match=f"sharded with stage={stage}"):
        penstock.compile(recorded_ops=plan.operations, zero_stage=stage % 3 + 1)
    penstock.close(model)
    return plan.hash


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_recording_compiles_to_a_plan_that_runs(worlds, stage):
    first, second = worlds(2).run(compile_and_execute, stage)
    assert first == second


def one_plan_after_another():
    model = penstock.shard(make(Net))
    train(model, 2)
    ops = penstock.get_recorded_ops(model)
    near = penstock.compile(model, recorded_ops=ops, prefetch_ahead=1)
    far = penstock.compile(model, recorded_ops=ops, prefetch_ahead=3)
    assert near.peak_bytes <= far.peak_bytes
    for plan in (near, far, near):
        with plan.execute():
            train(model)
        assert penstock.stats(model).plan_peak == plan.peak_bytes
    penstock.close(model)


def test_plans_take_turns(worlds):
    worlds(2).run(one_plan_after_another)


def plan_of_another_model():
    model = penstock.shard(make(Net))
    stranger = penstock.Operation("gather", "layers.7", False, 64)
    with pytest.raises(PenstockError, match=r"Net has no group 'layers\.7'"):
        penstock.compile(recorded_ops=[stranger])
    penstock.close(model)


def test_a_plan_for_groups_that_do_not_exist_is_refused():
    plan_of_another_model()


def gather_ahead(kind, **options):
    model = train_both(kind, steps=4, **options)
    figures = penstock.stats(model)
    penstock.close(model)
    return figures


def test_groups_are_gathered_ahead_from_the_second_pass_on(worlds):
    for figures in worlds(2).run(gather_ahead, Net, prefetch_ahead=2):
        assert figures.forwards == figures.backwards == 4
        assert figures.planned_passes == 3 and figures.deviations == 0
        assert figures.prefetches > 0
        assert figures.arena_peak <= figures.plan_peak
        assert figures.reduces > 0 and figures.reduce_bytes > 0


def test_without_prefetch_nothing_is_gathered_ahead(worlds):
    for figures in worlds(2).run(gather_ahead, Net, prefetch_ahead=0):
        assert figures.prefetches == 0


def test_a_block_used_twice_is_planned_too(worlds):
    for figures in worlds(2).run(gather_ahead, Twice):
        assert figures.planned_passes == 3 and figures.deviations == 0


class Turning(Net):
    """Takes another path when it is told to, on all ranks alike."""

    backward = False

    def run_blocks(self, x, rank):
        for block in reversed(self.blocks) if self.turned else self.blocks:
            x = block(x)
        return x

    turned = False


def turn():
    def loss(model, step, rank):
        model.turned = step in (3, 4, 6)
        return loss_of(model, step, rank)

    model = train_both(Turning, steps=8, loss=loss)
    figures = penstock.stats(model)
    assert figures.deviations >= 2
    penstock.close(model)


def test_a_pass_on_another_path_is_noticed_and_right(worlds):
    worlds(2).run(turn)


def test_stages_1_and_2_gather_once_a_step(worlds):
    for stage in (1, 2):
        for figures in worlds(2).run(gather_ahead, Net, stage=stage):
            assert figures.gathers == 6 * 4  # groups times steps


def trace_a_step(folder):
    model = penstock.shard(make(Net))
    train(model, 2)
    with (
        penstock.trace(model, f"{folder}/rank{{rank}}.json") as own,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        train(model)
    profile.export_chrome_trace(f"{folder}/profile{world()[0]}.json")
    with penstock.trace(f"{folder}/again{{rank}}.json"):
        train(model)
    penstock.close(model)
    return own.path


def test_a_trace_shows_the_lanes_of_every_rank(worlds, tmp_path):
    files = worlds(2).run(trace_a_step, str(tmp_path))
    assert files == [str(tmp_path / f"rank{rank}.json") for rank in range(2)]
    merged = tmp_path / "merged.json"
    profiles = [tmp_path / f"profile{rank}.json" for rank in range(2)]
    penstock.trace.merge([*files, *profiles], merged)
    events = json.loads(merged.read_text())["traceEvents"]
    slices = [event["name"] for event in events if event["ph"] == "X"]
    assert any("blocks.1" in name for name in slices)
    assert {event["pid"] for event in events} >= {1, 2}
    gathers = [event["ts"] for event in events if event.get("cat") == "task"]
    operators = [event["ts"] for event in events if event["name"] == "aten::addmm"]
    assert min(gathers) < max(operators) and min(operators) < max(gathers)  # side by side


def test_the_trace_tool_needs_no_extension():
    import subprocess
    import sys

    code = "import sys, penstock.trace; assert 'torch' not in sys.modules; penstock.trace.main"
    subprocess.run([sys.executable, "-c", code], check=True)
