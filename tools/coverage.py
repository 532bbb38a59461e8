"""Line coverage of sched/ and mem/ from a build with ``--coverage`` whose tests have run.

Prints a line a file, and the lines that no test ran.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sched", "mem")


def counts_of(build: Path) -> dict[str, dict[int, int]]:
    """Return, file by file, how often each line that has code was run."""
    found: dict[str, dict[int, int]] = {}
    objects = build.resolve() / "CMakeFiles" / "penstock_objects.dir"
    data = [path for folder in FOLDERS for path in (objects / folder).rglob("*.gcno")]
    output = subprocess.run(
        ["gcov", "--json-format", "--stdout", *map(str, sorted(data))],
        cwd=build,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for line in filter(None, output.splitlines()):
        for file in json.loads(line)["files"]:
            path = Path(file["file"])
            if not path.is_relative_to(ROOT):
                continue
            lines = found.setdefault(str(path.relative_to(ROOT)), {})
            for entry in file["lines"]:
                number = entry["line_number"]
                lines[number] = lines.get(number, 0) + entry["count"]
    return {name: lines for name, lines in found.items() if name.split("/")[0] in FOLDERS}


def ranges(numbers: list[int], all_numbers: list[int]) -> str:
    """Write lines as ranges that skip lines without code."""
    place = {number: index for index, number in enumerate(all_numbers)}
    parts: list[list[int]] = []
    for number in numbers:
        if parts and place[number] == place[parts[-1][-1]] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def main() -> int:
    """Print the table."""
    counts = counts_of(Path(sys.argv[1]))
    run_all = total_all = 0
    for name, lines in sorted(counts.items()):
        missed = [number for number in sorted(lines) if lines[number] == 0]
        run, total = len(lines) - len(missed), len(lines)
        run_all, total_all = run_all + run, total_all + total
        text = f"   not run: {ranges(missed, sorted(lines))}" if missed else ""
        print(f"{name:32} {run:5}/{total:<5} {100 * run / total:5.1f} %{text}")
    if total_all == 0:
        print("no coverage data: build with --coverage and run the tests", file=sys.stderr)
        return 1
    print(f"{'all':32} {run_all:5}/{total_all:<5} {100 * run_all / total_all:5.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
