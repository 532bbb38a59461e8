"""penstock.lightning: a LightningModule is fitted as with DDP."""

import importlib.util
from pathlib import Path

import pytest
from torchrun import torchrun

JOB = Path(__file__).with_name("lightning_job.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="wants lightning"
)


def test_what_ddp_fits_is_fitted_alike_and_gone_on_with_by_other_ranks(tmp_path):
    torchrun(2, JOB, "fit", str(tmp_path))
    torchrun(3, JOB, "resume", str(tmp_path))
