"""DeepSpeed's own tests of DeepCompile, on this runtime.

They are inherited, so that the processes which they start import this module, and with it the
runtime.
"""

import runtime  # noqa: F401
from unit.v1.compile import test_compile_zero as upstream


class TestZeRO(upstream.TestZeRO):
    pass


class TestDeepCompile(upstream.TestDeepCompile):
    pass
