"""What collectives cost the matrix products beside them, part by part and setting by setting.

Reductions are those of collectives.py. Each is split: the copies into the bucket alone, the pulls
alone, the sums alone, and all of it, also with sums that pass through the GPU's cache, beside
products on a stream of so high a priority. A slower reduction takes less from
the products beside it, so a line also has the reduction's own pace there, and what it costs: the
products' loss for each GiB that is reduced.

All counts are computed from times that the ranks have exchanged, so they are the same on all.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from collectives import (
    GIB,
    MIB,
    Bench,
    Implementation,
    Ours,
    Say,
    ThroughTorch,
    join_ranks,
    median_of,
    named,
    spawn_ranks,
)

GEMM = 8192
GEMMS = 10

# As collectives.h numbers them.
COPY_IN, PULL, SUM, ALL = 1, 2, 4, 7
PARTS = {"copy-in": COPY_IN, "pull": PULL, "sum": SUM, "all": ALL}


class Products:
    """Matrix products, one after the other, on a stream of some priority."""

    def __init__(self, bench: Bench, priority: int) -> None:
        self.bench = bench
        self.stream = torch.cuda.Stream(priority=priority)
        self.a, self.b = (
            torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.c = torch.empty_like(self.a)
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def seconds(self, beside: Callable[[], None]) -> float:
        """Seconds of them all, with ``beside`` enqueued first on the bench's stream."""
        self.bench.meet()
        with torch.cuda.stream(self.bench.stream):
            beside()
        with torch.cuda.stream(self.stream):
            self.start.record()
            for _ in range(GEMMS):
                torch.mm(self.a, self.b, out=self.c)
            self.end.record()
        torch.cuda.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


class Series:
    """So many operations of one kind and size, timed as a whole."""

    def __init__(
        self, bench: Bench, comm: Implementation, kind: str, size: int, count: int
    ) -> None:
        self.bench, self.comm, self.size, self.count = bench, comm, size, count
        self.operation: Callable[[int], None] = getattr(comm, kind)

    def enqueue(self) -> None:
        """Enqueue them, and the end."""
        self.bench.start.record()
        for _ in range(self.count):
            self.operation(self.size)
        self.comm.join()
        self.bench.end.record()

    def seconds(self) -> float:
        """Return seconds an operation, of those that were enqueued last and are over."""
        return self.bench.start.elapsed_time(self.bench.end) / 1e3 / self.count


def measure(bench: Bench, products: Products, comm: Implementation, kind: str, size: int) -> str:
    """Return a line: alone, beside the products, their slow-down, and their loss a GiB."""
    alone = max(bench.longest([bench.seconds(comm, kind, size, 3)]))
    plain = max(bench.longest([products.seconds(lambda: None)]))
    series = Series(bench, comm, kind, size, math.ceil(1.6 * plain / alone))
    ratios, paces, losses = [], [], []
    for _ in range(bench.alternations):
        before = products.seconds(lambda: None)
        during = products.seconds(series.enqueue)
        comm.check()
        ratios.append(during / before)
        paces.append(series.seconds())
        losses.append((during - before) / during * paces[-1] / (size / GIB))
    ratio, low, high = median_of(bench.longest(ratios))
    pace = statistics.median(bench.longest(paces))
    loss = statistics.median(bench.longest(losses))
    return (
        f"{alone * 1e6:10.1f}{pace * 1e6:10.1f}   {ratio:.3f} ({low:.3f}-{high:.3f})"
        f"{loss * 1e3:10.3f}"
    )


def run_settings(bench: Bench, comm: Implementation, options: argparse.Namespace, say: Say) -> None:
    """Measure one communicator: gathers, and the parts of reductions that were asked for."""
    is_plain = comm.name in ("torch", "nccl", "ce")
    rows = [("reduce", part) for part in (options.parts if comm.name == "ce" else ["all"])]
    if is_plain:
        rows.insert(0, ("gather", "all"))
    for priority in options.priorities:
        products = Products(bench, priority)
        for size in options.sizes:
            for kind, part in rows:
                comm.choose(PARTS[part])
                line = measure(bench, products, comm, kind, size)
                say(f"{comm.name:<20}{kind:<8}{part:<9}{priority:>3}{named(size):>9}{line}")
        comm.choose(ALL)


def run_rank(rank: int, ranks: int, options: argparse.Namespace) -> None:
    """Measure as one rank; all do the same."""
    bench, say = join_ranks(rank, ranks, options.alternations)
    largest = max(options.sizes)
    gradients = torch.randn(largest // 2, device="cuda").bfloat16()
    library = ctypes.CDLL(options.library)
    say(
        f"beside {GEMMS} GEMMs of {GEMM}^3 bf16, median (95 % interval) of "
        f"{options.alternations}; us: an operation"
    )
    say(
        f"{'communicator':<20}{'what':<8}{'part':<9}pri{'size':>9}{'alone us':>10}{'beside us':>10}"
        f"   GEMMs x (from-to)    ms lost a GiB"
    )
    for name in options.comms:
        comm: Implementation = (
            ThroughTorch(largest, gradients)
            if name == "torch"
            else Ours(library, name, largest, gradients, bench)
        )
        run_settings(bench, comm, options, say)
        bench.meet()
        comm.close()
        del comm
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    """Start a process a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--library", required=True, help="libbench_gpu_collectives.so")
    parser.add_argument("--ranks", type=int, default=0, help="default: a rank for each GPU")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[64 * MIB, 256 * MIB, GIB], help="bytes"
    )
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument(
        "--comms",
        nargs="+",
        default=["torch", "nccl", "ce", "ce-pass"],
        help="torch: NCCL as torch drives it; see collectives.h",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--priorities", type=int, nargs="+", default=[0, -1], help="of the products' stream"
    )
    spawn_ranks(run_rank, parser.parse_args())


if __name__ == "__main__":
    main()
