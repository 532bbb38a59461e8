"""DeepSpeed's own tests of DeepCompile against an unsharded run, and for stage 2 as well."""

import oracle
import pytest
import runtime  # noqa: F401
import torch
from unit.v1.compile import test_compile_zero as upstream

upstream.compare_loss = oracle.compare_with_unsharded


class TestDeepCompile(upstream.TestDeepCompile):
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_stage_2(self, dtype):
        upstream.TestDeepCompile.test(self, 2, dtype, True)

    @pytest.mark.parametrize("dtype", [torch.float32])
    def test_stage_2_frees_activations(self, dtype):
        upstream.TestDeepCompile.test_free_activation_mode(self, 2, dtype)
