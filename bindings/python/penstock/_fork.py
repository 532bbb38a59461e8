"""What a child of fork has of its parent and cannot use: process groups."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from typing import Any

groups_of_parent: weakref.WeakSet[Any] = weakref.WeakSet()
groups_of_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def _note_groups() -> None:
    torchs = sys.modules.get("torch.distributed.distributed_c10d")
    if torchs is not None:
        groups_of_parent.update(torchs._world.pg_map)
    # The end of a group waits for its threads, which a child does not have: none ends there.
    for group in groups_of_engines:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_note_groups)
