"""Checks of the tree that no compiler makes: layers, circles, calls, machine paths, file lengths.

Prints one line a finding, ``path:line: what``, and ends with status 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from figures import INCLUDE, ROOT, House, circles

# The folders of the library, and which others each may include. Arrows run down only: a folder
# stands below all that names it, so there is no circle.
FOLDERS: dict[str, tuple[str, ...]] = {
    "base": (),
    "tracing": ("base",),
    "sched/device": ("base",),
    "sched": ("base", "tracing", "sched/device"),
    "sched/cuda": ("base", "sched/device", "sched"),
    "mem": ("base", "tracing", "sched/device", "sched"),
    "ops/comm": ("base", "sched"),
    "ops/comm/local": ("base", "sched", "ops/comm"),
    "ops/comm/ce": ("base", "sched/device", "sched", "ops/comm"),
    "ops/comm/nccl": ("base", "sched/device", "sched", "sched/cuda", "ops/comm"),
    "ops/comm/join": ("base", "sched", "ops/comm"),
    "ops/transfer": ("base", "tracing", "sched/device", "sched", "mem"),
    "ops/zero": ("base", "sched", "mem", "ops/transfer"),
    "ops/deepcompile": ("base", "sched", "mem", "ops/transfer"),
    "ops/offload": ("base", "sched/device", "sched"),
    "ops/optim": ("base", "sched/device", "sched"),
}
LAYERS = {folder.split("/")[0] for folder in FOLDERS}
MAX_LINES = 700

FORBIDDEN = re.compile(r"(?<![.>\w])(assert|f?printf|f?puts|perror|abort|_?exit|quick_exit)\(")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|tmp/\w+)/")
COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def tracked_files() -> list[Path]:
    """Return what git tracks, relative to the root, without what was removed but not committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = (Path(name) for name in listing.stdout.split("\0") if name)
    return [path for path in paths if (ROOT / path).is_file()]


def without_comments(text: str) -> str:
    """Blank comments and strings, and keep the lines where they are."""
    return COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def bad_include(path: Path, included: str) -> str | None:
    """Say what is wrong with ``#include "included"`` in this file, or None."""
    folder, other = path.parent.as_posix(), Path(included).parent.as_posix()
    if path.parts[0] == "bindings":
        return "bindings include public headers only" if other in FOLDERS else None
    if other not in FOLDERS:
        return "write it from the root of the tree, folder/file.h"
    if folder not in FOLDERS:
        return f"tools/check_layers.py does not know {folder}/"
    return None if other in (folder, *FOLDERS[folder]) else f"{folder}/ may not use {other}/"


def bad_table() -> Iterator[str]:
    """Yield what would let a circle into FOLDERS: a name that does not stand above."""
    known: set[str] = set()
    for folder, others in FOLDERS.items():
        yield from (f"tools/check_layers.py:1: {folder} uses {o}" for o in set(others) - known)
        known.add(folder)


def check_layer(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield findings on the includes and calls of a file of the library or the bindings."""
    layer = path.parts[0]
    for number, line in enumerate(text.splitlines(), 1):
        include = INCLUDE.match(line)
        problem = include and bad_include(path, include[1])
        if include and problem:
            yield number, f'#include "{include[1]}": {problem}'
    if layer in LAYERS:
        for number, line in enumerate(without_comments(text).splitlines(), 1):
            for call in FORBIDDEN.findall(line):
                yield number, f"{call}() in the library: return a status instead"


def circles_of_files() -> Iterator[str]:
    """Yield files of the library, sources with their headers, that include or import each other."""
    for group in circles(House(ROOT).between_files):
        yield f"{group[0]}:1: files include each other: {', '.join(group)}"


def check_any(text: str) -> Iterator[tuple[int, str]]:
    """Yield findings that are ones in every file."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if MACHINE_PATH.search(line):
            yield number, "a path of one machine"
    if len(lines) > MAX_LINES:
        yield len(lines), f"longer than {MAX_LINES} lines: one concept a file"


def findings() -> Iterator[str]:
    """Yield every finding of the tree."""
    yield from bad_table()
    yield from circles_of_files()
    for path in tracked_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found = list(check_any(text))
        is_code = path.suffix in {".c", ".h", ".cpp"}
        if is_code and path.parts[0] in (*LAYERS, "bindings"):
            found += check_layer(path, text)
        yield from (f"{path}:{number}: {what}" for number, what in found)


def main() -> int:
    """Print the findings."""
    found = list(findings())
    print("\n".join(found) if found else "layers, circles, calls, paths, lengths: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
