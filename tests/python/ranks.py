"""Worlds of rank processes that live through a test session and run one function after another."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_ON_GPU = os.environ.get("PENSTOCK_TEST_DEVICE") == "cuda"
# Ranks are forked from a server that has imported torch, which takes seconds, and that has started
# neither threads nor CUDA, which no fork would survive: what the compiler imports starts CUDA.
_start = multiprocessing.get_context("forkserver")
_start.set_forkserver_preload(
    ["torch.distributed.tensor", *([] if _ON_GPU else ["torch._inductor.pattern_matcher"])]
)


class RankError(AssertionError):
    """A function raised on some rank; the text holds the ranks' tracebacks."""


class World:
    """`size` processes joined by gloo, and by NCCL where each trains on its GPU.

    Functions are sent by name: define them in a module.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-ranks-")
        pipes = [_start.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            _start.Process(target=_serve, args=(rank, size, self.folder.name, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, function: Any, *args: Any, answer_within: float = 90, **kwargs: Any) -> list[Any]:
        """Run `function` on all ranks; returns the results in rank order."""
        answers = self.collect(function, *args, answer_within=answer_within, **kwargs)
        failures = [f"rank {r}: {text}" for r, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def collect(
        self, function: Any, *args: Any, answer_within: float = 90, **kwargs: Any
    ) -> list[Any]:
        """As `run`, but failures come back as (False, text); a rank that died says so."""
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + answer_within
        return [self._answer(rank, deadline) for rank in range(self.size)]

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        try:
            if self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            return False, f"died with exit code {self.processes[rank].exitcode}"
        return False, f"no answer in time; it is in\n{self._stack(rank)}"

    def _stack(self, rank: int) -> str:
        """Where the rank's threads are, as its handler of SIGUSR1 writes it."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        path = _stack_file(self.folder.name, rank)
        given_up = time.monotonic() + 15  # a call of a driver may keep it from the signal
        while os.path.getsize(path) == 0 and time.monotonic() < given_up:
            time.sleep(0.1)
        time.sleep(1)  # until all threads are there
        with open(path) as file:
            return file.read() or "nobody knows where: it does not answer SIGUSR1"

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(60)  # a GPU's memory goes back first
        kept = [process.pid for process in self.processes if process.is_alive()]
        self.processes = []
        self.folder.cleanup()
        if kept:
            raise RankError(f"processes {kept} are still there a minute after they were killed")


def _stack_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stack-{rank}")


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a rank that dies says where
    stack = os.open(_stack_file(folder, rank), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, stack)
    gc.freeze()  # what was imported is no garbage: no search for some has to look through it
    torch.set_num_threads(1)
    if _ON_GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if _ON_GPU else "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        pipe.send(_call(function, args, kwargs))


def _call(function: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    import torch

    torch.manual_seed(0)  # on all ranks, whatever ran before, and wherever that failed
    try:
        return True, function(*args, **kwargs)
    except BaseException:
        return False, traceback.format_exc()
