"""What torch.compile leaves alone."""

from __future__ import annotations

from typing import Any

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)


def not_compiled(function: Any) -> Any:
    """Keep a function, and all that it calls, from being compiled; graphs break where it is called.

    So does `torch.compiler.disable`, but its wrapper would run with every call.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True
    return function
