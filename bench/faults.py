"""What ranks say of a fault, after how long, and whether they name who has caused it.

    python bench/faults.py [--ranks 2 4] [--device cuda] [--only FAULT ...] [--timeout SECONDS]

Each fault is a job of its own (`faulty_rank.py`), in which the last rank is the culprit, or the
link. A line of the table is what one of the other ranks says: after how many seconds it names the
culprit, after how many it ends, whether it names the culprit (or whom else beside it), and the
sentence. Lines `hang` are what `python -m penstock.trace hang` says of the dumps that ranks leave;
where all ranks go on, lines `report` are what `python -m penstock.trace report` says of their
traces. The exit status is 1 if a line does not name the culprit.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import penstock.trace as tool
from faulty_rank import FAULTS, Fault

RANK = Path(__file__).with_name("faulty_rank.py")
PATIENCE = 120.0  # seconds for a job, beside its deadline
TO_END = 3.0  # seconds for a rank that is told to end
SHOWN = 150  # characters of a sentence
ROW = "{:<20} {:>5}  {:<7} {:>7} {:>7}  {:<12} {}"
ACCUSES = (
    r"(?:the process of )?ranks? ([\d, ]+)(?: \(\d+\))? (?:did not come|failed|has ended|is st)"
)
DIFFERS = (
    r"(?:started different collectives|is not the same collective on all ranks): "
    r".*?(?=\. |; all |$)"
)
LINK = r"data moved for .* link"


@dataclass
class Told:
    """What one source says of a fault.

    Attributes
    ----------
    who : str
        The source.
    text : str
        The sentence that accuses, or the last one.
    accused : set
        The ranks that it accuses, or "link".
    named, ended : float, optional
        Seconds from the fault to the sentence, and to the end of the rank.
    """

    who: str
    text: str
    accused: set[str]
    named: float | None = None
    ended: float | None = None


# ---- a job --------------------------------------------------------------------------------------


def run_job(name: str, size: int, folder: Path, given: argparse.Namespace) -> None:
    """Run a job until all but the culprit have ended, then end that as a launcher does."""
    ranks = [start(name, rank, size, folder, given) for rank in range(size)]
    until = time.monotonic() + PATIENCE + 2 * given.timeout
    for rank in ranks if FAULTS[name].is_survived else ranks[:-1]:
        wait(rank, until - time.monotonic())
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for rank in ranks:
            end(rank)
            wait(rank, TO_END)


def start(
    name: str, rank: int, size: int, folder: Path, given: argparse.Namespace
) -> subprocess.Popen[bytes]:
    """Start a rank; what it says and its dump go into the folder."""
    options = {"rank": rank, "size": size, "device": given.device, "timeout": given.timeout}
    words = [f"--{key}={value}" for key, value in {**options, "folder": folder}.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_DUMP": str(folder / "dumps")}
    with said_by(rank, folder).open("wb") as said:
        command = [sys.executable, str(RANK), name, *words]
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment)


def said_by(rank: int, folder: Path) -> Path:
    """Return the file of what a rank says."""
    return folder / f"said-{rank}"


def wait(rank: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a rank's end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.wait(max(seconds, 0.0))


# ---- what is said -------------------------------------------------------------------------------


def all_told(fault: Fault, size: int, folder: Path) -> Iterator[Told]:
    """Yield what each source says of the fault."""
    if fault.is_survived:
        yield told_by_report(sorted(folder.glob("rank*.json")), folder)
        return
    since = next((time for time, text in lines_of(size - 1, folder) if text == "fault"), 0.0)
    for rank in range(size - 1):
        yield told_by_rank(rank, since, folder)
    yield told_by_hang(folder)


def lines_of(rank: int, folder: Path) -> list[tuple[float, str]]:
    """Return what a rank has said, with the time."""
    text = said_by(rank, folder).read_text(errors="replace")
    found = re.findall(r"^(\d+\.\d+) (.*)$", text, re.MULTILINE)
    return [(float(time), line) for time, line in found]


def told_by_rank(rank: int, since: float, folder: Path) -> Told:
    """Find the first sentence that accuses, and the time of the exception."""
    lines = lines_of(rank, folder)
    told = Told(f"rank {rank}", lines[-1][1] if lines else "nothing", set())
    for at, line in lines:
        sentence, accused = accusation(line)
        if accused and not told.accused:
            told.text, told.accused, told.named = sentence, accused, at - since
        if line.startswith("ends: "):
            told.ended = at - since
    return told


def accusation(line: str) -> tuple[str, set[str]]:
    """Return the first sentence of a line that accuses, and all ranks that the line accuses."""
    differs = re.search(DIFFERS, line)
    if differs:
        return differs[0], set(re.findall(r"rank (\d+): ", differs[0]))
    found = [*re.finditer(ACCUSES, line)]
    if not found:
        return line, set()
    sentence = line[found[0].start() :].partition(";")[0]
    return sentence, {rank for one in found for rank in one[1].split(", ")}


def told_by_hang(folder: Path) -> Told:
    """Say whom the dumps are said to accuse: the missing, else those that differ."""
    lines = printed("hang", folder / "dumps").splitlines()[1:]
    missing = [line for line in lines if line.startswith("missing: ")]
    text = " ".join(missing or lines[:1]) or "nothing"
    accused = [re.search(r"rank (\d+)", line) for line in missing]
    accused = (
        {one[1] for one in accused if one} if missing else set(re.findall(r"rank (\d+)", text))
    )
    return Told("hang", text, accused)


def told_by_report(traces: list[Path], folder: Path) -> Told:
    """Say whom a report's hint on a step that took unusually long accuses."""
    merged = folder / "merged.json"
    printed("merge", merged, *traces)
    hints = re.findall(r"^hint: (step .*)$", printed("report", merged), re.MULTILINE)
    text = hints[0] if hints else "no step took unusually long"
    accused = {"link"} if re.search(LINK, text) else set(re.findall(r"rank (\d+)", text))
    return Told("report", text, accused)


def printed(*arguments: str | Path) -> str:
    """Return what a command of `python -m penstock.trace` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        tool.main([str(argument) for argument in arguments])
    return text.getvalue()


# ---- the table ----------------------------------------------------------------------------------


def show(name: str, size: int, given: argparse.Namespace) -> bool:
    """Run a job and print its lines; return whether all name the culprit."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        run_job(name, size, Path(folder), given)
        told = list(all_told(fault, size, Path(folder)))
    culprit = "link" if fault.is_of_link else str(size - 1)
    for one in told:
        seconds = ["-" if at is None else f"{at:.2f}" for at in (one.named, one.ended)]
        names, text = named(one.accused, culprit), one.text
        text = text if len(text) <= SHOWN else text[: SHOWN - 4] + " ..."
        print(ROW.format(fault.title, size, one.who, *seconds, names, text), flush=True)
    return all(culprit in one.accused for one in told)


def named(accused: set[str], culprit: str) -> str:
    """Say whether the culprit is among the accused, and who else is."""
    others = ", ".join(sorted(accused - {culprit}))
    if culprit not in accused:
        return f"NO, but {others}" if others else "NO"
    return f"and {others}" if others else "yes"


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of jobs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds of penstock.shard")
    given = parser.parse_args()
    print(ROW.format("fault", "ranks", "who", "named s", "ended s", "names it", "what it says"))
    results = []
    for name in given.only:
        for size in given.ranks:
            if FAULTS[name].is_captured and given.device == "cpu":
                print(ROW.format(FAULTS[name].title, size, "-", "-", "-", "-", "needs GPUs"))
            else:
                results.append(show(name, size, given))
    print(f"{sum(results)} of {len(results)} faults name their culprit")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
