"""The benchmark of a training step, bench/train/step.py, with a tiny model."""

import os
import re
import subprocess
import sys
from pathlib import Path

STEP = Path(__file__).resolve().parents[2] / "bench" / "train" / "step.py"
FEW = ["--tiny", "--sequence", "16", "--warm", "2", "--steps", "2", "--alternations", "2"]


def test_all_implementations_train_the_same_model(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ways = ["--ways", "fsdp2", "penstock", "--trace", str(tmp_path / "{rank}.json"), "--time-waits"]
    ended = subprocess.run(
        [sys.executable, *torchrun, str(STEP), *FEW, *ways],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = re.findall(r"^(fsdp2|penstock) .* loss (\S+) -> (\S+)$", ended.stdout, re.MULTILINE)
    assert [name for name, *_ in losses] == ["fsdp2", "penstock"]
    for of_fsdp2, of_penstock in zip(losses[0][1:], losses[1][1:], strict=True):
        assert abs(float(of_fsdp2) - float(of_penstock)) < 0.02  # bfloat16
    accounts = re.findall(r"^(\w+) +MiB: (.*)$", ended.stdout, re.MULTILINE)
    for of_fsdp2, of_penstock in zip(
        *(parts.split(", ")[:3] for _, parts in accounts), strict=True
    ):
        assert of_fsdp2 == of_penstock and not of_fsdp2.endswith(" 0.0")
    assert "staging" in accounts[1][1]
    assert (tmp_path / "0.json").exists() and (tmp_path / "1.json").exists()
