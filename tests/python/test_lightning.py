"""penstock.lightning: a LightningModule is fitted as with DDP."""

import importlib.util

import pytest
from launch import forked

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="wants lightning"
)


def test_what_ddp_fits_is_fitted_alike_and_gone_on_with_by_other_ranks(tmp_path):
    forked("lightning_job", (2, "fit"), (3, "resume"), folder=tmp_path)
