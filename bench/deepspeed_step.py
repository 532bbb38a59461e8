"""Training steps under DeepSpeed: plain ZeRO, DeepCompile, DeepCompile on Penstock.

Each implementation is a process group of its own, since a process can hold only one set of the
operators ``dc``. The groups share the GPUs: each warms up alone, then they take turns in timed
rounds, the others idle, so that all see the same machine. A line of JSON an implementation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

IMPLEMENTATIONS = ("zero", "deepcompile", "penstock")
SHAPES = {
    "8b": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
    "small": {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
}
WARM_UP = 12  # DeepCompile compiles again before the sixth step
BATCHES = 4
GIB = 1 << 30


# ---- one rank of one implementation ------------------------------------------------------------


def settings(options: argparse.Namespace) -> dict:
    """Return DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "compile": {"deepcompile": options.implementation != "zero"},
        "steps_per_print": 1000000,
    }


def make_engine(options: argparse.Namespace):
    """Return DeepSpeed's engine with a Qwen3 of the asked shape, equal weights everywhere."""
    import deepspeed
    import torch
    import transformers

    shape = transformers.Qwen3Config(
        num_hidden_layers=options.layers,
        max_position_embeddings=options.sequence,
        tie_word_embeddings=False,
        use_cache=False,
        **SHAPES[options.shape],
    )
    deepspeed.init_distributed()
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(accelerator.current_device_name()):
        model = transformers.Qwen3ForCausalLM(shape)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(options))
    if options.implementation != "zero":
        engine.compile()
    return engine, shape.vocab_size


class Steps:
    """Training steps, their device times and their losses."""

    def __init__(self, engine, vocabulary: int, sequence: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
        self.engine = engine
        self.batches = [
            torch.randint(vocabulary, (1, sequence), generator=generator).cuda()
            for _ in range(BATCHES)
        ]
        self.losses: list = []
        self.times: list[float] = []
        self.host: list[float] = []

    def run(self, count: int, timed: bool = False) -> None:
        """Take that many steps; wait for the device only before and after them."""
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        events[0].record()
        for event in events[1:]:
            tokens = self.batches[len(self.losses) % BATCHES]
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
            self.losses.append(loss.detach())
            event.record()
        torch.cuda.synchronize()
        if timed:
            self.host.append((time.perf_counter() - begin) * 1e3 / count)
            self.times += [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def longest(times: list[float]) -> list[float]:
    """Return each step's time on the rank where it took longest."""
    import torch
    import torch.distributed as dist

    all_ranks = torch.tensor(times, device="cuda")
    dist.all_reduce(all_ranks, dist.ReduceOp.MAX)
    return all_ranks.tolist()


def work(options: argparse.Namespace) -> None:
    """Be a rank: warm up, then run the rounds that are asked for on the turns' folder."""
    if options.implementation == "penstock":
        import penstock.deepspeed

        penstock.deepspeed.install()
    import deepspeed
    import torch
    import torch.distributed as dist

    begin = time.perf_counter()
    engine, vocabulary = make_engine(options)
    steps = Steps(engine, vocabulary, options.sequence)
    steps.run(WARM_UP)
    warm = time.perf_counter() - begin
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    turns = Turns(Path(options.turns), options.implementation)
    if dist.get_rank() == 0:
        turns.finish(0)
    for number in range(1, options.rounds + 1):
        turns.wait(number)
        steps.run(2)
        steps.run(options.steps, timed=True)
        dist.barrier()
        if dist.get_rank() == 0:
            turns.finish(number)
    times = longest(steps.times)
    peak = longest(
        [torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB]
    )
    losses = torch.stack(steps.losses).float()
    dist.all_reduce(losses)
    if dist.get_rank() == 0:
        result = {
            "implementation": options.implementation,
            "stage": options.stage,
            "layers": options.layers,
            "sequence": options.sequence,
            "ranks": dist.get_world_size(),
            "step_ms": round(statistics.median(times), 2),
            "host_ms": round(statistics.median(steps.host), 2),
            "p90_ms": round(sorted(times)[int(0.9 * len(times))], 2),
            "peak_allocated_gib": round(peak[0], 2),
            "peak_reserved_gib": round(peak[1], 2),
            "retries": torch.cuda.memory_stats()["num_alloc_retries"],
            "warm_up_s": round(warm, 1),
            "times_ms": [round(one, 2) for one in times],
            "losses": [round(one, 5) for one in (losses / dist.get_world_size()).tolist()],
            "deepspeed": deepspeed.__version__,
        }
        turns.result.write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # destroying the groups of a compiled engine is not what is measured


# ---- turns between the implementations ----------------------------------------------------------


class Turns:
    """Whose turn it is, as files in a folder: ``NAME.start.N`` asks, ``NAME.end.N`` answers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.result = folder / f"{name}.json"

    def start(self, number: int) -> None:
        """Let the implementation begin that round."""
        (self.folder / f"{self.name}.start.{number}").touch()

    def finish(self, number: int) -> None:
        """Say that the round is over; round 0 is the warm-up."""
        (self.folder / f"{self.name}.end.{number}").touch()

    def wait(self, number: int) -> None:
        """Wait until the round is to begin."""
        self._await(f"{self.name}.start.{number}", lambda: True)

    def finished(self, number: int, alive: Callable[[], bool]) -> bool:
        """Wait until the round is over; False if the implementation ended before."""
        return self._await(f"{self.name}.end.{number}", alive)

    def _await(self, name: str, alive: Callable[[], bool]) -> bool:
        path = self.folder / name
        while not path.exists():
            if not alive():
                return path.exists()
            time.sleep(0.01)
        return True


class Group:
    """The processes of one implementation."""

    def __init__(self, name: str, options: argparse.Namespace, given: list[str]) -> None:
        self.name = name
        self.turns = Turns(Path(options.turns), name)
        self.end = time.monotonic() + options.deadline
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node {options.ranks}"
        script = f"{__file__} --implementation {name} --turns {options.turns}"
        with (Path(options.logs) / f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *launcher.split(), *script.split(), *given],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def alive(self) -> bool:
        """Return whether it still runs; end it at the deadline."""
        if time.monotonic() > self.end:
            self.process.terminate()
            return False
        return self.process.poll() is None

    def result(self) -> dict | None:
        """Wait for its end; return what it measured."""
        self.process.wait()
        path = self.turns.result
        return json.loads(path.read_text()) if path.exists() else None


def direct(options: argparse.Namespace, given: list[str]) -> int:
    """Start the groups, give them turns, print their results and ratios."""
    groups = []
    for name in options.only:
        group = Group(name, options, given)
        groups.append(group)
        if not options.warm_together:
            group.turns.finished(0, group.alive)
    if options.warm_together:
        for group in groups:
            group.turns.finished(0, group.alive)
    for number in range(1, options.rounds + 1):
        for group in groups:
            group.turns.start(number)
            group.turns.finished(number, group.alive)
    results = [(group.name, group.result()) for group in groups]
    for name, result in results:
        print(json.dumps(result) if result else f"{name} failed: see {name}.log", flush=True)
    summarize([result for _, result in results if result])
    return 0 if all(result for _, result in results) else 1


def summarize(results: list[dict]) -> None:
    """Print a line an implementation, its time against the first one's."""
    for one in results:
        deviation = max(
            abs(a - b) / abs(b) for a, b in zip(one["losses"], results[0]["losses"], strict=True)
        )
        print(
            f"{one['implementation']:12} stage {one['stage']} {one['layers']} layers "
            f"sequence {one['sequence']}: {one['step_ms']:8.2f} ms "
            f"(x{results[0]['step_ms'] / one['step_ms']:.2f}) "
            f"peak {one['peak_allocated_gib']:6.2f} GiB, reserved {one['peak_reserved_gib']:6.2f}, "
            f"losses within {deviation:.1e} of {results[0]['implementation']}'s"
        )


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and those that a rank is to get as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=15, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    own = argparse.ArgumentParser(parents=[parser], add_help=False, conflict_handler="resolve")
    own.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    own.add_argument("--ranks", type=int, default=4)
    own.add_argument("--warm-together", action="store_true", help="faster, less like a real job")
    own.add_argument("--deadline", type=float, default=1800.0, help="seconds for each")
    own.add_argument("--logs", default=".", help="the folder for what the groups print")
    own.add_argument("--implementation", choices=IMPLEMENTATIONS, help="be a rank of this one")
    own.add_argument("--turns", help="the folder of the turns")
    options = own.parse_args()
    given = []
    for name in ("stage", "shape", "layers", "sequence", "steps", "rounds"):
        given += [f"--{name}", str(getattr(options, name))]
    return options, given


def main() -> int:
    """Be a rank, or direct all of them."""
    options, given = parse()
    if options.implementation:
        work(options)
    with tempfile.TemporaryDirectory() as folder:
        options.turns = folder
        return direct(options, given)


if __name__ == "__main__":
    sys.exit(main())
