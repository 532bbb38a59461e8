"""Collectives of the node's GPUs: NCCL through torch beside this library's communicators.

One process a GPU. All implementations take part in each alternation, in turn, so that they see the
same machine. A gather is chunks of all ranks into one array. A reduction is what a training step
has: bfloat16 gradients are copied into a bucket, scaled by 1/ranks; chunks are summed over ranks;
the own one is added to an fp32 target; and the next bucket is filled meanwhile, of two. A time is
the longest of all ranks'.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import datetime, timezone

import torch
import torch.distributed as dist

Operation = Callable[[int], None]  # enqueues one, of that many bytes over all ranks
Say = Callable[[str], None]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


# ---- implementations --------------------------------------------------------------------------


class ThroughTorch:
    """NCCL as torch drives it."""

    name = "torch"

    def __init__(self, largest: int, gradients: torch.Tensor) -> None:
        ranks = dist.get_world_size()
        elements = largest // 2
        self.gradients = gradients
        self.shards = torch.empty(2, elements // ranks, dtype=torch.bfloat16, device="cuda")
        self.shard = self.shards[0]
        self.buckets = torch.empty(2, elements, dtype=torch.bfloat16, device="cuda")
        self.whole = self.buckets[0]
        self.target = torch.zeros(elements // ranks, dtype=torch.float32, device="cuda")
        self.pending: list[tuple[dist.Work, torch.Tensor] | None] = [None, None]
        self.turn = 0

    def gather(self, size: int) -> None:
        """Enqueue a gather of ``size`` bytes over all ranks."""
        count = size // 2
        dist.all_gather_into_tensor(
            self.whole[:count], self.shard[: count // dist.get_world_size()]
        )

    def reduce(self, size: int) -> None:
        """Enqueue a reduction of ``size`` bytes of gradients a rank."""
        count, ranks = size // 2, dist.get_world_size()
        self.turn = 1 - self.turn
        self.add_pending(self.turn)
        bucket, chunk = self.buckets[self.turn, :count], self.shards[self.turn, : count // ranks]
        torch.mul(self.gradients[:count], 1.0 / ranks, out=bucket)
        work = dist.reduce_scatter_tensor(chunk, bucket, async_op=True)
        self.pending[self.turn] = (work, chunk)

    def add_pending(self, turn: int) -> None:
        """Add what the bucket's last reduction has brought, if there was one."""
        pending, self.pending[turn] = self.pending[turn], None
        if pending is not None:
            work, chunk = pending
            work.wait()
            self.target[: chunk.numel()] += chunk

    def join(self) -> None:
        """Make the stream wait for the reductions that were begun."""
        self.add_pending(1 - self.turn)
        self.add_pending(self.turn)

    def choose(self, parts: int) -> None:
        """Nothing: torch's collectives run as a whole."""

    def check(self) -> None:
        """Nothing: torch looks by itself."""

    def close(self) -> None:
        """Nothing: the tensors end with this."""


class Memory:
    """A piece of device memory that torch can make a tensor of."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size // 2,),
            "typestr": "<i2",
            "data": (address, False),
            "version": 3,
        }


Exchange = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)


def exchange_over(group: dist.ProcessGroup) -> object:
    """Return the process group as C's exchange; to be kept as long as C may call it."""

    def exchange(_context: int, mine: int, size: int, everyone: int) -> int:
        try:
            own = torch.frombuffer(bytearray(ctypes.string_at(mine, size)), dtype=torch.uint8)
            found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(found, own, group=group)
            data = bytes(torch.cat(found).tolist())
            ctypes.memmove(everyone, data, len(data))
        except Exception as error:  # an exception cannot pass through C
            print(f"exchange: {error}", file=sys.stderr)
            return 1
        return 0

    return Exchange(exchange)


class Ours:
    """A communicator of this library, through bench/gpu/collectives.c."""

    def __init__(
        self, library: ctypes.CDLL, name: str, largest: int, gradients: torch.Tensor, bench: Bench
    ) -> None:
        self.name = name
        self.library = library
        self.exchange = exchange_over(bench.group)
        self.handle = ctypes.c_void_p()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        opened = library.collectives_open(
            name.encode(), rank, ranks, rank, self.exchange, ctypes.byref(self.handle)
        )
        self.expect(opened)
        self.expect(
            library.collectives_use_stream(self.handle, ctypes.c_void_p(bench.stream.cuda_stream))
        )
        # The shard, what is gathered, two buckets.
        chunk = largest // ranks
        size = chunk + 3 * largest
        address = ctypes.c_void_p()
        self.expect(
            library.collectives_memory(self.handle, ctypes.c_size_t(size), ctypes.byref(address))
        )
        memory = torch.as_tensor(Memory(address.value or 0, size), device="cuda")
        self.shard = memory[: chunk // 2].view(torch.bfloat16)
        self.whole = memory[chunk // 2 : (chunk + largest) // 2].view(torch.bfloat16)
        self.buckets = memory[(chunk + largest) // 2 :]
        self.gradients = gradients
        self.target = torch.zeros(largest // 2 // ranks, dtype=torch.float32, device="cuda")
        self.memory_bytes = size + 4 * self.target.numel()

    def expect(self, result: int) -> None:
        """Raise the error that a call has returned, if any."""
        if result != 0:
            self.library.collectives_error.restype = ctypes.c_char_p
            text = self.library.collectives_error(self.handle).decode()
            raise RuntimeError(f"{self.name}: {text}")

    def gather(self, size: int) -> None:
        """Enqueue a gather of ``size`` bytes over all ranks."""
        self.expect(
            self.library.collectives_gather(
                self.handle,
                ctypes.c_void_p(self.shard.data_ptr()),
                ctypes.c_size_t(size // dist.get_world_size()),
                ctypes.c_void_p(self.whole.data_ptr()),
            )
        )

    def reduce(self, size: int) -> None:
        """Enqueue a reduction of ``size`` bytes of gradients a rank."""
        self.expect(
            self.library.collectives_reduce(
                self.handle,
                ctypes.c_void_p(self.gradients.data_ptr()),
                ctypes.c_size_t(size // dist.get_world_size()),
                ctypes.c_void_p(self.buckets.data_ptr()),
                ctypes.c_void_p(self.target.data_ptr()),
            )
        )

    def choose(self, parts: int) -> None:
        """Run only these parts of each reduction, of those that collectives.h numbers."""
        self.expect(self.library.collectives_choose(self.handle, ctypes.c_uint(parts)))

    def join(self) -> None:
        """Make the stream wait for all that was begun."""
        self.expect(self.library.collectives_join(self.handle))

    def check(self) -> None:
        """Raise what has gone wrong meanwhile."""
        self.expect(self.library.collectives_status(self.handle))

    def close(self) -> None:
        """Give everything back; all ranks have met before."""
        self.library.collectives_close(self.handle)


Implementation = ThroughTorch | Ours


# ---- measuring --------------------------------------------------------------------------------


class Bench:
    """What a rank measures with."""

    def __init__(self, alternations: int, group: dist.ProcessGroup) -> None:
        self.alternations = alternations
        self.group = group
        self.stream = torch.cuda.Stream()
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def meet(self) -> None:
        """Wait until all ranks are here and their GPUs have nothing to do."""
        torch.cuda.synchronize()
        dist.barrier(group=self.group)

    def longest(self, times: list[float]) -> list[float]:
        """Return the largest of all ranks, one by one."""
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        return slowest.tolist()

    def seconds(self, implementation: Implementation, kind: str, size: int, n: int) -> float:
        """Seconds an operation, of n in a row."""
        operation: Operation = getattr(implementation, kind)
        self.meet()
        with torch.cuda.stream(self.stream):
            self.start.record()
            for _ in range(n):
                operation(size)
            implementation.join()
            self.end.record()
        torch.cuda.synchronize()
        implementation.check()
        return self.start.elapsed_time(self.end) / 1e3 / n

    def compare(
        self, implementations: list[Implementation], kind: str, size: int
    ) -> list[list[float]]:
        """Return times of each implementation, one an alternation."""
        first = self.longest([self.seconds(i, kind, size, 2) for i in implementations])
        n = max(1, min(50, math.ceil(2e-3 / max(first))))
        times: list[list[float]] = [[] for _ in implementations]
        for turn in range(self.alternations):
            for place in range(len(implementations)):
                at = (turn + place) % len(implementations)
                times[at].append(self.seconds(implementations[at], kind, size, n))
        return [self.longest(row) for row in times]


def median_of(values: list[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95 % interval, from order statistics."""
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def named(size: int) -> str:
    """Return ``size`` bytes as a text."""
    for unit, letter in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {letter}"
    return f"{size} B"


def bandwidths(
    bench: Bench, implementations: list[Implementation], sizes: list[int], say: Say
) -> None:
    """Measure gathers and reductions of all sizes, one after the other."""
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    for kind in ("gather", "reduce"):
        say(f"\n{kind}: us an operation, median (95 % interval); bus GB/s = bytes x (W-1)/W / time")
        say("size      " + "".join(f"{i.name:>34}" for i in implementations))
        for size in sizes:
            cells = []
            for times in bench.compare(implementations, kind, size):
                middle, low, high = median_of(times)
                speed = size * share / middle / 1e9
                cells.append(f"{middle * 1e6:10.1f} ({low * 1e6:.1f}-{high * 1e6:.1f}){speed:8.1f}")
            say(f"{named(size):<10}" + "".join(f"{cell:>34}" for cell in cells))


def errors(implementations: list[Implementation], say: Say) -> None:
    """Compare a reduction with fp64, and a gather with what it should be."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    count = 8 * MIB
    say("\nreduction of 16 MiB against fp64: norm of the error / norm of the sum")
    for implementation in implementations:
        if implementation.name == "nccl-gaps":  # leaves out what lies in them
            continue
        own = implementation.gradients[:count]
        everyone = torch.empty(ranks * count, dtype=own.dtype, device="cuda")
        dist.all_gather_into_tensor(everyone, own)
        wanted = everyone.view(ranks, ranks, -1)[:, rank].double().sum(0) / ranks
        implementation.target.zero_()
        torch.cuda.synchronize()
        implementation.reduce(count * 2)
        implementation.join()
        torch.cuda.synchronize()
        found = implementation.target[: count // ranks].double()
        implementation.shard.fill_(rank + 1)
        torch.cuda.synchronize()
        implementation.gather(count * 2)
        torch.cuda.synchronize()
        gathered = implementation.whole[:count].view(ranks, -1).float()
        right = bool((gathered.mean(1).cpu() == torch.arange(1.0, ranks + 1)).all())
        error = float((found - wanted).norm() / wanted.norm())
        say(f"  {implementation.name:<16}{error:.3e}   gather {'right' if right else 'WRONG'}")


# ---- a rank -----------------------------------------------------------------------------------


def open_all(options: argparse.Namespace, bench: Bench, say: Say) -> list[Implementation]:
    """Open torch's and those of ours that this machine can have."""
    gradients = torch.randn(options.largest // 2, device="cuda").bfloat16()
    implementations: list[Implementation] = [ThroughTorch(options.largest, gradients)]
    library = ctypes.CDLL(options.library)
    for name in options.comms:
        free = torch.cuda.mem_get_info()[0]
        try:
            made = Ours(library, name, options.largest, gradients, bench)
        except RuntimeError as error:
            say(f"left out: {error}")
            continue
        own = free - torch.cuda.mem_get_info()[0] - made.memory_bytes
        say(f"{name} takes {own / MIB:.0f} MiB of the GPU for itself")
        implementations.append(made)
    return implementations


def join_ranks(rank: int, ranks: int, alternations: int) -> tuple[Bench, Say]:
    """Make this process a rank, and say where it runs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.cuda.set_device(rank)
    torch.manual_seed(1234 + rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    bench = Bench(alternations, dist.new_group(backend="gloo"))
    say(
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {ranks} x {torch.cuda.get_device_name()}"
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    say(f"torch {torch.__version__}, NCCL {nccl}, {platform.node() or 'a machine'}")
    return bench, say


def run_rank(rank: int, ranks: int, options: argparse.Namespace) -> None:
    """Measure as one rank; all do the same."""
    bench, say = join_ranks(rank, ranks, options.alternations)
    implementations = open_all(options, bench, say)
    errors(implementations, say)
    sizes = [
        size for size in (KIB << shift for shift in range(0, 23, 2)) if size <= options.largest
    ]
    bandwidths(bench, implementations, sizes, say)
    bench.meet()
    for implementation in implementations:
        implementation.close()
    dist.destroy_process_group()


def spawn_ranks(
    body: Callable[[int, int, argparse.Namespace], None], options: argparse.Namespace
) -> None:
    """Run ``body`` in a process for each GPU, or for each of ``options.ranks`` of them."""
    ranks = options.ranks or torch.cuda.device_count()
    if ranks < 2:
        sys.exit(f"collectives need two GPUs or more; this machine has {torch.cuda.device_count()}")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    # Queues of copies that wait must not hold up others (penstock/copy_engine.h).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.multiprocessing.spawn(body, (ranks, options), nprocs=ranks)


def main() -> None:
    """Start a process a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--library", required=True, help="libbench_gpu_collectives.so")
    parser.add_argument("--ranks", type=int, default=0, help="default: a rank for each GPU")
    parser.add_argument("--comms", nargs="+", default=["nccl", "ce"], help="see collectives.h")
    parser.add_argument("--largest", type=int, default=4 * GIB, help="bytes")
    parser.add_argument("--alternations", type=int, default=20)
    options = parser.parse_args()
    spawn_ranks(run_rank, options)


if __name__ == "__main__":
    main()
