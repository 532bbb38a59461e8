"""Run the tests that need GPUs in parts, side by side where there are GPUs enough.

Each part has GPUs of its own (CUDA_VISIBLE_DEVICES), a limit of time and a log. One that fails or
runs out of its time is reported, and the rest goes on; what it printed last is shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ALL = 0  # every GPU of the machine


@dataclass(frozen=True)
class Part:
    """A command, the GPUs that it wants and the seconds that it may take."""

    name: str
    gpus: int
    limit_s: float
    command: Sequence[str]


def ctest(build: Path, name: str) -> list[str]:
    """Return the command for the C tests of that name, a pattern."""
    command = ["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error"]
    return [*command, "-R", f"^gpu/{name}$"]


def pytest(*arguments: str) -> list[str]:
    """Return the command for some Python tests; a test that hangs prints the stacks."""
    options = ["-v", "--durations=8", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=100"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def python_tests(*names: str) -> list[str]:
    """Return the command for these files of tests/python."""
    return pytest(*(f"tests/python/test_{name}.py" for name in names))


def deepspeed_tests(name: str) -> list[str]:
    """Return the command for a file of tests/deepspeed, several tests at a time."""
    several = ["-n", "6"] if importlib.util.find_spec("xdist") else []
    return pytest(f"tests/deepspeed/{name}.py", "-k", "TestDeepCompile", *several)


def parts_of(build: Path, gpus: int) -> list[Part]:
    """Return all parts, the longest ones first."""
    collectives = [str(build / "tests" / "gpu" / "gpu_test_collectives"), "--ranks", str(gpus)]
    few = ["--count", "300", "--largest", "8000000"]
    found = [
        Part("deepspeed", 2, 300, deepspeed_tests("test_upstream")),
        Part("deepspeed-tight", 2, 300, deepspeed_tests("test_upstream_tight")),
        Part("training", 2, 240, python_tests("training", "capture", "gradients", "transforms")),
        Part("step", min(2, gpus), 240, python_tests("step")),
        Part("checkpoint", min(2, gpus), 240, python_tests("checkpoint")),
        Part(
            "activations",
            min(2, gpus),
            240,
            python_tests("offload_activations", "ways", "selective"),
        ),
        Part(
            "adamw",
            min(2, gpus),
            200,
            python_tests("adamw", "in_backward", "deepcompile_device_optimizer"),
        ),
        Part("models", min(2, gpus), 200, python_tests("meta", "load", "switch", "hooks")),
        Part("errors", min(2, gpus), 120, python_tests("errors", "lookup")),
        Part(
            "planner",
            min(2, gpus),
            200,
            python_tests("planner", "plan", "goes_on", "trace_recording"),
        ),
        Part("memory", 2, 150, python_tests("memory", "use_after_release", "float8")),
        Part("beat", 2, 120, python_tests("beat")),
        Part("offload", 2, 120, python_tests("offload", "copies")),
        Part("mesh", 2, 120, python_tests("mesh", "ignored", "own_collectives")),
        Part("compile", 2, 240, python_tests("compile")),
        Part(
            "deepcompile",
            2,
            240,
            python_tests("deepcompile_offload", "deepcompile_partitions", "deepcompile_memory"),
        ),
        Part("communicators", 2, 180, ctest(build, "collectives_.*")),
        Part("ranks", 2, 150, python_tests("gpu_ranks")),
        Part("memcheck", 2, 120, ctest(build, "memcheck")),
        Part("ce-abort", 2, 90, ctest(build, "test_ce_abort")),
        Part("device", 1, 90, ctest(build, "test_cuda_device")),
        Part("kernels", 1, 60, ctest(build, "cuda_kernels")),
        Part("equal", ALL, 150, python_tests("equal_to_unsharded")),
        Part("ce", ALL, 45, [*collectives, "--comm", "ce", *few]),
    ]
    if gpus >= 2:  # one is killed, and the others have to end
        found.append(Part("ce-killed", ALL, 45, [*collectives, "--comm", "ce", "--mode", "killed"]))
        found.append(
            Part("nccl-killed", ALL, 60, [*collectives, "--comm", "nccl", "--mode", "killed"])
        )
    if gpus % 2 == 0 and gpus >= 4:
        found.append(Part("hierarchy", ALL, 60, [*collectives, "--comm", "hierarchy", *few]))
        found.append(Part("nodes", ALL, 120, python_tests("hierarchy")))
    return found


def environment(build: Path) -> dict[str, str]:
    """Return what every part is run with."""
    paths = {"PYTHONPATH": [str(build / "python")], "LD_LIBRARY_PATH": []}
    nccl = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    if nccl is not None and nccl.submodule_search_locations:
        paths["LD_LIBRARY_PATH"] = [str(Path(nccl.submodule_search_locations[0]) / "lib")]
    for name, first in paths.items():
        paths[name] = first + [one for one in os.environ.get(name, "").split(":") if one]
    return {
        **os.environ,
        **{name: ":".join(folders) for name, folders in paths.items()},
        "PENSTOCK_TEST_DEVICE": "cuda",
        "PYTHONFAULTHANDLER": "1",  # SIGABRT prints the stacks
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }


class Run:
    """A part at work."""

    def __init__(self, part: Part, gpus: list[str], logs: Path, base: dict[str, str]) -> None:
        self.part = part
        self.gpus = gpus
        self.log = logs / f"{part.name}.txt"
        self.begun = time.monotonic()
        self.late = False
        with self.log.open("w") as log:
            log.write(f"{shlex.join(part.command)}\n")
            log.flush()
            self.process = subprocess.Popen(
                ["env", *part.command],  # it reports a program that is missing
                cwd=ROOT,
                env={**base, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def ended(self, now: bool) -> bool:
        """Return whether it is over; end it once its time is, or now."""
        if self.process.poll() is None and (now or self.seconds() > self.part.limit_s):
            self.late = True
            self.end()
        return self.process.poll() is not None

    def end(self) -> None:
        """End it and all processes that it has started, which print where they are."""
        for number, patience in ((signal.SIGABRT, 5.0), (signal.SIGKILL, 30.0)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def seconds(self) -> float:
        """Return how long it has run."""
        return time.monotonic() - self.begun

    def report(self) -> bool:
        """Say how it ended, and show what it printed last if it failed; return if it is right."""
        right = self.process.returncode == 0 and not self.late
        lines = self.log.read_text(errors="replace").splitlines()
        for line in [] if right else lines[-40:]:
            print(f"    {line}")
        word = "late" if self.late else "ok" if right else "FAILED"
        print(f"{word:7} {self.part.name:16} {self.seconds():5.0f} s  {lines[-1]}", flush=True)
        return right


def run_all(
    parts: list[Part],
    gpus: list[str],
    logs: Path,
    base: dict[str, str],
    within_s: float = float("inf"),
) -> list[str]:
    """Run the parts, each as soon as there are GPUs for it; return the names of those that failed.

    After `within_s` none begins any more, and those at work are ended. What has started a process
    group is ended with it, whatever happens here.
    """
    waiting, running, free, failed = list(parts), [], list(gpus), []
    until = time.monotonic() + within_s
    try:
        while waiting or running:
            over = time.monotonic() > until
            for part in list(waiting):
                wanted = part.gpus or len(gpus)
                if over:
                    waiting.remove(part)
                    failed.append(part.name)
                    print(f"no time {part.name}")
                elif wanted <= len(free):
                    waiting.remove(part)
                    running.append(Run(part, free[:wanted], logs, base))
                    del free[:wanted]
            for run in [run for run in running if run.ended(over)]:
                running.remove(run)
                run.end()  # what it left behind
                free = sorted(free + run.gpus)
                if not run.report():
                    failed.append(run.part.name)
            time.sleep(0.05)
    finally:
        for run in running:
            run.end()
    return failed


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine that may be used."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [one for one in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if one]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(number) for number in range(len(listed.stdout.splitlines()))]


def chosen(parts: list[Part], options: argparse.Namespace, gpus: int) -> list[Part]:
    """Return the parts that are asked for and can run here; say why another one cannot."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    found = []
    for part in parts:
        if (options.only and part.name not in options.only) or part.name in options.skip:
            continue
        why = ""
        if max(part.gpus, 1) > gpus:
            why = f"wants {part.gpus} GPUs, {gpus} are here"
        elif part.name.startswith("deepspeed") and not has_deepspeed:
            why = "DeepSpeed is not on the path (tests/deepspeed/README.md)"
        elif part.name == "memcheck" and not options.memcheck:
            why = "there is no compute-sanitizer"
        if why:
            print(f"not run {part.name:16} {why}")
        else:
            found.append(part)
    return found


def has_memcheck(build: Path) -> bool:
    """Return whether the build has found compute-sanitizer."""
    listed = subprocess.run(
        ["ctest", "--test-dir", str(build), "-N", "-R", "^gpu/memcheck$"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "gpu/memcheck" in listed.stdout


def main() -> int:
    """Run what is asked for."""
    gpus = visible_gpus()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu")
    parser.add_argument("--logs", type=Path, help="default: parts/ in the build's folder")
    known = [part.name for part in parts_of(Path(), max(len(gpus), 4))]
    parser.add_argument("--only", nargs="+", choices=known, default=[], metavar="PART")
    parser.add_argument("--skip", nargs="+", choices=known, default=[], metavar="PART")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds, all parts")
    options = parser.parse_args()
    build = options.build.resolve()
    options.memcheck = has_memcheck(build)
    logs = options.logs or build / "parts"
    logs.mkdir(parents=True, exist_ok=True)
    parts = chosen(parts_of(build, len(gpus)), options, len(gpus))
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without ending the parts
    failed = run_all(parts, gpus, logs, environment(build), options.within)
    print(
        f"{len(parts) - len(failed)} of {len(parts)} parts passed on {len(gpus)} GPUs in "
        f"{time.monotonic() - begun:.0f} s{': failed ' + ', '.join(failed) if failed else ''}; "
        f"logs in {logs}"
    )
    return 1 if failed or not parts else 0


if __name__ == "__main__":
    sys.exit(main())
