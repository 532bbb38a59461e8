"""The place of a process among the ranks, and small exchanges between them."""

import os
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


class Ranks:
    """The ranks that torchrun started; one rank and no process group without torchrun.

    Each has a GPU of its own where there are enough for the ranks of this machine, unless
    `device` is "cpu".
    """

    def __init__(self, device: str = "auto") -> None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if device != "cpu" and here <= torch.cuda.device_count():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
            # Compute before what goes on beside it: sums and copies of gradients.
            torch.cuda.set_stream(torch.cuda.Stream(self.device, priority=-1))
        elif device == "cuda":
            raise SystemExit(
                f"train_gpt.py: {here} ranks want a GPU each, and {torch.cuda.device_count()} are "
                "there: start fewer ranks or leave --device out"
            )
        else:
            self.device = torch.device("cpu")
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.connected = "RANK" in os.environ

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and compares."""
        return self.rank == 0

    def __enter__(self) -> "Ranks":
        if self.connected:
            dist.init_process_group("gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.connected:
            dist.destroy_process_group()

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in rank order, on every rank."""
        if not self.connected:
            return [value]
        values: list[Value | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def share(self, value: Value | None) -> Value:
        """Rank 0's value, on every rank; the others wait for it."""
        values = [value]
        if self.connected:
            dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]
