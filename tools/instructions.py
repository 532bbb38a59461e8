"""Instructions a task, counted by callgrind, against the baseline that is kept in the tree.

``instructions.py PROGRAM [--save]``: prints a table and ends with status 1 when a case is more than
2 % off; with ``--save`` writes the baseline anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BASELINE = Path(__file__).resolve().parent.parent / "bench" / "instructions" / "baseline.txt"
CASES = ("build", "replay", "growing", "traced_replay")
ALLOWED = 0.02


def count(program: str, case: str) -> float:
    """Run one case under callgrind and return its instructions a task."""
    done = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            "--collect-atstart=no",
            "--toggle-collect=measured",
            program,
            case,
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if collected is None:
        raise SystemExit(f"callgrind counted nothing:\n{done.stderr}")
    return int(collected[1]) / int(done.stdout)


def compiler() -> str:
    """Return the C compiler's first line."""
    version = subprocess.run(["cc", "--version"], check=True, capture_output=True, text=True)
    return version.stdout.splitlines()[0]


def read_baseline() -> dict[str, float]:
    """Return the kept numbers."""
    lines = BASELINE.read_text(encoding="utf-8").splitlines()
    pairs = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: float(number) for name, number in pairs}


def save(counted: dict[str, float]) -> None:
    """Write the numbers as the new baseline."""
    lines = [f"# instructions a task; Release, {compiler()}"]
    lines += [f"{case} {number:.2f}" for case, number in counted.items()]
    BASELINE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Count, print, compare."""
    counted = {case: count(sys.argv[1], case) for case in CASES}
    if "--save" in sys.argv[2:]:
        save(counted)
    kept = read_baseline()
    far = False
    print(f"{'instructions a task':24} {'now':>10} {'baseline':>10}")
    for case, number in counted.items():
        change = number / kept[case] - 1
        far |= abs(change) > ALLOWED
        print(f"{case:24} {number:10.2f} {kept[case]:10.2f} {100 * change:+8.2f} %")
    if far:
        print("more than 2 % off: explain it in the commit that saves the new baseline")
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
