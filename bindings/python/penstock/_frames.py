"""Calls on this thread: whether a module's forward, or what runs as one, still runs."""

from __future__ import annotations

import sys
from types import FrameType

_CALLS = ("_call_impl", "run_as_forward")  # torch's, and that of `_methods`


def module_call() -> FrameType | None:
    """Find the innermost call of a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _CALLS:
        frame = frame.f_back
    return frame


def has_ended(call: FrameType | None) -> bool:
    """Tell whether a call is over: torch runs no hooks behind one that was interrupted."""
    if call is None:
        return False
    try:
        call.clear()  # refused while it runs, on any thread
    except RuntimeError:
        return False
    return True
