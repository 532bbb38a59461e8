"""penstock.accelerate: Hugging Face's Trainer and Accelerate train as with DDP and with FSDP2."""

import importlib.util
from pathlib import Path

import pytest
from torchrun import torchrun

NEEDED = ("accelerate", "peft", "transformers")
JOB = Path(__file__).with_name("accelerate_job.py")

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason=f"wants {', '.join(NEEDED)}"
)


def test_what_trains_with_ddp_trains_alike_and_goes_on_with_other_ranks(tmp_path):
    torchrun(2, JOB, "train", str(tmp_path))
    torchrun(3, JOB, "resume", str(tmp_path))
