"""Checks of the tree that no compiler makes: layers, forbidden calls, machine paths, file lengths.

Prints one line a finding, ``path:line: what``, and ends with status 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("base", "tracing", "sched", "mem", "ops")  # a layer includes itself and what is before it
MAX_LINES = 700

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
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


def bad_include(layer: str, included: str) -> str | None:
    """Say what is wrong with ``#include "included"`` in this layer, or None."""
    target = Path(included).parts[0]
    if layer == "bindings":
        return "bindings include public headers only" if target in LAYERS else None
    if "/" not in included or target not in LAYERS:
        return "write it from the root of the tree, layer/file.h"
    if LAYERS.index(target) > LAYERS.index(layer):
        return f"{layer}/ may not use {target}/, which is above it"
    return None


def check_layer(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield findings on the includes and calls of a file of the library or the bindings."""
    layer = path.parts[0]
    for number, line in enumerate(text.splitlines(), 1):
        include = INCLUDE.match(line)
        problem = include and bad_include(layer, include[1])
        if include and problem:
            yield number, f'#include "{include[1]}": {problem}'
    if layer in LAYERS:
        for number, line in enumerate(without_comments(text).splitlines(), 1):
            for call in FORBIDDEN.findall(line):
                yield number, f"{call}() in the library: return a status instead"


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
    print("\n".join(found) if found else "layers, calls, paths, lengths: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
