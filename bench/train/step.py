"""A training step beside FSDP2's: milliseconds and memory.

    torchrun --standalone --nproc-per-node 4 bench/train/step.py --layers 36 --sequence 1024

The model is an 8B-shaped one of its own or, by `--model`, any causal one of `transformers`. Layers
are compiled one by one, as users of FSDP2 do; parameters, gradients and AdamW's state are bfloat16.
With `--shards float32` shards, their gradients and AdamW's state are float32, and blocks are
gathered and compute in bfloat16. Each implementation is first run alone, for its peak memory
(torch's allocator and what it does not see: the device's own count) and what it consists of: `rest`
is what the peak holds beside the others, activations above all. Then all are resident, and blocks
of their steps alternate; a time is the host's around a step that ends with a synchronisation of the
device (or around `--together` steps that end with one, a step of them), the longest of all ranks';
medians, with the first and last decile. `host` is what of that the host took to issue a step, where
it matters on the slowest rank. `captured` is penstock with penstock.step, whose graph holds what
torch's allocator does not count as allocated: what it takes is the device's count; the same holds
for `compute-captured`, compute alone in one CUDA graph of torch's. MFU is of 6 operations a token
and parameter and 12 a layer, pair of tokens and element of attention's width. With `--idle` some
more steps are profiled: how long no work ran on the device, and nothing but communication, updates
by penstock, copies and fills, and what worked how long on one rank; the profiler slows the host, so
their time stands beside, and `--profile` keeps the traces. With `--time-waits` penstock's own
figures show how long its compute waited, which costs a little. With `--offload` shards, gradients
and optimizer lie on the host: by CPUOffloadPolicy with FSDP2, by `shard`'s offload= with penstock.
`--checkpoint auto` is penstock's, within `--memory`, and `offload` and `auto-offload` have
activations leave, beside others that checkpoint every layer, or one of `--every`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock as library
import torch
import torch.distributed as dist
from causal_lm import build_causal_lm
from figures import WORK, flops_of_token, idle_in, record, work_in
from model import TINY, Model, Shape, build
from torch.distributed.tensor import DTensor
from ways import (
    CHECKPOINTS,
    OPTIMIZERS,
    SHARDS,
    USUAL_WAYS,
    WAYS,
    Implementation,
    checkpoint_layers,
    ways_of,
)

GIB = 1 << 30
MIB = 1 << 20


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
    model = build_model(given, device)
    checkpoint_layers(name, model, given)
    for block in model.blocks():
        if not given.no_compile:
            block.compile()
    ways_of(given)[name](model, given)
    way = Implementation(name, model, given)
    timed_steps(way, batches_of(way, given, device, given.warm), device)
    say(f"{way.name:16} warm-up: " + ", ".join(f"{ms:.0f}" for ms in way.times) + " ms")
    way.forget_times()
    return way


def build_model(given: argparse.Namespace, device: torch.device) -> Model:
    """Make the model that is asked for."""
    fields: dict[str, Any] = dict(given.set)
    if given.model == "built-in":
        fields |= {"layers": given.layers} if given.layers else {}
        shape = replace(TINY if given.tiny else Shape(), **fields)
        return build(shape, 0, device, SHARDS[given.shards])
    fields |= {"num_hidden_layers": given.layers} if given.layers else {}
    return build_causal_lm(given.model, fields, 0, device, SHARDS[given.shards])


def batches_of(
    way: Implementation, given: argparse.Namespace, device: torch.device, count: int
) -> list[torch.Tensor]:
    """Draw tokens, the same for all implementations, others on each rank."""
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    most, size = way.model.vocabulary, (given.batch * given.micro_batches, given.sequence)
    return [torch.randint(most, size, device=device, generator=generator) for _ in range(count)]


def make_measured(name: str, given: argparse.Namespace, device: torch.device) -> Implementation:
    """Make it, and print the memory of its steps above what was held before."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()  # of others, which this one would count as less
    before = torch.cuda.memory_allocated() if cuda else 0
    device_before = held_by_device()
    way = make(name, given, device)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        timed_steps(way, batches_of(way, given, device, 2), device)
        way.forget_times()
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    peaks = of_all_ranks([peak / GIB, (held_by_device() - device_before) / GIB], device)
    say(f"{name:16} peak allocated {peaks[0]:6.1f} GiB, device {peaks[1]:6.1f} GiB")
    parts = account(way, batches_of(way, given, device, 1)[0][: given.batch])
    parts["rest"] = max(0, peak - sum(parts.values()))
    say(f"{name:16} MiB: " + ", ".join(f"{part} {size / MIB:.1f}" for part, size in parts.items()))
    return way


def account(way: Implementation, tokens: torch.Tensor) -> dict[str, int]:
    """Bytes of this rank by what they are for: in one more step, where no graph holds them."""
    parameters = list(way.model.parameters())
    parts = {"parameters": bytes_of(parameters)}
    if not way.is_captured:  # beside a graph's memory there may be no room for another pass
        way.model(tokens).backward()
        way.step_optimizer()  # before anybody looks at them: it takes that for a need of them
        parts["gradients"] = bytes_of([p.grad for p in parameters if p.grad is not None])
        way.optimizer.zero_grad()
    states = [x for state in way.optimizer.state.values() for x in state.values()]
    parts["optimizer"] = bytes_of([x for x in states if isinstance(x, torch.Tensor)])
    if way.is_penstock:
        stats = library.stats(way.model, reset=True)
        parts["beside shards"] = max(0, stats.places_reserved - parts["parameters"])
        parts["gathered"] = stats.arena_reserved
        parts["copies and buckets"] = stats.sources_reserved
        parts["staging"] = stats.staging_reserved
    return parts


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Count what they take on this rank."""
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def say(text: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def report(ways: list[Implementation], given: argparse.Namespace) -> None:
    """Print the times, and what they mean."""
    reference = next((statistics.median(w.times) for w in ways if w.name == "fsdp2"), None)
    for way in ways:
        deciles = statistics.quantiles(way.times * 2, n=10)  # there may be one alone
        median = statistics.median(way.times)
        ratio = f"{median / reference:6.3f} of fsdp2" if reference else ""
        say(
            f"{way.name:16} {median:8.2f} ms ({deciles[0]:.2f}-{deciles[-1]:.2f}) {ratio}  "
            f"host {statistics.median(way.host_times):.2f}  "
            f"loss {way.losses[0]:.3f} -> {way.losses[-1]:.3f}"
        )
        tokens = given.batch * given.micro_batches * given.sequence  # of a rank
        tokens_a_second = tokens / median * 1e3
        model = way.model
        flops = flops_of_token(
            way.parameters, len(model.blocks()), model.attention_width, given.sequence
        )
        say(
            f"{way.name:16} {tokens_a_second * dist.get_world_size():.0f} tokens/s, "
            f"MFU {tokens_a_second * flops / given.peak_tflops / 1e10:.1f} %"
        )


def report_idle(way: Implementation, given: argparse.Namespace, device: torch.device) -> None:
    """Profile some steps and print how long the device was idle, where that is longest, and why."""
    batches = batches_of(way, given, device, given.idle)

    def train() -> None:
        for tokens in batches:
            way.step(tokens)
        synchronize()

    events = record(train)
    if given.profile:
        write_profile(given.profile / f"{way.name}-rank{dist.get_rank()}.json.gz", events)
    idle = idle_in(events)
    of_device, of_compute, span = of_all_ranks(
        [idle.device, idle.compute, idle.span_ms / len(batches)], device
    )
    say(
        f"{way.name:16} idle: device {of_device:.1%}, compute {of_compute:.1%} "
        f"of {span:.2f} ms a profiled step"
    )
    for kind, parts in work_in(events).items():
        whole, alone = (part / len(batches) for part in parts)
        if whole >= span / 100:
            say(f"    {whole:8.2f} ms, {alone:8.2f} alone  {kind}")


def write_profile(path: Path, events: list[dict[str, Any]]) -> None:
    """Write a Chrome trace of the device's work, as small as it gets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [event for event in events if event.get("cat") in WORK]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": kept}, file)


def field_of(text: str) -> tuple[str, Any]:
    """Read a field of a configuration."""
    field, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no FIELD=VALUE")
    try:
        return field, json.loads(value)
    except json.JSONDecodeError:
        return field, value


def memory_of(text: str) -> str | int | float:
    """Read what `penstock.shard` takes as memory."""
    if text == "auto":
        return text
    return int(text) if text.isdecimal() else float(text)


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model",
        default="built-in",
        help="or qwen3-8b, a type of model of transformers, the path of a config.json",
    )
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        type=field_of,
        nargs="+",
        action="extend",
        default=[],
        help="of the configuration, values as in a config.json",
    )
    parser.add_argument("--layers", type=int, help="left out: what the model has")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch, a rank")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="none")
    parser.add_argument(
        "--every", type=int, default=1, metavar="K", help="others checkpoint one of K layers"
    )
    parser.add_argument(
        "--memory", type=memory_of, help="what penstock may take: bytes, a fraction, or auto"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(USUAL_WAYS))
    parser.add_argument("--keep", action="store_true", help="parameters stay after the forward")
    parser.add_argument("--prefetch-ahead", type=int, default=2)
    parser.add_argument("--bucket-mib", type=int, default=8)
    parser.add_argument(
        "--part-mib", type=int, nargs="+", default=[0], help="0: what most blocks have; one a size"
    )
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--time-waits", action="store_true", help="see above; on GPUs")
    parser.add_argument("--warm", type=int, default=8, help="steps before any is measured")
    parser.add_argument("--steps", type=int, default=5, help="of one implementation at a time")
    parser.add_argument("--alternations", type=int, default=4)
    parser.add_argument("--together", type=int, default=1, help="steps between synchronisations")
    parser.add_argument("--priority", type=int, default=0, help="of the stream to compute on")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="torch", help="AdamW by whom")
    parser.add_argument("--shards", choices=SHARDS, default="bfloat16", help="their dtype")
    parser.add_argument(
        "--offload",
        choices=("optimizer", "parameters"),
        help="what penstock has on the host, beside FSDP2's CPUOffloadPolicy",
    )
    parser.add_argument(
        "--keep-copies",
        action="store_true",
        help="penstock's keep_copies=True, with --shards float32",
    )
    parser.add_argument("--no-optimizer", action="store_true", help="forward and backward alone")
    parser.add_argument("--no-compile", action="store_true", help="layers run as they are")
    parser.add_argument("--tiny", action="store_true", help="a tiny built-in model: does it run?")
    parser.add_argument(
        "--peak-tflops", type=float, default=989, help="of a rank's device, for MFU"
    )
    parser.add_argument("--idle", type=int, default=0, metavar="STEPS", help="to profile; on GPUs")
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="write what --idle profiles: Chrome traces"
    )
    parser.add_argument("--trace", help="write a Chrome trace of some steps of the last penstock")
    given = parser.parse_args()
    if given.idle and not torch.cuda.is_available():
        parser.error("--idle profiles a GPU, and there is none")
    others = [way for way in given.ways if way not in ("penstock", "captured")]
    if given.optimizer == "in-backward" and others:
        parser.error(f"--optimizer in-backward is penstock's: run {', '.join(others)} without it")
    if given.profile and not given.idle:
        parser.error("--profile writes what --idle profiles: name a number of steps")
    if given.shards == "float32" and any(way.startswith("compute") for way in given.ways):
        parser.error(
            "--shards float32: a model that is not sharded would compute in it; name --ways"
        )
    if given.offload and not {"fsdp2", "penstock"}.issuperset(given.ways):
        parser.error("--offload: the others train on the device; name --ways fsdp2 penstock")
    if given.checkpoint.startswith("auto") and given.no_optimizer:
        parser.error("--checkpoint auto measures steps of an optimizer: leave out --no-optimizer")
    return given


def measure(given: argparse.Namespace, device: torch.device) -> None:
    """Make all implementations and alternate them."""
    ways = [make_measured(name, given, device) for name in ways_of(given)]
    for _ in range(given.alternations):
        for way in ways:
            timed_steps(way, batches_of(way, given, device, given.steps), device, given.together)
    report(ways, given)
    for way in ways:
        if given.idle:
            report_idle(way, given, device)
        if way.is_penstock:
            close(way, given, device)


def close(way: Implementation, given: argparse.Namespace, device: torch.device) -> None:
    """Print what penstock says of itself, trace it if asked to, and end it."""
    stats = library.stats(way.model)
    say(repr(stats))
    if stats.predicted_pass_ns:
        report_predicted(stats, way.optimizer_ns())
    if stats.predicted_peak_bytes:
        report_predicted_peak(stats, way.is_captured, device)
    if given.time_waits:
        stalls = [stats.device_gather_ns, stats.device_reduce_ns]
        gathers, reductions = of_all_ranks([ns / stats.forwards / 1e6 for ns in stalls], device)
        say(
            f"penstock stood still a step: gathers {gathers:.2f} ms, reductions {reductions:.2f} ms"
        )
    if given.trace:
        batches = batches_of(way, given, device, max(2, given.together))
        with library.trace(given.trace):
            timed_steps(way, batches, device, given.together)
    library.close(way.model)


def report_predicted(stats: library.Stats, optimizer_ns: float) -> None:
    """Print what was predicted beside what was found: of passes, and of steps that are a graph.

    A graph holds the optimizer's step, too, which nobody predicts: what it takes alone is added.
    """
    predicted = stats.predicted_pass_ns
    text = f"penstock predicted {predicted / 1e6:.2f} ms a pass, of which compute waits "
    text += f"{stats.predicted_exposed_ns / 1e6:.2f}"
    for count, ns, expected, what in (
        (stats.timed_passes, stats.passes_ns, predicted, "a pass"),
        (
            stats.timed_graphs,
            stats.graphs_ns,
            predicted + optimizer_ns,
            f"a captured step, {optimizer_ns / 1e6:.2f} of it the optimizer's,",
        ),
    ):
        if count:
            text += f"; {what} took {ns / count / 1e6:.2f} ({expected / (ns / count) - 1:+.1%})"
    say(text)


def report_predicted_peak(stats: library.Stats, is_captured: bool, device: torch.device) -> None:
    """Print the memory that was predicted beside what there was: a graph's is reserved alone."""
    found = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    predicted = stats.predicted_peak_bytes
    allocated = f"allocated {found / GIB:.2f} ({predicted / found - 1:+.1%}), "
    say(
        f"penstock predicted {predicted / GIB:.2f} GiB; {'' if is_captured else allocated}"
        f"torch has reserved {reserved / GIB:.2f}"
    )


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
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    say(f"{' '.join(sys.argv)}, {dist.get_world_size()} ranks")
    if dist.get_rank() == 0:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("penstock").setLevel(logging.INFO)  # how long a capture took
    try:
        with stream_of(device, given.priority):
            measure(given, device)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
