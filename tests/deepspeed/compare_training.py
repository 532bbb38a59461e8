"""Run the training script on DeepCompile's own runtime and on Penstock; compare the losses.

A line a setting: the largest difference of the losses over all steps, and the last ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPT = Path(__file__).parent / "train_qwen3.py"
TOLERANCE = 2e-2  # of a loss, or of 1 where it is smaller: bfloat16 over 200 steps
SETTINGS = {
    "stage1": "--stage 1",
    "stage1-accumulation": "--stage 1 --accumulation 2",
    "stage1-optimizer": "--stage 1 --offload optimizer",
    "stage2": "--stage 2",
    "stage2-accumulation": "--stage 2 --accumulation 2",
    "stage3": "--stage 3",
    "stage3-accumulation": "--stage 3 --accumulation 2",
    "stage3-activations": "--stage 3 --offload activations",
    "stage3-states": "--stage 3 --offload states",
    "stage3-optimizer": "--stage 3 --offload optimizer",
}


def train(setting: str, runtime: str, options: argparse.Namespace) -> list[float] | str:
    """Return the losses of a run, or how it failed."""
    name = f"{setting}-{runtime}"
    path = Path(options.folder) / f"{name}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks), str(SCRIPT), str(path)]
    command += SETTINGS[setting].split() + ["--steps", str(options.steps)]
    command += {"deepspeed": [], "penstock": ["--penstock"], "plain": ["--plain"]}[runtime]
    with (Path(options.folder) / f"{name}.log").open("w") as log:
        try:
            subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=options.deadline, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no end within {options.deadline} s"
    return json.loads(path.read_text()) if path.exists() else f"failed: see {name}.log"


def compare(setting: str, runs: dict[str, list[float] | str]) -> tuple[bool, str]:
    """Return whether Penstock's losses are the peer's, and a line about it."""
    for name, run in runs.items():
        if isinstance(run, str):
            return False, f"{setting:22} {name} {run}"
    (_, wanted), (_, found) = runs.items()
    far = max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(found, wanted, strict=True))
    line = f"{setting:22} {len(found)} losses, largest difference {far:.1e}, "
    line += f"first {found[0]:.4f} and {wanted[0]:.4f}, last {found[-1]:.4f} and {wanted[-1]:.4f}"
    return far <= TOLERANCE, line


def main() -> int:
    """Run all settings, some at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--peer", choices=("deepspeed", "plain"), default="deepspeed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--together", type=int, default=2, help="runs at once")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds a run")
    parser.add_argument("--folder", help="for logs and losses")
    options = parser.parse_args()
    options.folder = options.folder or tempfile.mkdtemp()
    with ThreadPoolExecutor(options.together) as pool:
        runs = {
            (setting, runtime): pool.submit(train, setting, runtime, options)
            for setting in options.only
            for runtime in (options.peer, "penstock")
        }
        equal = True
        for setting in options.only:
            both = {name: runs[setting, name].result() for name in (options.peer, "penstock")}
            right, line = compare(setting, both)
            equal = equal and right
            print("equal" if right else "WRONG", line, flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
