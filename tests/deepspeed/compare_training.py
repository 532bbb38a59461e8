"""Run the training script on DeepCompile's own runtime and on Penstock; compare the losses.

A line a setting: the mean and the largest difference of the losses over all steps, and the last
ones. Runs that are at work at the same time have GPUs of their own as far as there are any, and
profile in turns.
Where DeepCompile's own runtime aborts, or trains nothing, the peer is DeepSpeed without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

from jobs import Job, share_processors, visible_gpus

SCRIPT = Path(__file__).parent / "train_qwen3.py"
# Of the largest difference over all steps, relative to a loss, or to 1 where it is smaller.
TOLERANCES = {"bf16": 2e-2, "fp32": 1e-4}


@dataclass(frozen=True)
class Setting:
    """Options of the training script, and what Penstock is compared with."""

    options: str
    peer: str = "deepspeed"


SETTINGS = {
    "stage1": Setting("--stage 1"),
    # deepcompile.h: DoubleBufferedReduceBucket::swap has no buffer at the first boundary.
    "stage1-accumulation": Setting("--stage 1 --accumulation 2", "plain"),
    # Nothing copies what was reduced to an optimizer on the host.
    "stage1-optimizer": Setting("--stage 1 --offload optimizer", "plain"),
    "stage2": Setting("--stage 2"),
    "stage2-accumulation": Setting("--stage 2 --accumulation 2"),
    "stage2-optimizer": Setting("--stage 2 --offload optimizer", "plain"),
    "stage3": Setting("--stage 3"),
    "stage3-accumulation": Setting("--stage 3 --accumulation 2"),
    "stage3-activations": Setting("--stage 3 --offload activations"),
    "stage3-states": Setting("--stage 3 --offload states"),
    "stage3-optimizer": Setting("--stage 3 --offload optimizer", "plain"),
}


Run = tuple[str, str]  # a setting and a runtime
Found = list[float] | str  # the losses of a run, or why there are none


def start(run: Run, options: argparse.Namespace, gpus: list[str]) -> Job:
    """Start a run on these GPUs."""
    setting, runtime = run
    folder = Path(options.folder)
    losses = folder / f"{setting}-{runtime}.json"
    losses.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPT), str(losses)]
    command += SETTINGS[setting].options.split() + ["--steps", str(options.steps)]
    command += ["--profiling-turn", str(folder / f"profiling-{'-'.join(gpus)}")]
    command += ["--backend", options.backend, "--dtype", options.dtype]
    command += ["--attention", options.attention] if options.attention else []
    command += ["--dump-after", str(max(options.deadline - 5, 1))]
    command += {"deepspeed": [], "penstock": ["--penstock"], "plain": ["--plain"]}[runtime]
    # What Inductor measures would choose kernels, so the order of sums, anew in each run.
    more = {"TORCHINDUCTOR_DETERMINISTIC": "1"}
    if gpus:
        more["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return Job(options.ranks, command, folder / f"{setting}-{runtime}.log", more)


def train(run: Run, options: argparse.Namespace, gpus: list[str]) -> Found:
    """Run it to its end, or to its deadline."""
    begun = time.monotonic()
    until = min(begun + options.deadline, options.end)
    if begun > options.end:
        return "not begun: no time was left"
    job = start(run, options, gpus)
    while not job.is_over():
        if time.monotonic() > until:
            job.end()
            return f"no end within {time.monotonic() - begun:.0f} s: see {job.log}"
        time.sleep(0.1)
    job.end()
    path = job.log.with_suffix(".json")
    return json.loads(path.read_text()) if path.exists() else f"failed: see {job.log}"


def train_all(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Found]]]:
    """Run every setting on both runtimes, some at a time; yield a setting when both are over."""
    runtimes = {one: (options.peer or SETTINGS[one].peer, "penstock") for one in options.only}
    waiting = [(setting, runtime) for setting in options.only for runtime in runtimes[setting]]
    gpus = visible_gpus()
    places = [gpus[i : i + options.ranks] for i in range(0, len(gpus), options.ranks)]
    places = [place for place in places if len(place) == options.ranks] or [[]]
    over: dict[Run, Found] = {}
    told = Condition()

    def work(place: list[str]) -> None:
        while True:
            with told:
                if not waiting:
                    return
                run = waiting.pop(0)
            try:
                found: Found = train(run, options, place)
            except Exception as error:  # or nobody would hear of this run
                found = f"not run: {error!r}"
            with told:
                over[run] = found
                told.notify()

    share_processors(len(places) * options.together * options.ranks, Path(options.folder) / "cache")
    for place in places * options.together:
        Thread(target=work, args=(place,), daemon=True).start()
    left = list(options.only)
    while left:
        with told:
            ready = [one for one in left if all((one, name) in over for name in runtimes[one])]
            if not ready:
                told.wait()
                continue
        for setting in ready:
            left.remove(setting)
            yield setting, {runtime: over[setting, runtime] for runtime in runtimes[setting]}


def difference(found: list[float], wanted: list[float]) -> tuple[float, float]:
    """Return the mean and the largest difference of all steps."""
    far = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(found, wanted, strict=True)]
    return sum(far) / len(far), max(far)


def compare(setting: str, runs: dict[str, Found], options: argparse.Namespace) -> tuple[bool, str]:
    """Return whether Penstock's losses are the peer's, and a line about it."""
    for name, run in runs.items():
        if isinstance(run, str):
            return False, f"{setting:22} {name} {run}"
    (peer, wanted), (_, found) = runs.items()
    mean, largest = difference(found, wanted)
    line = f"{setting:22} {len(found)} losses, from {peer}'s {mean:.1e}, at most {largest:.1e}, "
    line += f"first {found[0]:.4f} and {wanted[0]:.4f}, last {found[-1]:.4f} and {wanted[-1]:.4f}"
    for name, run in runs.items() if options.reference else ():
        exact = json.loads((options.reference / f"{setting}-{name}.json").read_text())
        mean, most = difference(run, exact)
        line += f"; {name}'s from its own in fp32 {mean:.1e}, at most {most:.1e}"
    return largest <= TOLERANCES[options.dtype], line


def main() -> int:
    """Run all settings, some at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--peer", choices=("deepspeed", "plain"), help="of all; default: see above")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=TOLERANCES, default="bf16", help="of what is computed")
    parser.add_argument("--backend", default="inductor", help="what compiles the graphs")
    parser.add_argument("--attention", help="of transformers; on CPUs stage 3 wants eager")
    parser.add_argument("--together", type=int, default=2, help="runs at once on the same GPUs")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds a run")
    parser.add_argument("--all-within", type=float, default=900.0, help="seconds, all runs")
    parser.add_argument("--folder", help="for logs and losses")
    parser.add_argument(
        "--reference",
        type=Path,
        help="the folder of a run in fp32: how far from it both are, which is bf16's own error",
    )
    options = parser.parse_args()
    options.folder = options.folder or tempfile.mkdtemp()
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    options.end = begun + options.all_within
    equal = True
    for setting, runs in train_all(options):
        right, line = compare(setting, runs, options)
        equal = equal and right
        print(
            f"{time.monotonic() - begun:5.0f} s {'equal' if right else 'WRONG'} {line}", flush=True
        )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
