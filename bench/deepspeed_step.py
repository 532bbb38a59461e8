"""Training steps under DeepSpeed: plain ZeRO, DeepCompile, DeepCompile on Penstock.

Each implementation is a job of its own, since a process can hold only one set of the operators
``dc``. The jobs share the GPUs: they compile at the same time, profiling one after the other, and
then take turns in timed rounds, the others idle, so that all see the same machine. A job that is
not ready in time, or does not end a round in time, is ended and reported, and the rest goes on.

    python bench/deepspeed_step.py --ranks 4 --layers 12 --sequence 1024 --results step.jsonl

``--results`` gets a line of JSON a job and round, as they come; the table at the end says the
medians and quartiles of all rounds. ``--idle`` profiles some more steps of each job: how long its
device was idle on one rank, and what worked how long. Stacks of a job that was late are in its log.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "tests" / "deepspeed"), str(HERE / "train")]

from jobs import Job, share_processors  # noqa: E402

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
    """Training steps; what the last ones took, and the losses of all."""

    def __init__(self, engine, vocabulary: int, sequence: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
        self.engine = engine
        self.batches = [
            torch.randint(vocabulary, (1, sequence), generator=generator).cuda()
            for _ in range(BATCHES)
        ]
        self.losses: list = []

    def run(self, count: int) -> tuple[list[float], float]:
        """Take that many steps; return their ms on the device and the mean on the host.

        Waits for the device only before and after them.
        """
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
        host = (time.perf_counter() - begin) * 1e3 / count
        return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)], host


def longest(values: list[float]) -> list[float]:
    """Return each value of the rank where it is largest."""
    import torch
    import torch.distributed as dist

    all_ranks = torch.tensor(values, device="cuda")
    dist.all_reduce(all_ranks, dist.ReduceOp.MAX)
    return [round(one, 2) for one in all_ranks.tolist()]


def round_of(steps: Steps, options: argparse.Namespace, number: int) -> dict:
    """Take a round's steps; return what they took and used, of all ranks together."""
    import torch
    import torch.distributed as dist

    steps.run(2)
    times, host = steps.run(options.steps)
    peak = [torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB]
    losses = torch.stack(steps.losses).float()
    dist.all_reduce(losses)
    return {
        "implementation": options.implementation,
        "stage": options.stage,
        "layers": options.layers,
        "sequence": options.sequence,
        "ranks": dist.get_world_size(),
        "round": number,
        "times_ms": longest(times),
        "host_ms": round(host, 2),
        "peak_gib": longest(peak),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "losses": [round(one, 5) for one in (losses / dist.get_world_size()).tolist()],
    }


def trace(steps: Steps, options: argparse.Namespace) -> dict:
    """Write Penstock's trace of two steps, which follow others; return where it is."""
    import penstock.dc

    steps.run(2)
    with penstock.dc.trace(options.trace):
        steps.run(2)
    return {"file": options.trace}


def profile(steps: Steps, options: argparse.Namespace) -> dict:
    """Profile some steps; return this rank's idle shares and ms of work a step, by kind."""
    from figures import idle_in, record, work_in

    steps.run(2)
    events = record(lambda: steps.run(options.idle))
    idle = idle_in(events)
    kinds = {
        kind: [round(part / options.idle, 2) for part in parts]
        for kind, parts in work_in(events).items()
        if parts[0] >= idle.span_ms / 100
    }
    return {
        "idle_of_device": round(idle.device, 4),
        "idle_of_compute": round(idle.compute, 4),
        "step_ms": round(idle.span_ms / options.idle, 2),
        "ms_and_ms_alone": kinds,
    }


def closer_looks(implementation: str, options: argparse.Namespace) -> list[tuple]:
    """Return what is asked for behind the rounds: its turn's number, function and name."""
    looks = []
    if options.trace and implementation == "penstock":
        looks.append((options.rounds + 1, trace, "traced"))
    if options.idle:
        looks.append((options.rounds + 2, profile, "profiled"))
    return looks


def work(options: argparse.Namespace) -> None:
    """Be a rank: warm up, then run the rounds that are asked for on the turns' folder."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(options.ready_until - 5 - time.time(), 1))
    begin = time.perf_counter()
    if options.implementation == "penstock":
        import penstock.dc
        import penstock.deepspeed

        penstock.deepspeed.install()
    import deepspeed
    import torch
    import torch.distributed as dist
    from profiling_turn import ProfilingTurn

    turns = Turns(Path(options.turns), options.implementation)
    profiling = ProfilingTurn(turns.folder / "profiling")
    if options.implementation != "zero":
        profiling.install()
    imported = time.perf_counter() - begin
    engine, vocabulary = make_engine(options)
    made = time.perf_counter() - begin
    steps = Steps(engine, vocabulary, options.sequence)
    steps.run(WARM_UP)
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    warm = {
        "warm_up_s": round(time.perf_counter() - begin, 1),
        "imported_s": round(imported, 1),
        "made_s": round(made, 1),
        "profiling_s": round(profiling.held_s, 1),
        "waiting_to_profile_s": round(profiling.waited_s, 1),
        "deepspeed": deepspeed.__version__,
    }
    if dist.get_rank() == 0:
        turns.finish(0, warm)
    for number in range(1, options.rounds + 1):
        faulthandler.cancel_dump_traceback_later()
        turns.wait(number)
        faulthandler.dump_traceback_later(max(options.round_within - 2, 1))
        found = round_of(steps, options, number)
        if dist.get_rank() == 0:
            turns.finish(number, found)
    for number, look, _ in closer_looks(options.implementation, options):
        turns.wait(number)
        found = look(steps, options)
        dist.barrier()
        if dist.get_rank() == 0:
            turns.finish(number, found)
    dist.barrier()
    os._exit(0)  # destroying the groups of a compiled engine is not what is measured


# ---- turns between the implementations ----------------------------------------------------------


class Turns:
    """Whose turn it is, as files in a folder: ``NAME.start.N`` asks, ``NAME.end.N`` answers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name

    def start(self, number: int) -> None:
        """Let the implementation begin that round."""
        (self.folder / f"{self.name}.start.{number}").touch()

    def wait(self, number: int) -> None:
        """Wait until the round is to begin."""
        while not (self.folder / f"{self.name}.start.{number}").exists():
            time.sleep(0.01)

    def finish(self, number: int, found: dict) -> None:
        """Say that the round is over, and what was found; round 0 is the warm-up."""
        path = self.folder / f"{self.name}.end.{number}"
        path.with_suffix(".part").write_text(json.dumps(found))
        path.with_suffix(".part").rename(path)

    def found(self, number: int) -> dict | None:
        """Return what the round found, once it is over."""
        path = self.folder / f"{self.name}.end.{number}"
        return json.loads(path.read_text()) if path.exists() else None


class Implementation:
    """The job of one implementation."""

    def __init__(self, name: str, options: argparse.Namespace, given: list[str]) -> None:
        self.name = name
        self.turns = Turns(Path(options.turns), name)
        self.rounds: list[dict] = []
        self.log = Path(options.logs) / f"{name}.log"
        script = [__file__, "--implementation", name, "--turns", options.turns]
        self.job = Job(options.ranks, [sys.executable, *script, *given], self.log)

    def await_round(self, number: int, until: float) -> dict | None:
        """Return what the round found; None, and the job is ended, if it died or is late."""
        while (found := self.turns.found(number)) is None:
            late = time.time() > until
            if late or not self.job.runs():
                what = "warm-up" if number == 0 else f"round {number}"
                say(f"{self.name} {'is late' if late else 'died'} in its {what}: see {self.log}")
                self.job.end()
                return None
            time.sleep(0.05)
        return found


def say(text: str) -> None:
    """Print what happened, with the seconds since the beginning."""
    print(f"[{time.monotonic() - BEGUN:6.1f} s] {text}", flush=True)


BEGUN = time.monotonic()


def direct(options: argparse.Namespace, given: list[str]) -> int:
    """Start the jobs, give them turns, print their results and ratios."""
    share_processors(options.ranks * len(options.only), Path(options.turns) / "inductor")
    all_of_them = [Implementation(name, options, given) for name in options.only]
    try:
        for one in all_of_them:
            if warm := one.await_round(0, options.ready_until):
                say(f"{one.name} ready: {json.dumps(warm)}")
        measure([one for one in all_of_them if one.job.runs()], options)
        look_closer([one for one in all_of_them if one.job.runs()], options)
    finally:
        for one in all_of_them:
            one.job.end()
    summarize(all_of_them)
    return 0 if all(len(one.rounds) == options.rounds for one in all_of_them) else 1


def measure(ready: list[Implementation], options: argparse.Namespace) -> None:
    """Let those that are ready take turns, and keep what they find."""
    until = time.time() + options.measure_within
    for number in range(1, options.rounds + 1):
        for one in [one for one in ready if one.job.runs()]:
            if time.time() > until:
                say(f"no time for {one.name}'s round {number}")
                return
            one.turns.start(number)
            found = one.await_round(number, time.time() + options.round_within)
            if found is None:
                continue
            one.rounds.append(found)
            say(f"{one.name} round {number}: {statistics.median(found['times_ms']):.2f} ms")
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(found) + "\n")


def look_closer(ready: list[Implementation], options: argparse.Namespace) -> None:
    """Let each be traced and profiled, as far as that is asked for, and print what it finds."""
    for one in ready:
        for number, _, what in closer_looks(one.name, options):
            one.turns.start(number)
            found = one.await_round(number, time.time() + options.round_within)
            if found is None:
                break
            say(f"{one.name} {what}: {json.dumps(found)}")


def summarize(implementations: list[Implementation]) -> None:
    """Print a line each: its steps, its memory and its losses, beside those of the first."""
    first = None
    for one in implementations:
        if not one.rounds:
            print(f"{one.name:12} was not measured: see {one.log}")
            continue
        last = one.rounds[-1]
        times = [ms for found in one.rounds for ms in found["times_ms"]]
        low, median, high = statistics.quantiles(times, n=4)
        first = first or {"name": one.name, "median": median, "losses": last["losses"]}
        far = max(
            abs(a - b) / abs(b) for a, b in zip(last["losses"], first["losses"], strict=False)
        )
        print(
            f"{one.name:12} stage {last['stage']} {last['layers']} layers sequence "
            f"{last['sequence']}: {median:8.2f} ms (quartiles {low:.2f}-{high:.2f}, {len(times)} "
            f"steps, x{first['median'] / median:.2f} of {first['name']}), peak "
            f"{last['peak_gib'][0]:.2f} GiB, reserved {last['peak_gib'][1]:.2f}, losses "
            f"{last['losses'][0]:.3f} to {last['losses'][-1]:.3f}, within {far:.1e}"
        )


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and those that a rank is to get as well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = [
        parser.add_argument("--stage", type=int, default=3),
        parser.add_argument("--shape", choices=SHAPES, default="8b"),
        parser.add_argument("--layers", type=int, default=12),
        parser.add_argument("--sequence", type=int, default=1024),
        parser.add_argument("--steps", type=int, default=15, help="timed steps a round"),
        parser.add_argument("--rounds", type=int, default=3),
        parser.add_argument("--round-within", type=float, default=60.0, help="seconds"),
        parser.add_argument("--trace", default="", help="rank{rank}.json: trace two of penstock's"),
        parser.add_argument("--idle", type=int, default=0, metavar="STEPS", help="to profile"),
    ]
    parser.add_argument("--ready-within", type=float, default=900.0, help="seconds to warm up in")
    parser.add_argument("--ready-until", type=float, help="that, as a point in time")
    parser.add_argument("--measure-within", type=float, default=600.0, help="seconds, all rounds")
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--results", type=Path, help="lines of JSON are appended here")
    parser.add_argument("--logs", default=".", help="the folder for what the jobs print")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="be a rank of this one")
    parser.add_argument("--turns", help="the folder of the turns")
    options = parser.parse_args()
    if options.ready_until is None:
        options.ready_until = time.time() + options.ready_within
    given = ["--ready-until", str(options.ready_until)]
    for argument in shared:
        given += [f"{argument.option_strings[0]}={getattr(options, argument.dest)}"]
    return options, given


def main() -> int:
    """Be a rank, or direct all of them."""
    options, given = parse()
    if options.implementation:
        work(options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options.turns = folder
        return direct(options, given)


if __name__ == "__main__":
    sys.exit(main())
