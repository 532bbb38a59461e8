"""Recordings with times, groups that stay gathered, saved plans and what is said of them."""

import dataclasses
import json
import subprocess
import sys
from xml.etree import ElementTree

import penstock
import penstock.plan
import pytest
import torch
from equality import world
from models import DEVICE, Net, loss_of, make
from penstock._activations import begin_late
from penstock._budget import Offer
from penstock._drafts import choose_draft, describe, hold_whole
from penstock._engine import engine_of
from penstock._ways import Block, Ways
from penstock.plan import Draft, PlanError
from torch.utils.flop_counter import FlopCounterMode


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, world()[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def record(model):
    with penstock.record(model):
        train(model, 1)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return penstock.get_recorded_ops(model)


def record_times():
    model = penstock.shard(make(Net))
    ops = record(model)
    reached = [op.reached for op in ops]
    assert reached == sorted(reached) and reached[0] == 0 and reached[-1] > 0
    for op in ops:
        assert (op.took > 0) == (op.kind != "release")
        assert op.waited == 0 or op.kind != "release"  # GPUs wait before reductions, too
    train(model, 2)
    assert all(op.took == 0 for op in penstock.get_recorded_ops(model))  # by plan
    penstock.close(model)


def test_a_recording_has_times(worlds):
    worlds(2).run(record_times)


# ---- groups that stay ----------------------------------------------------------------------------


def train_keeping(keep):
    model = penstock.shard(make(Net), prefetch_ahead=1)
    losses = train(model, 1)
    plan = penstock.compile(recorded_ops=record(model), prefetch_ahead=1, keep_bytes=keep)
    with plan.execute():
        penstock.stats(model, reset=True)
        losses += train(model, 4)
    figures = penstock.stats(model)
    assert figures.planned_passes == 4 and figures.deviations == 0
    assert figures.arena_peak <= plan.peak_bytes == figures.plan_peak
    weights = [parameter.full_tensor().tolist() for parameter in model.parameters()]
    penstock.close(model)
    return losses, weights, figures.gathers, plan.hash, [group.is_kept for group in plan.forecasts]


def look_at_prediction():
    model = penstock.shard(make(Net))
    train(model, 2)
    before = penstock.stats(model, reset=True)
    assert before.predicted_pass_ns == 0  # the first pass was not like others
    assert before.passes_ns > 0 and before.timed_passes == 2
    plan = penstock.compile(recorded_ops=record(model))
    train(model, 3)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    figures = penstock.stats(model)
    assert figures.predicted_pass_ns == round(plan.predicted_step * 1e9) > 0
    assert figures.predicted_exposed_ns == round(plan.predicted_exposed * 1e9)
    assert figures.timed_passes == 4
    assert figures.passes_ns > figures.exposed_ns
    penstock.close(model)


def test_what_is_predicted_and_measured_stands_side_by_side(worlds):
    worlds(2).run(look_at_prediction)


def look_at_prediction_of_what_is_kept():
    model = penstock.shard(make(Net), checkpoint="auto", memory=1 << 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss_of(model, step, world()[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    figures = penstock.stats(model)
    assert figures.kept_blocks == 3 and figures.saved_recomputing_ns > 0
    recorded = engine_of(model).native.forecast(True).step_ns
    assert figures.predicted_pass_ns == recorded - figures.saved_recomputing_ns > 0
    if DEVICE == "cuda":
        assert figures.predicted_peak_bytes > figures.kept_activations_bytes > 0
    penstock.close(model)


def test_what_is_kept_is_predicted_to_save_its_recomputation(worlds):
    worlds(2).run(look_at_prediction_of_what_is_kept)


def test_what_stays_is_gathered_once_and_changes_nothing(worlds):
    runs = [worlds(2).run(train_keeping, keep) for keep in (0, 1 << 40)]
    (none, none_too), (all_, all_too) = runs
    assert none[3] == none_too[3] and all_[3] == all_too[3]
    for without, kept in zip((none, none_too), (all_, all_too), strict=True):
        assert without[:2] == kept[:2]  # losses and weights, bit for bit
    groups, stay = len(none[4]), sum(none[4])
    assert groups == 6 and 0 < stay < 6 and all(all_[4])
    assert none[2] == 4 * (groups + groups - stay) and all_[2] == 4 * groups


def keep_by_rank(numbers):
    model = penstock.shard(make(Net), prefetch_ahead=0)
    ops = record(model)
    plan = penstock.compile(recorded_ops=ops, prefetch_ahead=0, keep_bytes=numbers[world()[0]])
    penstock.close(model)
    return plan


def test_the_smallest_budget_of_all_ranks_counts(worlds):
    def hashes(*numbers):
        plans = worlds(2).run(compile_by_rank, numbers)
        assert plans[0][0] == plans[1][0]
        return plans[0]

    assert hashes(1 << 40, 0)[1:] == (0, 0)
    assert hashes(1 << 30, 1 << 20)[1] == 1 << 20


def compile_by_rank(numbers):
    plan = keep_by_rank(numbers)
    return plan.hash, plan.keep_bytes, plan.kept_bytes


def test_a_budget_that_is_no_number_is_refused():
    model = penstock.shard(make(Net))
    with pytest.raises(penstock.PenstockError, match=r"keep_bytes=-1: give a whole number"):
        penstock.compile(recorded_ops=[], keep_bytes=-1)
    penstock.close(model)


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU rests: PENSTOCK_TEST_DEVICE=cuda")
def test_what_a_gpu_does_before_a_measured_step_is_unseen():
    state = torch.cuda.get_rng_state()
    before = torch.cuda.memory_allocated()
    with FlopCounterMode(display=False) as counter:
        begin_late(torch.device("cuda", torch.cuda.current_device()))
    assert counter.get_total_flops() == 0
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() <= before + (64 << 20)  # a workspace of cuBLAS


# ---- by the memory that is left ------------------------------------------------------------------


def test_the_log_says_what_a_draft_takes_and_saves():
    first, kept = Draft(2, 0, 100 << 20, 0.2, 0.0), Draft(2, 5 << 20, 900 << 20, 0.1, 0.0)
    line = "2 groups are gathered ahead, and of others 5.0 MiB stay gathered: 800.0 MiB more than "
    line += "without, for a pass of 100.00 instead of 200.00 ms"
    assert describe(kept, first, 0.0, is_whole=False) == line
    less = Draft(1, 5 << 20, 50 << 20, 0.1, 0.0)
    assert "stay gathered: 50.0 MiB less than" in describe(less, first, 0.0, is_whole=False)
    assert "for a pass of 70.00 instead of" in describe(kept, first, 0.03, is_whole=False)
    all_stay = (
        "and all stay, as in stage 2, which takes no more and gathers nothing twice: 50.0 MiB"
    )
    assert all_stay in describe(less, first, 0.0, is_whole=True)


def test_stage_2_holds_all_parameters():
    model = penstock.shard(make(Net))
    engine = engine_of(model)
    whole = hold_whole(Draft(2, 5, 1, 0.1, 0.0), engine.native, engine.groups())
    if engine.native.communicator() == "ce":  # of one rank: each shard lies in the whole
        assert whole.peak_bytes == 0
    else:
        assert whole.peak_bytes >= sum(p.numel() for p in make(Net).parameters()) * 4
    assert dataclasses.replace(whole, peak_bytes=1) == Draft(2, 5, 1, 0.1, 0.0)
    penstock.close(model)


def choose_beside(drafts, offers, room):
    draft, choice = choose_draft(drafts, Ways([Block(offer) for offer in offers]), room)
    assert not choice.offloaded
    return draft, list(choice.kept)


def test_the_draft_that_saves_most_is_chosen():
    first, ahead, kept, near = (
        Draft(prefetch_ahead, keep_bytes, peak, nanoseconds / 1e9, 0.0)
        for prefetch_ahead, keep_bytes, peak, nanoseconds in (
            (2, 0, 100, 10_000),
            (4, 0, 200, 8_000),
            (2, 500, 600, 6_000),
            (6, 0, 300, 7_999),
        )
    )
    drafts = [first, ahead, kept, near]
    assert choose_beside([first], [], -50) == (first, [])
    assert choose_beside(drafts, [], 99) == (first, [])
    assert choose_beside(drafts, [], 300) == (ahead, [])  # near saves a ten thousandth more
    assert choose_beside(drafts, [], 500) == (kept, [])
    block = Offer(size=250, nanoseconds=5_000)
    assert choose_beside(drafts, [block], 300) == (first, [0])
    assert choose_beside(drafts, [block], 500) == (ahead, [0])
    assert choose_beside(drafts, [block], 750) == (kept, [0])
    smaller = Draft(1, 0, 50, 10_005 / 1e9, 0.0)
    assert choose_beside([first, smaller], [], 0) == (smaller, [])
    stays = Draft(2, 300, 400, 10_001 / 1e9, 0.0)
    assert choose_beside([first, stays, smaller], [], 300) == (stays, [])  # and spares the link
    assert choose_beside([first, stays, smaller], [], 299) == (smaller, [])
    unknown = Draft(2, 0, 100, 0.0, 0.0)
    assert choose_beside([unknown], [block], 250) == (unknown, [0])


def train_within(memories, **options):
    """Return losses, and gathers of three steps before and after memory is used."""
    model = make(Net)
    model.head.weight.requires_grad_(False)
    memory = memories[world()[0]] if memories else None
    penstock.shard(model, prefetch_ahead=0, memory=memory, **options)
    losses = train(model, 3)  # the third is measured
    gathers = []
    for _ in range(2):
        penstock.stats(model, reset=True)
        losses += train(model, 3)
        figures = penstock.stats(model)
        gathers.append(figures.gathers)
    assert figures.planned_passes == 3 and figures.deviations == 0
    penstock.close(model)
    return losses, gathers


@pytest.mark.parametrize("checkpoint", [None, "*"])
def test_memory_keeps_what_would_be_gathered_again(worlds, checkpoint):
    if DEVICE == "cuda":
        pytest.skip("bytes of CPUs are those that are taken beside the step")
    without = worlds(2).run(train_within, None, checkpoint=checkpoint)
    ample = worlds(2).run(train_within, [1 << 40, 1 << 40], checkpoint=checkpoint)
    uneven = worlds(2).run(train_within, [1 << 40, 1], checkpoint=checkpoint)
    for rank in range(2):
        losses, gathers = without[rank]
        assert ample[rank][0] == uneven[rank][0] == losses  # bit for bit
        assert uneven[rank][1] == gathers
        assert ample[rank][1] == ample[0][1] < gathers


def train_with_an_output_kept():
    """Keep the output of a forward with gradients on one rank: its backward may come."""
    model = penstock.shard(make(Net), prefetch_ahead=0, memory=1 << 40)
    train(model, 2)
    kept = loss_of(model, 0, 0)
    if world()[0] == 1:
        del kept
    train(model, 4)
    penstock.stats(model, reset=True)
    train(model, 2)
    gathers = penstock.stats(model).gathers
    penstock.close(model)
    return gathers


def test_ranks_plan_together_whatever_graphs_they_keep(worlds):
    first, second = worlds(2).run(train_with_an_output_kept)
    assert first == second


def train_within_unfreezing():
    model = make(Net)
    model.head.weight.requires_grad_(False)
    penstock.shard(model, prefetch_ahead=0, memory=1 << 40)
    for _ in range(2):
        gathers = []
        for _ in range(4):
            penstock.stats(model, reset=True)
            train(model, 1)
            gathers.append(penstock.stats(model).gathers)
        assert gathers[3] < gathers[1]  # the third is measured
        model.head.weight.requires_grad_(True)  # the engine below is another one then
    penstock.close(model)


def test_parameters_that_are_unfrozen_are_planned_for_anew(worlds):
    if DEVICE == "cuda":
        pytest.skip("bytes of CPUs are those that are taken beside the step")
    worlds(2).run(train_within_unfreezing)


# ---- saved plans ---------------------------------------------------------------------------------


def save_plans(folder):
    model = penstock.shard(make(Net), prefetch_ahead=1)
    ops = record(model)
    for name, keep in (("none", 0), ("all", 1 << 40)):
        plan = penstock.compile(recorded_ops=ops, prefetch_ahead=1, keep_bytes=keep)
        plan.save(f"{folder}/{name}{world()[0]}.json")
    saved = penstock.plan.load(f"{folder}/all{world()[0]}.json")
    assert [dataclasses.astuple(op) for op in saved.operations] == [
        dataclasses.astuple(op) for op in ops
    ]
    again = penstock.compile(recorded_ops=saved.operations, prefetch_ahead=1, keep_bytes=1 << 40)
    assert again == plan and saved.hash == plan.hash and saved.groups == plan.forecasts
    penstock.close(model)


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    worlds(2).run(save_plans, str(folder))
    return folder


def test_a_saved_plan_says_what_it_is_of(saved):
    plan = penstock.plan.load(saved / "all1.json")
    assert (plan.model, plan.rank, plan.ranks, plan.stage) == ("Net", 1, 2, 3)
    assert plan.communicator == ("c10d" if DEVICE == "cpu" else plan.communicator)
    assert [group.name for group in plan.groups if group.nbytes > 0] == [
        *("embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head")
    ]
    assert plan.predicted_step > plan.predicted_exposed >= 0
    first = penstock.plan.load(saved / "all0.json")
    assert first.hash == plan.hash and first.groups == plan.groups


def tool(*arguments):
    code = (
        "import sys, penstock.plan; status = penstock.plan.main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'penstock._C' not in sys.modules;"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_explain_has_a_line_a_group(saved):
    ran = tool("explain", saved / "none0.json")
    assert ran.returncode == 0, ran.stderr
    assert "predicted step" in ran.stdout and "exposed communication" in ran.stdout
    assert "peak of gathered groups" in ran.stdout
    head, forward, backward, drafts = ran.stdout.split("\n\n")
    assert "Net: training, stage 3, 2 ranks" in head and "keep_bytes 0.000 MiB: 0 groups" in head
    assert len(forward.splitlines()) == len(backward.splitlines()) == 1 + 6
    (line,) = [line for line in backward.splitlines() if line.startswith("blocks.0")]
    assert line.endswith("gathered again: not within keep_bytes")
    (line,) = [line for line in backward.splitlines() if line.startswith("head")]
    assert line.endswith("stays: the backward begins with it") and "-" in line.split()
    title, *rows = drafts.splitlines()
    assert title.split()[::2] == ["memory", "step", "exposed", "ahead", "MiB"]
    assert sum(row.endswith("this plan") for row in rows) == 1
    memory, steps = zip(*(map(float, row.split()[:2]) for row in rows), strict=True)
    assert sorted(memory) == list(memory) and steps[-1] == min(steps)
    kept = tool("explain", saved / "all0.json").stdout
    assert kept.count("stays within keep_bytes") == 4


def test_diff_says_what_another_plan_does(saved):
    ran = tool("diff", saved / "none0.json", saved / "all0.json")
    assert ran.returncode == 0, ran.stderr
    assert "keep_bytes: 0 -> 1099511627776" in ran.stdout
    assert "blocks.0: gathered again: not within keep_bytes -> stays within" in ran.stdout
    assert tool("diff", saved / "all0.json", saved / "all1.json").stdout == "the same\n"


def predict(plan, *arguments):
    command = [sys.executable, "-m", "penstock.plan", "predict", plan, *arguments]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    rows = [line.split() for line in ran.stdout.splitlines()[1:]]
    return ran, [(float(step), float(exposed)) for _, _, step, exposed, _ in rows]


def test_a_plan_predicts_for_other_ranks_and_links(saved):
    plan = saved / "none0.json"
    _, ((step, exposed),) = predict(plan, "--ranks", 2)
    assert step > exposed > 0
    ran, rows = predict(plan, "--ranks", 2, 16, 256, "--link", 1e-4)
    assert ran.returncode == 0, ran.stderr
    assert rows == sorted(rows) and rows[0] < rows[1] < rows[2]
    compute = [step - exposed for step, exposed in rows]
    assert max(compute) - min(compute) < 0.01  # as it was measured
    _, fast = predict(plan, "--ranks", 16, "--link", 1e3)
    _, slow = predict(plan, "--ranks", 16, "--nodes", 4, "--link", 1e3, "--node-link", 1e-4)
    assert fast[0][1] < 0.01 < slow[0][1]
    _, (alone,) = predict(plan, "--ranks", 1)
    assert alone[1] == 0


def test_a_table_by_rows_takes_what_it_took(saved, tmp_path):
    """A slower link is one for other groups: how many bytes of rows travel nobody knows."""
    known = json.loads((saved / "none0.json").read_text())
    groups = [g | {"keep": "rows"} if g["name"] == "embed" else g for g in known["groups"]]
    by_rows = tmp_path / "rows.json"
    by_rows.write_text(json.dumps(known | {"groups": groups}))
    _, ((whole, _),) = predict(saved / "none0.json", "--ranks", 16, "--link", 1e-5)
    _, ((step, _),) = predict(by_rows, "--ranks", 16, "--link", 1e-5)
    assert step < whole
    assert "by rows: each use gathers" in tool("explain", by_rows).stdout


def test_what_cannot_be_predicted_is_named(saved):
    plan = saved / "none0.json"
    for arguments, text in (
        (("--ranks", 6, "--nodes", 4), "6 ranks do not lie evenly on 4 nodes"),
        (("--ranks", 8, "--nodes", 4), "several nodes want --node-link"),
        (("--ranks", 0), "0 ranks do not lie evenly"),
    ):
        ran, _ = predict(plan, *arguments)
        assert ran.returncode == 2 and text in ran.stderr


def test_a_plan_is_drawn(saved, tmp_path):
    out = tmp_path / "plan.svg"
    ran = tool("draw", saved / "none0.json", out)
    assert ran.returncode == 0, ran.stderr
    texts = [
        element.text for element in ElementTree.fromstring(out.read_text()).iter() if element.text
    ]
    titles = [text for text in texts if text.startswith("blocks.0:")]
    # Two gathers, two uses, and what these wait, if the times that were measured make them wait.
    assert 4 <= len(titles) <= 6
    assert "link" in texts and "exposed communication" in texts
    plan = json.loads((saved / "none0.json").read_text())
    plan["predicted_step"] = 0.0
    out.with_suffix(".json").write_text(json.dumps(plan))
    ran = tool("draw", out.with_suffix(".json"), out)
    assert ran.returncode == 2 and "made without times" in ran.stderr


def test_files_that_hold_no_plan_are_named(saved, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(PlanError, match=r"bad\.json is no JSON"):
        penstock.plan.load(bad)
    bad.write_text('{"penstock": "a trace"}')
    with pytest.raises(PlanError, match=r"bad\.json holds no plan.*penstock\.Plan\.save"):
        penstock.plan.load(bad)
    plan = json.loads((saved / "all0.json").read_text())
    del plan["groups"][0]["keep"]
    bad.write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=r"bad\.json is damaged"):
        penstock.plan.load(bad)
    ran = tool("explain", tmp_path / "none.json")
    assert ran.returncode == 2 and "none.json" in ran.stderr
