"""A rank of a job that has a fault, which bench/faults.py starts, and the faults.

The ranks train a small transformer; the last one is late, stops, is killed, fails, goes another way
or does not come in one step, or the link between all is full.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import penstock
import torch
import torch.distributed as dist
from torch import nn

LAYERS, VOCABULARY, TOKENS = 3, 128, (1, 16)
WIDTHS = {"cpu": 64, "cuda": 4096}  # between GPUs gathers take longer than the host does
FIRST_TRACED, FAULT_STEP, STEPS = 4, 10, 16  # passes are replayed by then, and steps captured
LATE = 0.05  # seconds
LINK_BYTES = 10_000_000  # a second and connection, when the link is full
SUM_BYTES, SUMS = 1 << 30, 100  # when the link of a GPU is full
UNLIMITED = 2**64 - 1
SO_MAX_PACING_RATE = 47


# ---- what a rank does ---------------------------------------------------------------------------


class Model(nn.Module):
    """A transformer whose layers run in an order that can be changed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        sizes = (width, 4, 4 * width, 0.0)
        layers = (nn.TransformerEncoderLayer(*sizes, batch_first=True) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, VOCABULARY)
        self.order = [*range(LAYERS)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for number in self.order:
            x = self.layers[number](x)
        return self.head(x)


class Rank:
    """A process of a job, which trains until it fails or is through."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.fault, self.device = FAULTS[given.fault], torch.device(given.device)
        self.folder = given.folder
        self.has_fault = given.rank == given.size - 1 or self.fault.is_of_link
        torch.set_num_threads(1)
        is_on_gpu = self.device.type == "cuda"
        if is_on_gpu:
            torch.cuda.set_device(given.rank)
        backend = "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo"
        store = dist.FileStore(f"{self.folder}/store", given.size)
        dist.init_process_group(backend, store=store, rank=given.rank, world_size=given.size)
        self.aside = dist.new_group()
        dist.all_reduce(torch.ones(1, device=self.device), group=self.aside)
        torch.manual_seed(0)
        with self.device:
            model = Model(WIDTHS[given.device])
        self.model = penstock.shard(model, timeout=given.timeout)
        self.optimizer = penstock.AdamW(self.model)

    def train(self) -> None:
        """Train some steps, with the fault in one of them."""
        step = self.step
        if self.fault.is_captured:
            step = penstock.step(self.model, self.optimizer)(step)
        with self.traced():
            for number in range(STEPS):
                tokens = torch.randint(VOCABULARY, TOKENS).to(self.device)
                is_due = self.has_fault and number == FAULT_STEP
                disarm = self.fault.arm(self) if is_due else None
                step(tokens).item()  # a GPU is waited for
                if disarm is not None:
                    disarm()

    def traced(self) -> contextlib.AbstractContextManager[object]:
        """Record the training where all ranks go on."""
        if not self.fault.is_survived:
            return contextlib.nullcontext()
        steps = range(FIRST_TRACED, STEPS)
        return penstock.trace(self.model, f"{self.folder}/rank{{rank}}.json", steps=steps)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Train a step; return its loss."""
        logits = self.model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def run_rank(given: argparse.Namespace) -> None:
    """Be a rank; what it says has the time before it."""
    logging.basicConfig(format="%(created).3f %(message)s")
    rank = Rank(given)
    try:
        rank.train()
    except BaseException as error:
        logging.error("ends: %s: %s", type(error).__name__, error)
        raise
    penstock.close(rank.model)


# ---- faults -------------------------------------------------------------------------------------

Act = Callable[[], object]
Arm = Callable[[Rank], Act | None]


def noted(act: Act) -> Callable[..., None]:
    """Return what says when it happens."""

    def call(*_: object) -> None:
        logging.error("fault")
        act()

    return call


def in_forward(act: Act, layer: int = 1) -> Arm:
    """Act when a layer begins."""
    return lambda rank: rank.model.layers[layer].register_forward_pre_hook(noted(act)).remove


def in_backward(act: Act) -> Arm:
    """Act when the backward comes to the second layer."""

    def watch(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(noted(act))

    return lambda rank: rank.model.layers[1].register_forward_hook(watch).remove


def in_update(act: Act) -> Arm:
    """Act when the optimizer begins."""
    return lambda rank: rank.optimizer.register_step_pre_hook(noted(act)).remove


def before_step(act: Act) -> Arm:
    """Act at once."""
    return lambda _: noted(act)()


def send(number: signal.Signals) -> Act:
    """Return what sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def fail() -> None:
    """Raise what the other ranks know nothing of."""
    raise ValueError("boom")


def take_another_branch(rank: Rank) -> None:
    """Run the layers in another order."""
    noted(rank.model.order.reverse)()


def fill_link(rank: Rank) -> Act:
    """Have others use the link: NCCL beside on GPUs, a limit to what TCP sends on CPUs."""
    noted(lambda: None)()
    if rank.device.type == "cuda":
        return sum_beside(rank)
    pace(LINK_BYTES)
    return lambda: pace(UNLIMITED)


def sum_beside(rank: Rank) -> Act:
    """Have NCCL sum while the step runs, on all ranks; return what waits for the end."""
    tensor = torch.zeros(SUM_BYTES, dtype=torch.uint8, device=rank.device)
    torch.cuda.synchronize()
    for _ in range(SUMS):
        dist.all_reduce(tensor, group=rank.aside, async_op=True)
    return torch.cuda.synchronize


def pace(bytes_a_second: int) -> None:
    """Limit what each TCP connection of this process sends."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                rate = bytes_a_second.to_bytes(8, sys.byteorder)
                one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes
    ----------
    title : str
        What the table calls it.
    arm : callable
        Prepares it on a rank for the step that follows; returns what is to be done behind that.
    is_survived : bool
        Whether all ranks go on.
    is_of_link : bool
        Whether the culprit is no rank, but the link between all.
    is_captured : bool
        Whether steps are CUDA graphs.
    """

    title: str
    arm: Arm
    is_survived: bool = False
    is_of_link: bool = False
    is_captured: bool = False


STOP, KILL = send(signal.SIGSTOP), send(signal.SIGKILL)
FAULTS = {
    "late": Fault("50 ms late", in_forward(lambda: time.sleep(LATE)), is_survived=True),
    "stop": Fault("SIGSTOP in forward", in_forward(STOP)),
    "kill-forward": Fault("SIGKILL in forward", in_forward(KILL)),
    "kill-backward": Fault("SIGKILL in backward", in_backward(KILL)),
    "kill-update": Fault("SIGKILL in update", in_update(KILL)),
    "branch": Fault("another branch", take_another_branch),
    "exception": Fault("an exception", in_forward(fail)),
    "gate": Fault("a gate never opened", in_forward(lambda: time.sleep(3600), 0)),
    "link": Fault("a full link", fill_link, is_survived=True, is_of_link=True),
    "captured-kill": Fault("SIGKILL, captured", before_step(KILL), is_captured=True),
    "captured-stop": Fault("SIGSTOP, captured", before_step(STOP), is_captured=True),
}


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    for name in ("--rank", "--size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds of penstock.shard")
    parser.add_argument("--folder", required=True, help="of the job: a store, traces")
    run_rank(parser.parse_args())


if __name__ == "__main__":
    main()
