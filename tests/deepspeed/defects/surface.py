"""The runtime's operators and functions, driven by hand: DeepSpeed's own or Penstock's."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist

CONFIGURATION = {
    "double_buffer": True,
    "symmetric_memory": False,
    "free_activation_threshold": 0,
    "sync_before_reduce": False,
    "sync_after_reduce": False,
    "sync_before_allgather": False,
    "sync_after_allgather": False,
    "offload_activation_pin_memory": True,
}
BUCKET = 1 << 20  # elements


def load(module: str):
    """Return the native module and leave its operators in ``torch.ops.dc``."""
    if module == "deepspeed":
        from deepspeed.ops.op_builder import DeepCompileBuilder

        return DeepCompileBuilder().load()
    import penstock._dc

    return penstock._dc


class Surface:
    """A rank with parameters registered for stage 3."""

    def __init__(self, module: str) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else "cpu"
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dc = load(module)
        self.operators = torch.ops.dc
        self.shards: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.reduced: list[torch.Tensor] = []

    def open(self) -> None:
        """Begin an engine."""
        self.dc.init(dist.group.WORLD, SimpleNamespace(**CONFIGURATION), BUCKET)

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a flat, zero-padded tensor."""
        chunk = math.ceil(whole.numel() / self.ranks)
        padded = torch.zeros(chunk * self.ranks, dtype=whole.dtype, device=whole.device)
        padded[: whole.numel()] = whole.flatten()
        return padded[self.rank * chunk : (self.rank + 1) * chunk].clone()

    def register(self, number: int, whole: torch.Tensor, persistent: bool = False) -> None:
        """Make a tensor, equal on all ranks, a parameter of stage 3."""
        shard = self.shard(whole)
        self.shards[number] = shard
        self.gradients[number] = torch.zeros_like(shard, device=self.device)
        self.dc.register_z3_param(
            number, list(whole.shape), shard, self.gradients[number], persistent, None
        )

    def gather(self, graph: int, number: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the whole parameter."""
        whole = self.operators.allgather_param.default(
            self.shards[number], graph, number, dtype=dtype
        )
        return self.operators.wait_allgather.default(whole, graph, number)

    def release(self, whole: torch.Tensor, graph: int, number: int) -> None:
        """End the only use of a gathered parameter."""
        self.operators.release_param.default(whole, graph, number, 1)

    def reduce(self, gradient: torch.Tensor, graph: int, number: int) -> None:
        """Hand in this rank's gradient of a parameter."""
        self.reduced.append(self.operators.reduce_grad.default(gradient, graph, number))

    def end_backward(self, graph: int, release: bool = False) -> None:
        """End a graph's backward."""
        self.operators.end_backward.default(self.reduced, graph, release)
        self.reduced = []

    def backward(self, graph: int, gradients: dict[int, torch.Tensor]) -> None:
        """Run a backward of one graph, at an update's boundary."""
        self.dc.start_backward(True)
        for number, gradient in gradients.items():
            self.reduce(gradient, graph, number)
        self.end_backward(graph)

    def join(self) -> None:
        """Wait for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
