"""Train architectures of transformers over two processes by Penstock, by FSDP2 and unsharded.

Prints a line an architecture: the greatest relative difference of a loss from the unsharded ones.
Ends with 1 if Penstock's is not small somewhere, or it fails. What FSDP2 does is shown beside.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from architectures import ARCHITECTURES  # noqa: E402
from ranks import World  # noqa: E402
from training import Trained, train  # noqa: E402

RANKS = 2
TOLERANCE = 1e-4  # of a loss
SECONDS = 240.0  # for one training

Outcome = list[Trained] | str  # by rank; or why there is none


class Runner:
    """Has worlds of ranks train; one that failed is replaced."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._world = World(RANKS)

    def train(self, kind: str, way: str) -> Outcome:
        """Train one way, on all ranks."""
        answers = self._world.collect(train, kind, way, self._stage, answer_within=SECONDS)
        failed = [str(answer) for ok, answer in answers if not ok]
        if not failed:
            return [answer for _, answer in answers]
        self.close()
        self._world = World(RANKS)
        return failed[0].strip().splitlines()[-1]

    def close(self) -> None:
        """End the ranks."""
        self._world.close()


def distance(found: Outcome, wanted: list[Trained]) -> float:
    """Return the greatest relative difference of a loss; infinite where there are none."""
    if isinstance(found, str):
        return float("inf")
    pairs = zip(found, wanted, strict=True)
    losses = [pair for f, w in pairs for pair in zip(f.losses, w.losses, strict=True)]
    return max(abs(f - w) / abs(w) for f, w in losses)


def compare(kind: str, runner: Runner) -> bool:
    """Train an architecture in all ways, and print its line; returns whether Penstock is right."""
    begin = time.monotonic()
    wanted = runner.train(kind, "unsharded")
    if isinstance(wanted, str):
        print(f"{kind:14} FAILED  unsharded: {wanted}", flush=True)
        return False
    found = {way: runner.train(kind, way) for way in ("Penstock", "FSDP2")}
    distances = {way: distance(outcome, wanted) for way, outcome in found.items()}
    passed = distances["Penstock"] <= TOLERANCE
    one = wanted[0]
    line = f"{kind:14} {'passed' if passed else 'FAILED'} {one.parameters:10,} {one.blocks:7}"
    line += f" {one.losses[0]:7.4f} {one.losses[-1]:7.4f}"
    line += "".join(f" {each:9.1e}" for each in distances.values())
    line += f" {time.monotonic() - begin:6.1f}"
    notes = [f"  {way}: {outcome}" for way, outcome in found.items() if isinstance(outcome, str)]
    print("\n".join([line, *notes]), flush=True)
    return passed


def main() -> int:
    """Train what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ARCHITECTURES)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    given = parser.parse_args()
    kinds = given.only or list(ARCHITECTURES)
    print("architecture   result parameters  blocks   first    last  Penstock     FSDP2      s")
    runner = Runner(given.stage)
    passed = [compare(kind, runner) for kind in kinds]
    runner.close()
    print(f"{sum(passed)} of {len(passed)} train as the unsharded model does")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
