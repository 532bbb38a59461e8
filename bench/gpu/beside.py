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
    GEMM,
    GEMMS,
    GIB,
    MIB,
    Bench,
    Ours,
    Say,
    join_ranks,
    median_of,
    named,
    spawn_ranks,
)

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

    def __init__(self, bench: Bench, ours: Ours, kind: str, size: int, count: int) -> None:
        self.bench, self.ours, self.size, self.count = bench, ours, size, count
        self.operation: Callable[[int], None] = getattr(ours, kind)

    def enqueue(self) -> None:
        """Enqueue them, and the end."""
        self.bench.start.record()
        for _ in range(self.count):
            self.operation(self.size)
        self.ours.join()
        self.bench.end.record()

    def seconds(self) -> float:
        """Return seconds an operation, of those that were enqueued last and are over."""
        return self.bench.start.elapsed_time(self.bench.end) / 1e3 / self.count


def measure(bench: Bench, products: Products, ours: Ours, kind: str, size: int) -> str:
    """Return a line: alone, beside the products, their slow-down, and their loss a GiB."""
    alone = max(bench.longest([bench.seconds(ours, kind, size, 3)]))
    plain = max(bench.longest([products.seconds(lambda: None)]))
    series = Series(bench, ours, kind, size, math.ceil(1.6 * plain / alone))
    ratios, paces, losses = [], [], []
    for _ in range(bench.alternations):
        before = products.seconds(lambda: None)
        during = products.seconds(series.enqueue)
        ours.check()
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


def run_settings(bench: Bench, ours: Ours, options: argparse.Namespace, say: Say) -> None:
    """Measure one communicator: gathers, and the parts of reductions that were asked for."""
    is_plain = ours.name in ("ce", "nccl")
    rows = [("reduce", part) for part in (options.parts if ours.name == "ce" else ["all"])]
    if is_plain:
        rows.insert(0, ("gather", "all"))
    for priority in options.priorities:
        products = Products(bench, priority)
        for size in options.sizes:
            for kind, part in rows:
                ours.choose(PARTS[part])
                line = measure(bench, products, ours, kind, size)
                say(f"{ours.name:<20}{kind:<8}{part:<9}{priority:>3}{named(size):>9}{line}")
        ours.choose(ALL)


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
        ours = Ours(library, name, largest, gradients, bench)
        run_settings(bench, ours, options, say)
        bench.meet()
        ours.close()
        del ours
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    """Start a process a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--library", required=True, help="libbench_gpu_collectives.so")
    parser.add_argument("--ranks", type=int, default=0, help="default: a rank for each GPU")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256 * MIB, GIB], help="bytes")
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument(
        "--comms", nargs="+", default=["nccl", "ce", "ce-pass"], help="see collectives.h"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--priorities", type=int, nargs="+", default=[0, -1], help="of the products' stream"
    )
    spawn_ranks(run_rank, parser.parse_args())


if __name__ == "__main__":
    main()
