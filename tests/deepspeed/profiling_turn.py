"""One job at a time profiles on the GPUs, where several compile at once.

DeepCompile's profilers wait for small collectives at every node of a graph. A GPU that several
processes use gives each of these a time slice of milliseconds, and thousands of them take minutes
instead of seconds. The rest of compiling needs processors alone, so that jobs can do it together.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ProfilingTurn:
    """The right to profile, as a lock on a file that all jobs name; rank 0 takes it for its job."""

    def __init__(self, lock: str | Path) -> None:
        self.lock = Path(lock)
        self.turns = 0
        self.waited_s = 0.0
        self.held_s = 0.0

    def install(self) -> None:
        """Let DeepCompile's profilers take turns; call it before anything is compiled."""
        from deepspeed.compile.profilers import comm_profile, graph_profile

        for kind in (graph_profile.ProfilingInterpreter, graph_profile.MemoryProfilingInterpreter):
            kind.run = self.around(kind.run)
        comm_profile.run_all_gather = self.around(comm_profile.run_all_gather)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that has the turn while it runs; all ranks call it alike."""

        def run_in_turn(*args: Any, **kwargs: Any) -> Any:
            asked = time.monotonic()
            with self.lock.open("w") as file:
                self._take(file)
                begun = time.monotonic()
                result = function(*args, **kwargs)
            self.waited_s += begun - asked
            self.held_s += time.monotonic() - begun
            return result

        return run_in_turn

    def _take(self, file: Any) -> None:
        import torch.distributed as dist

        # By the store: a rank that waited in a collective would keep its GPU busy.
        store = dist.distributed_c10d._get_default_store()
        self.turns += 1
        key = f"profiling-turn-{self.turns}"
        if dist.get_rank() == 0:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or the process dies
            store.set(key, "taken")
        else:
            store.wait([key])
