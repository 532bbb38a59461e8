"""penstock.torchtitan: torchtitan's trainer trains its model as with FSDP2."""

import importlib.util

import pytest
from launch import forked

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="wants torchtitan 0.2"
)


def test_what_fsdp2_trains_is_trained_alike_and_gone_on_with_by_other_ranks(tmp_path):
    printed = forked(
        "torchtitan_job", (2, "train"), (4, "resume"), (2, "run_example"), folder=tmp_path
    )
    assert "step:  2" in printed and "Training completed" in printed
