"""The benchmark of a training step, bench/train/step.py, with tiny models."""

import re
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

import penstock
import pytest
import torch
from launch import forked

STEP = Path(__file__).resolve().parents[2] / "bench" / "train" / "step.py"


def expect_equal_losses(printed):
    losses = re.findall(r"^(fsdp2|penstock) .* loss (\S+) -> (\S+)$", printed, re.MULTILINE)
    assert [name for name, *_ in losses] == ["fsdp2", "penstock"]
    for of_fsdp2, of_penstock in zip(losses[0][1:], losses[1][1:], strict=True):
        assert abs(float(of_fsdp2) - float(of_penstock)) < 0.02  # bfloat16


def expect_accounts(printed):
    accounts = re.findall(r"^(\w+) +MiB: (.*)$", printed, re.MULTILINE)
    for of_fsdp2, of_penstock in zip(
        *(parts.split(", ")[:3] for _, parts in accounts), strict=True
    ):
        assert of_fsdp2 == of_penstock and not of_fsdp2.endswith(" 0.0")
    assert "staging" in accounts[1][1]


def expect_a_choice(printed):
    counts = r"kept_blocks=(\d), selective_blocks=(\d), recomputed_blocks=(\d)"
    kept, selective, recomputed = map(int, re.search(counts, printed).groups())
    # One block fits beside each plan that times may make best, and a lean one leaves room for all.
    assert kept + selective >= 1 and kept + selective + recomputed == 3, printed


def test_all_implementations_train_the_same_model(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    names = ("compiled", "hosted", "checkpointed", "of_transformers")
    forked("bench_job", *((2, name) for name in (*names, "by_trainer")), folder=tmp_path)
    printed = {name: (tmp_path / name).read_text() for name in names}
    for one in printed.values():
        expect_equal_losses(one)
    expect_accounts(printed["compiled"])
    expect_a_choice(printed["checkpointed"])
    assert re.search(r"^penstock .* ms .* loss 4\.", (tmp_path / "by_trainer").read_text(), re.M)
    assert (tmp_path / "0.json").exists() and (tmp_path / "1.json").exists()


def account_of_updates_in_backward():
    with patch.object(sys, "path", [str(STEP.parent), *sys.path]):
        from model import TINY, build
        from step import account
        from ways import Implementation
    model = build(TINY, 0, torch.device("cpu"), torch.float32)
    penstock.shard(model)
    given = Namespace(no_optimizer=False, micro_batches=1, offload=None, optimizer="in-backward")
    way = Implementation("penstock", model, given)
    parts = account(way, torch.randint(model.vocabulary, (1, 16)))
    has_account = parts["gradients"] > 0 and parts["optimizer"] > 0
    goes_on = len(way.optimizer.owned()) == len(list(model.parameters()))
    penstock.close(model)
    return has_account and goes_on


def test_an_account_of_gradients_does_not_end_updates_in_backwards(worlds):
    assert worlds(2).run(account_of_updates_in_backward) == [True, True]


def test_idle_time_is_what_no_work_of_the_device_or_no_compute_covers(monkeypatch):
    monkeypatch.syspath_prepend(STEP.parent)
    from figures import Idle, idle_in

    def work(name, begin, duration, category="kernel"):
        return {"cat": category, "name": name, "ts": begin, "dur": duration}

    events = [
        work("nvjet_tst_128x256", 0.0, 3000.0),
        work("triton_poi_fused_add", 1000.0, 1000.0),  # within the one before
        work("pst_sum<float>", 7000.0, 1000.0),
        work("Memcpy PtoP", 2000.0, 2000.0, "gpu_memcpy"),  # half of it beside the first kernel
        work("void cutlass::Kernel", 5000.0, 1000.0),
        work("cudaLaunchKernel", 4000.0, 9000.0, "cuda_runtime"),
    ]
    assert idle_in(events) == Idle(device=0.25, compute=0.5, span_ms=8.0)


def test_work_is_told_by_its_kind_and_by_what_ran_beside_it(monkeypatch):
    monkeypatch.syspath_prepend(STEP.parent)
    from figures import work_in

    def work(name, begin, duration, category="kernel"):
        return {"cat": category, "name": name, "ts": begin, "dur": duration}

    events = [
        work("nvjet_tst_128x256", 0.0, 3000.0),
        work("void cutlass::Kernel<int>(Params)", 3000.0, 1000.0),
        work("void pst_sum<float>(void*)", 2500.0, 2000.0),
        work("cudaLaunchKernel", 0.0, 9000.0, "cuda_runtime"),
    ]
    assert work_in(events) == {"products": (4.0, 2.5), "pst_sum": (2.0, 0.5)}
