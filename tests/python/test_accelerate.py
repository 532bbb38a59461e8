"""penstock.accelerate: Hugging Face's Trainer and Accelerate train as with DDP and with FSDP2."""

import importlib.util

import pytest
from launch import forked

NEEDED = ("accelerate", "peft", "transformers")

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason=f"wants {', '.join(NEEDED)}"
)


def test_what_trains_with_ddp_trains_alike_and_goes_on_with_other_ranks(tmp_path):
    forked("accelerate_job", (2, "train"), (3, "resume"), folder=tmp_path)
