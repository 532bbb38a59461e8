"""Jobs of several ranks that run beside each other on the GPUs of one machine."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine that may be used."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [one for one in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if one]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [str(number) for number in range(len(listed.stdout.splitlines()))]


def share_processors(processes: int, cache: Path) -> None:
    """Let so many processes together compile on as many threads as there are processors."""
    threads = (os.cpu_count() or 1) // processes
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(threads, 1)))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


class Job:
    """The ranks of one job; started here and not by a launcher, whose end would leave them be."""

    def __init__(
        self, ranks: int, command: Sequence[str], log: Path, more: Mapping[str, str] | None = None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **(more or {}),
        }
        self.log = log
        log.write_text("")
        with log.open("a") as file:  # no rank writes over what another one has written
            self.processes = [
                subprocess.Popen(
                    command,
                    env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(ranks)
            ]

    def runs(self) -> bool:
        """Return whether all its ranks are there."""
        return bool(self.processes) and all(one.poll() is None for one in self.processes)

    def is_over(self) -> bool:
        """Return whether all its ranks have ended, or one of them has failed."""
        codes = [one.poll() for one in self.processes]
        return any(codes) or None not in codes

    def end(self) -> None:
        """End its ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes = []
