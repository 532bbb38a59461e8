"""A training step beside FSDP2's: milliseconds and memory.

    torchrun --standalone --nproc-per-node 4 bench/train/step.py --layers 36 --sequence 1024

Layers are compiled one by one, as users of FSDP2 do; parameters, gradients and AdamW's state are
bfloat16, one sequence a rank. Each implementation is first run alone, for its peak memory (torch's
allocator and what it does not see: the device's own count) and what it consists of: `rest` is what
the peak holds beside the others, activations above all. Then all are resident, and blocks of
their steps alternate; a time is the host's around a step that ends with a synchronisation of the
device (or around `--together` steps that end with one, a step of them), the longest of all ranks';
medians, with the first and last decile. `host` is what of that the host took to issue a step, where
it matters on the slowest rank. `captured` is penstock with penstock.step, whose graph holds what
torch's allocator does not count as allocated: what it takes is the device's count. With
`--time-waits` penstock's own figures show how long its compute waited, which costs a little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import penstock as library
import torch
import torch.distributed as dist
from model import TINY, Decoder, Shape, build
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GIB = 1 << 30
MIB = 1 << 20


Way = Callable[[Decoder, argparse.Namespace], torch.nn.Module]


class Implementation:
    """One way to train the model."""

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        self.name = name
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-5, fused=next(model.parameters()).is_cuda
        )
        self.is_penstock = name.startswith(("penstock", "captured"))
        self.losses: list[float] = []
        self.times: list[float] = []
        self.host_times: list[float] = []

        self.step: Callable[[torch.Tensor], torch.Tensor] = self.step_eagerly
        if name.startswith("captured"):
            self.step = library.step(model, self.optimizer)(self.step_eagerly)

    def step_eagerly(self, tokens: torch.Tensor) -> torch.Tensor:
        """One training step; the loss, on the device."""
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def forget_times(self) -> None:
        """Measure from now on."""
        self.times.clear()
        self.host_times.clear()


def compute_alone(model: Decoder, given: argparse.Namespace) -> torch.nn.Module:
    """Leave each rank the whole model: no communication."""
    return model


def fsdp2(model: Decoder, given: argparse.Namespace) -> torch.nn.Module:
    """Shard as FSDP2's users do."""
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=not given.keep)
    return fully_shard(model, reshard_after_forward=not given.keep)


def penstock(model: Decoder, given: argparse.Namespace, part_mib: int) -> torch.nn.Module:
    """Shard with Penstock."""
    return library.shard(
        model,
        stage=2 if given.keep else 3,
        prefetch_ahead=given.prefetch_ahead,
        bucket_bytes=given.bucket_mib << 20,
        part_bytes=part_mib << 20 or None,
        communicator=given.communicator,
        time_waits=given.time_waits,
    )


WAYS = ("compute", "fsdp2", "penstock", "captured")


def ways_of(given: argparse.Namespace) -> dict[str, Way]:
    """Return what is asked for by name; penstock once a size of parts."""
    ways: dict[str, Way] = {"compute": compute_alone, "fsdp2": fsdp2}
    for mib in given.part_mib:
        for way in ("penstock", "captured"):  # as it is, and by penstock.step as one CUDA graph
            ways[f"{way}/{mib}" if mib else way] = partial(penstock, part_mib=mib)
    return {name: way for name, way in ways.items() if name.partition("/")[0] in given.ways}


# ---- measuring ----------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait until the device has done all, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def held_by_device() -> int:
    """Bytes of this rank's device that are in use, by whomever."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def of_all_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the largest of each over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def timed_steps(
    way: Implementation, batches: list[torch.Tensor], device: torch.device, together: int = 1
) -> None:
    """Train on each batch and keep the times, of all ranks; synchronize after so many steps."""
    times, host_times, losses = [], [], []
    for first in range(0, len(batches), together):
        block = batches[first : first + together]
        dist.barrier()
        synchronize()
        begun = time.perf_counter()
        losses += [way.step(tokens) for tokens in block]
        host_times.append((time.perf_counter() - begun) * 1e3 / len(block))
        synchronize()
        times.append((time.perf_counter() - begun) * 1e3 / len(block))
    way.times += of_all_ranks(times, device)
    way.host_times += of_all_ranks(host_times, device)
    way.losses += [float(loss) for loss in losses]


def make(name: str, given: argparse.Namespace, device: torch.device) -> Implementation:
    """Build, compile and warm up one implementation."""
    model = build(shape_of(given), 0, device, torch.bfloat16)
    for layer in model.layers:
        layer.compile()
    way = Implementation(name, ways_of(given)[name](model, given))
    timed_steps(way, batches_of(given, device, given.warm), device)
    way.forget_times()
    return way


def shape_of(given: argparse.Namespace) -> Shape:
    """Return the model's sizes."""
    return TINY if given.tiny else Shape(layers=given.layers)


def batches_of(given: argparse.Namespace, device: torch.device, count: int) -> list[torch.Tensor]:
    """Draw tokens, the same for all implementations, others on each rank."""
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    most, size = shape_of(given).vocabulary, (1, given.sequence)
    return [torch.randint(most, size, device=device, generator=generator) for _ in range(count)]


def make_measured(name: str, given: argparse.Namespace, device: torch.device) -> Implementation:
    """Make it, and print the memory of its steps above what was held before."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    device_before = held_by_device()
    way = make(name, given, device)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        timed_steps(way, batches_of(given, device, 2), device)
        way.forget_times()
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    peaks = of_all_ranks([peak / GIB, (held_by_device() - device_before) / GIB], device)
    say(f"{name:12} peak allocated {peaks[0]:6.1f} GiB, device {peaks[1]:6.1f} GiB")
    parts = account(way, batches_of(given, device, 1)[0])
    parts["rest"] = max(0, peak - sum(parts.values()))
    say(f"{name:12} MiB: " + ", ".join(f"{part} {size / MIB:.1f}" for part, size in parts.items()))
    return way


def account(way: Implementation, tokens: torch.Tensor) -> dict[str, int]:
    """Bytes of this rank by what they are for, in one more step."""
    parameters = list(way.model.parameters())
    way.model(tokens).backward()
    parts = {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of([p.grad for p in parameters if p.grad is not None]),
    }
    way.optimizer.step()
    way.optimizer.zero_grad()
    states = [x for state in way.optimizer.state.values() for x in state.values()]
    parts["optimizer"] = bytes_of([x for x in states if isinstance(x, torch.Tensor)])
    if way.is_penstock:
        stats = library.stats(way.model, reset=True)
        parts["padding of shards"] = max(0, stats.places_reserved - parts["parameters"])
        parts["gathered"] = stats.arena_reserved
        parts["copies and buckets"] = stats.sources_reserved
        parts["staging"] = stats.staging_reserved
    return parts


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Count what they take on this rank."""
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def say(text: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def report(ways: list[Implementation]) -> None:
    """Print the times."""
    reference = next((statistics.median(w.times) for w in ways if w.name == "fsdp2"), None)
    for way in ways:
        deciles = statistics.quantiles(way.times, n=10)
        median = statistics.median(way.times)
        ratio = f"{median / reference:6.3f} of fsdp2" if reference else ""
        say(
            f"{way.name:12} {median:8.2f} ms ({deciles[0]:.2f}-{deciles[-1]:.2f}) {ratio}  "
            f"host {statistics.median(way.host_times):.2f}  "
            f"loss {way.losses[0]:.3f} -> {way.losses[-1]:.3f}"
        )


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--keep", action="store_true", help="parameters stay after the forward")
    parser.add_argument("--prefetch-ahead", type=int, default=2)
    parser.add_argument("--bucket-mib", type=int, default=8)
    parser.add_argument(
        "--part-mib", type=int, nargs="+", default=[0], help="0: what most blocks have; one a size"
    )
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--time-waits", action="store_true", help="see above; on GPUs")
    parser.add_argument("--warm", type=int, default=6, help="steps before any is measured")
    parser.add_argument("--steps", type=int, default=5, help="of one implementation at a time")
    parser.add_argument("--alternations", type=int, default=4)
    parser.add_argument("--together", type=int, default=1, help="steps between synchronisations")
    parser.add_argument("--priority", type=int, default=0, help="of the stream to compute on")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--trace", help="write a Chrome trace of some steps of the last penstock")
    return parser.parse_args()


def measure(given: argparse.Namespace, device: torch.device) -> None:
    """Make all implementations and alternate them."""
    ways = [make_measured(name, given, device) for name in ways_of(given)]
    for _ in range(given.alternations):
        for way in ways:
            timed_steps(way, batches_of(given, device, given.steps), device, given.together)
    report(ways)
    for way in ways:
        if way.is_penstock:
            close(way, given, device)


def close(way: Implementation, given: argparse.Namespace, device: torch.device) -> None:
    """Print what penstock says of itself, trace it if asked to, and end it."""
    stats = library.stats(way.model)
    say(repr(stats))
    if given.time_waits:
        stalls = [stats.device_gather_ns, stats.device_reduce_ns]
        gathers, reductions = of_all_ranks([ns / stats.forwards / 1e6 for ns in stalls], device)
        say(
            f"penstock stood still a step: gathers {gathers:.2f} ms, reductions {reductions:.2f} ms"
        )
    if given.trace:
        batches = batches_of(given, device, max(2, given.together))
        with library.trace(given.trace):
            timed_steps(way, batches, device, given.together)
    library.close(way.model)


def stream_of(device: torch.device, priority: int) -> AbstractContextManager[object]:
    """Return a stream of that priority to work on; 0: the one that is current."""
    if priority == 0:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device, priority))


def main() -> int:
    """Measure over the ranks that torchrun has started."""
    given = parse()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    say(f"{' '.join(sys.argv)}, {dist.get_world_size()} ranks")
    try:
        with stream_of(device, given.priority):
            measure(given, device)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
