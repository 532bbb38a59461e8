"""ZeRO-2's reduction on DeepCompile's operators, beside bare collectives of NCCL through torch.

torchrun --nproc_per_node N bench/deepcompile/partitions.py [--layers N] [--bucket-mib N]

One process a GPU. The gradients of layers of an 8B model, in bf16, are reported last one first and
reduced into flat partitions of bf16. Beside that: all gradients in pieces of a bucket's size by
all-reduce, by reductions to one rank after another, and by reduce-scatter. Then matrix products
between the reports, with and without them: what the reduction takes from compute.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from penstock import _operators, dc

HIDDEN, INNER = 4096, 12288
LAYER = [HIDDEN * HIDDEN] * 2 + [HIDDEN * 1024] * 2 + [INNER * HIDDEN] * 3 + [HIDDEN] * 2
MIB = 1 << 20
FP32_BYTES = 4  # DeepSpeed's bucket size counts elements, for which there is room in any dtype
ROUNDS = 9


def median_ms(run: Callable[[], None]) -> float:
    """Time on this rank's device, the ranks starting together; the longest of all ranks."""
    times = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    longest = torch.tensor(statistics.median(times[2:]), device="cuda")
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


class Reduction:
    """The operators over a flat partition."""

    def __init__(self, gradients: list[torch.Tensor], symmetric: bool, bucket_bytes: int) -> None:
        self.gradients = gradients
        dc.init(dist.group.WORLD, {"symmetric_memory": symmetric}, bucket_bytes // FP32_BYTES)
        rank = dist.get_rank()
        part = math.ceil(sum(g.numel() for g in gradients) / dist.get_world_size())
        self.flat = torch.empty(part, dtype=torch.bfloat16, device="cuda")
        begin = 0
        for number, gradient in enumerate(gradients):
            end = begin + gradient.numel()
            low, high = max(begin, rank * part), min(end, (rank + 1) * part)
            own = self.flat[low - rank * part : high - rank * part] if high > low else self.flat[:0]
            offset = low - begin if high > low else 0
            dc.register_param(number, list(gradient.shape), gradient, own, offset)
            begin = end
        dc.register_graph_z2(1, list(range(len(gradients))))
        self.communicator = _operators.load().communicator()

    def run(self, between: Callable[[], None] | None = None) -> None:
        """One backward."""
        dc.start_backward(True)
        for number in reversed(range(len(self.gradients))):
            if between and self.gradients[number].numel() > MIB:
                between()
            torch.ops.dc.reduce_grad(self.gradients[number], 1, number)
        torch.ops.dc.end_backward([None], 1, True)


def bare(total: int, bucket_bytes: int) -> dict[str, Callable[[], None]]:
    """All gradients in pieces, by each kind of collective."""
    world = dist.get_world_size()
    piece = torch.empty(bucket_bytes // 2, dtype=torch.bfloat16, device="cuda")
    chunk = torch.empty(piece.numel() // world, dtype=torch.bfloat16, device="cuda")
    pieces = range(math.ceil(total / piece.numel()))
    return {
        "all_reduce": lambda: [dist.all_reduce(piece) for _ in pieces] and None,
        "reduce": lambda: [dist.reduce(piece, dst=i % world) for i in pieces] and None,
        "reduce_scatter": lambda: (
            [dist.reduce_scatter_tensor(chunk, piece) for _ in pieces] and None
        ),
    }


def main() -> None:
    """Run all of it; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=256, help="256, as the runtime, or less")
    given = parser.parse_args()
    layers, bucket_bytes = given.layers, given.bucket_mib * MIB
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    gradients = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in LAYER * layers]
    total = sum(g.numel() for g in gradients)
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(3):
            torch.mm(square, square)

    def row(name: str, ms: float) -> None:
        say(f"{name:28} {ms:7.2f} ms {total * 2 / 1e6 / ms:5.0f} GB/s")

    name = torch.cuda.get_device_name()
    say(
        f"{dist.get_world_size()} x {name}, {total * 2 / 1e9:.2f} GB of gradients, torch "
        f"{torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    )
    for kind, run in bare(total, bucket_bytes).items():
        row(f"bare {kind}", median_ms(run))
    large = sum(g.numel() > MIB for g in gradients)
    alone = median_ms(lambda: [products() for _ in range(large)] and None)
    say(f"{'products alone':28} {alone:7.2f} ms")
    for symmetric in (False, True):
        reduction = Reduction(gradients, symmetric, bucket_bytes)
        row(f"operators over {reduction.communicator}", median_ms(reduction.run))
        beside = median_ms(partial(reduction.run, products))
        say(f"{'  beside products':28} {beside:7.2f} ms, {beside - alone:.2f} more than alone")
        dc.cleanup()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
