"""The demo, examples/train_gpt.py: trained for real over ranks, and its parts one by one."""

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import penstock
import penstock.trace as tool
import pytest
import torch
from chrome_rules import check_file
from launch import EXAMPLES, finish, forked
from made_traces import SVG

sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402
from demo_job import TINY  # noqa: E402
from gpt import check, model, options, report, text, traces  # noqa: E402


@pytest.fixture(autouse=True)
def temporary_files_go_with_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def start(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    job = [sys.executable, *command, str(EXAMPLES / "train_gpt.py"), *TINY, *arguments]
    return finish(job, {**os.environ, "OMP_NUM_THREADS": "1"})


def start_ranks(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return start(torchrun, *arguments)


def share_held(output: str, what: str) -> float:
    return float(re.search(rf"^{what} .* ([\d.]+)%$", output, re.MULTILINE)[1]) / 100


def expect_an_equal_run(printed: str, trace: Path, ranks: int) -> None:
    assert "step 6/6 loss" in printed
    for row in ("loss", "gradients, step 1", "final parameters"):
        assert re.search(rf"^{row} .* ok ", printed, re.MULTILINE), printed
    for what in ("parameters", "gradients"):
        assert share_held(printed, what) < 1.2 / ranks
    events = check_file(trace)["traceEvents"]
    assert {event["pid"] for event in events} == set(range(1, ranks + 1))
    assert str(trace) in printed
    expect_a_picture(trace, ranks)


def expect_a_picture(trace: Path, ranks: int) -> None:
    """As ./dev docs draws it."""
    out = trace.with_suffix(".svg")
    assert tool.main(["draw", str(trace), str(out), "--width", "900"]) == 0
    texts = [text.text for text in ElementTree.parse(out).iter(f"{SVG}text")]
    assert (
        sum(re.match(r"rank \d+: .* exposed communication$", text) is not None for text in texts)
        == ranks
    )
    for label in ("phase", "compute", "gather", "reduce"):
        assert label in texts, texts


def test_training_over_torchruns_ranks_equals_unsharded_training(tmp_path):
    trace = tmp_path / "trace.json"
    options = ["--stage", "3", "--optimizer", "penstock-adamw", "--trace", str(trace)]
    result = start_ranks(2, *options, "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    expect_an_equal_run(result.stdout, trace, 2)
    assert list(tmp_path.glob("penstock-*")) == []


def test_training_at_each_stage_equals_unsharded_training(tmp_path):
    ranks_of = {"stage_1": 2, "stage_2": 2, "stage_3": 4}
    forked("demo_job", *((ranks, stage) for stage, ranks in ranks_of.items()), folder=tmp_path)
    for stage, ranks in ranks_of.items():
        own = tmp_path / stage
        expect_an_equal_run((own / "printed").read_text(), own / "trace.json", ranks)
    assert list(tmp_path.glob("penstock-*")) == []


def test_one_process_trains_without_torchrun():
    result = start([], "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 rank" in result.stdout


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run it in this process; returns its status, and what it has printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *TINY, *arguments])
        try:
            status = train_gpt.main()
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr()

    return run


def test_a_text_of_the_users_own_is_used(run_here, tmp_path):
    # One byte over and over has nothing left to learn after a few steps.
    file = tmp_path / "text.txt"
    file.write_text("x" * 1000)
    status, printed = run_here("--text", str(file), "--lr", "0.01")
    assert status == 0, printed
    assert float(re.search(r"step 6/6 loss ([\d.]+)", printed.out)[1]) < 1


def test_a_text_that_is_too_short_is_an_error_that_names_it(run_here, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("x" * 32)
    status, printed = run_here("--text", str(file))
    assert status == 2
    assert str(file) in printed.err
    assert "33" in printed.err


def test_help_is_printed_once_for_all_ranks(run_here, monkeypatch):
    for rank, count in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        status, printed = run_here("--help")
        assert status == 0
        assert printed.out.count("usage: ") == count


def test_a_trace_folder_that_is_missing_is_an_error_before_training(run_here, tmp_path):
    status, printed = run_here("--trace", str(tmp_path / "missing" / "trace.json"))
    assert status == 2
    assert "missing" in printed.err
    assert "step 1" not in printed.out


def test_a_deviation_ends_with_status_1(run_here, monkeypatch):
    shard = penstock.shard

    def spoil_and_shard(gpt, **settings):
        with torch.no_grad():
            gpt.norm.weight *= 1.01
        shard(gpt, **settings)

    monkeypatch.setattr(penstock, "shard", spoil_and_shard)
    status, printed = run_here("--steps", "1", "--check")
    assert status == 1
    assert re.search(r"^gradients, step 1 .* FAILED ", printed.out, re.MULTILINE)


# ---- the comparison -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    return train_unsharded(seed=0)


def train_unsharded(seed: int) -> check.Run:
    given = options.parse([*TINY, "--seed", "0"])
    gpt = model.build(options.shape(given), seed)
    batches = text.Batches(text.load(None, given.seq), given.batch, given.seq, seed=0)
    optimizer = options.optimizer(given, gpt)
    return check.train_unsharded(
        gpt, optimizer, batches, ranks=2, steps=3, progress=lambda step: None
    )


def copy_of(run: check.Run) -> check.Run:
    return check.Run(
        [list(losses) for losses in run.losses],
        {name: tensor.clone() for name, tensor in run.gradients.items()},
        {name: tensor.clone() for name, tensor in run.parameters.items()},
    )


def failed(run: check.Run, reference: check.Run) -> list[tuple[str, str]]:
    return [(c.what, c.name) for c in check.compare(run, reference, "adamw") if not c.passed]


def test_equal_runs_pass(reference):
    assert failed(train_unsharded(seed=0), reference) == []


def test_runs_from_another_start_fail_in_everything(reference):
    kinds = [what for what, name in failed(train_unsharded(seed=1), reference)]
    assert kinds == ["loss", "gradients, step 1", "final parameters"]


def test_a_loss_that_differs_is_named(reference):
    run = copy_of(reference)
    run.losses[1][0] *= 1 + 3e-5
    assert failed(run, reference) == [("loss", "step 2")]


def test_a_gradient_that_differs_is_named(reference):
    run = copy_of(reference)
    run.gradients["blocks.1.mlp.0.weight"] *= 1 + 2e-5
    assert failed(run, reference) == [("gradients, step 1", "blocks.1.mlp.0.weight")]


def test_a_parameter_that_differs_is_named(reference):
    run = copy_of(reference)
    run.parameters["position.weight"] *= 1 + 3e-3
    assert failed(run, reference) == [("final parameters", "position.weight")]


def test_deviations_within_the_limits_pass(reference):
    run = copy_of(reference)
    run.gradients["position.weight"] *= 1 + 5e-6
    run.parameters["position.weight"] *= 1 + 1e-3
    assert failed(run, reference) == []


def test_a_nan_is_the_worst_deviation(reference):
    run = copy_of(reference)
    run.gradients["norm.weight"][0] = float("nan")
    run.gradients["position.weight"] *= 2
    assert failed(run, reference) == [("gradients, step 1", "norm.weight")]


@pytest.mark.parametrize("side", ["run", "reference"])
def test_a_gradient_that_one_side_lacks_fails(reference, side):
    lacking = copy_of(reference)
    del lacking.gradients["norm.weight"]
    pair = (lacking, reference) if side == "run" else (reference, lacking)
    assert failed(*pair) == [("gradients, step 1", "norm.weight")]


def test_another_shape_is_an_infinite_deviation():
    assert check.relative(torch.ones(2), torch.ones(3)) == float("inf")


def test_zeros_equal_zeros_alone():
    assert check.relative(torch.zeros(2), torch.zeros(2)) == 0
    assert check.relative(torch.ones(2), torch.zeros(2)) == float("inf")


# ---- the other parts ----------------------------------------------------------------------------


def test_a_batch_depends_on_step_and_rank_alone():
    def batches():
        return text.Batches(text.load(None, 16), batch=2, sequence=16, seed=3)

    asked_late = batches()
    asked_late.draw(0, 0)
    tokens, targets = batches().draw(5, 1)
    assert torch.equal(tokens, asked_late.draw(5, 1)[0])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(tokens, asked_late.draw(5, 0)[0])
    assert not torch.equal(tokens, asked_late.draw(6, 1)[0])


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 80])
def test_every_step_is_run_once_and_one_at_least_is_traced(steps):
    before, during, after = traces.split(steps)
    assert [*before, *during, *after] == list(range(steps))
    assert len(during) >= 1


def test_tensors_of_one_storage_count_once():
    flat = torch.zeros(100)
    assert report.storage_bytes([flat[:10], flat[50:], torch.zeros(3)]) == 412


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_is_drawn_over():
    output = Terminal()
    progress = report.Progress("step", 30, output)
    for step in range(30):
        progress.show(step, "loss 1")
    assert output.getvalue().count("\n") == 1
    assert output.getvalue().count("\r") == 30


def test_a_file_gets_some_plain_lines_and_the_last_step():
    output = io.StringIO()
    progress = report.Progress("step", 30, output)
    for step in range(30):
        progress.show(step, "loss 1")
    lines = output.getvalue().splitlines()
    assert "\r" not in output.getvalue()
    assert 5 <= len(lines) <= 15
    assert lines[-1] == "step 30/30 loss 1"


def test_the_model_is_made_of_blocks_that_sharding_finds():
    gpt = model.build(model.Shape(layers=3, width=32, context=8), seed=0)
    penstock.shard(gpt)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    gpt(tokens, tokens).backward()
    assert penstock.stats(gpt).gathers >= 4  # three blocks and what is around them
