"""The house in figures: files, lines, functions and arrows of each folder of the library.

``figures.py [TREE]`` prints a line a folder of the checkout TREE (this one), what they come to, and
the circles: folders, or files (a source with its header), that include or import one another.
Tests, benches and examples do not count. Ends with status 1 if there is a circle.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("base", "tracing", "sched", "mem", "ops", "include", "bindings")
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".py", ".pyi"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# Formatted code: a function's first line ends with its brace, and its last one is a brace alone.
FUNCTION = re.compile(
    r"^(?![\s}#]|extern|namespace|typedef|struct|enum|union)[^;={}]*\)[^;={}]*\{$"
)


def sources(tree: Path) -> list[Path]:
    """Return the library's files, relative to the tree."""
    listing = subprocess.run(
        ["git", "ls-files", *LIBRARY], cwd=tree, check=True, capture_output=True, text=True
    )
    paths = (Path(name) for name in listing.stdout.splitlines())
    return [path for path in paths if path.suffix in SUFFIXES and (tree / path).is_file()]


def python_lengths(text: str) -> list[int]:
    """Return the lines of each function."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found]


def c_lengths(text: str) -> list[int]:
    """Return the lines of each function that begins in the first column."""
    lengths, begin, head = [], None, ""
    for number, line in enumerate(text.splitlines()):
        if begin is not None:
            if line == "}":
                lengths.append(number - begin + 1)
                begin = None
            continue
        head = f"{head} {line}".strip() if head.count("(") > head.count(")") else line
        if FUNCTION.match(head):
            begin = number - (0 if head == line else 1)
    return lengths


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of names that reach one another."""

    def reached(begin: str) -> set[str]:
        seen: set[str] = set()
        left = [begin]
        while left:
            fresh = arrows.get(left.pop(), set()) - seen
            seen |= fresh
            left += fresh
        return seen

    reach = {name: reached(name) for name in arrows}
    names = {name for name in arrows if name in reach[name]}
    found = {tuple(sorted(n for n in names if n in reach[m] and m in reach[n])) for m in names}
    return sorted(list(group) for group in found if len(group) > 1)


def unit(path: Path) -> str:
    """Return a source's name, which is its header's too."""
    return path.with_suffix("").as_posix()


class House:
    """What is counted of a tree: by folder, and the arrows between folders and between files."""

    def __init__(self, tree: Path) -> None:
        self.files: dict[str, int] = defaultdict(int)
        self.lines: dict[str, int] = defaultdict(int)
        self.lengths: dict[str, list[int]] = defaultdict(list)
        self.between_folders: dict[str, set[str]] = defaultdict(set)
        self.between_files: dict[str, set[str]] = defaultdict(set)
        for path in sources(tree):
            self._add(tree, path)

    def _add(self, tree: Path, path: Path) -> None:
        text = (tree / path).read_text(encoding="utf-8")
        folder = path.parent.as_posix()
        self.files[folder] += 1
        self.lines[folder] += text.count("\n")
        is_python = path.suffix.startswith(".py")
        self.lengths[folder] += python_lengths(text) if is_python else c_lengths(text)
        for other in imported(tree, path, text) | included(tree, path, text):
            if unit(other) != unit(path):
                self.between_files[unit(path)].add(unit(other))
            if other.parent != path.parent:
                self.between_folders[folder].add(other.parent.as_posix())


def included(tree: Path, path: Path, text: str) -> set[Path]:
    """Return the files that a source of C includes."""
    beside = {name: path.parent / name for name in INCLUDE.findall(text)}
    return {at if (tree / at).is_file() else Path(name) for name, at in beside.items()}


def imports_of(text: str) -> Iterator[str]:
    """Yield the package's modules that a module imports, anywhere in it, for type checks too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name.removeprefix("penstock.") for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "penstock":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.removeprefix("penstock.")


def imported(tree: Path, path: Path, text: str) -> set[Path]:
    """Return the files of its package that a Python file imports."""
    if not path.suffix.startswith(".py"):
        return set()
    paths = (path.parent / f"{name}.{end}" for name in imports_of(text) for end in ("py", "pyi"))
    return {other for other in paths if (tree / other).is_file()}


def main() -> int:
    """Print the figures."""
    house = House(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    heading = ("folder", "files", "lines", "functions", "median", "p90", "longest")
    print("{:32}{:>6}{:>8}{:>10}{:>8}{:>6}{:>9}".format(*heading))
    for folder in sorted(house.files):
        print(row(folder, house.files[folder], house.lines[folder], house.lengths[folder]))
    every = [length for lengths in house.lengths.values() for length in lengths]
    title = f"{len(house.files)} folders"
    print(row(title, sum(house.files.values()), sum(house.lines.values()), every))
    status = 0
    for what, arrows in (("folders", house.between_folders), ("files", house.between_files)):
        count = sum(len(others) for others in arrows.values())
        found = circles(arrows)
        print(f"{count} arrows between {what}, {len(found)} circles")
        for group in found:
            print("  " + ", ".join(group))
            status = 1
    return status


def row(name: str, files: int, lines: int, lengths: list[int]) -> str:
    """Return a line of the table."""
    of = sorted(lengths) or [0]
    return (
        f"{name:32}{files:6}{lines:8}{len(lengths):10}{statistics.median(of):8.0f}"
        f"{of[len(of) * 9 // 10]:6}{of[-1]:9}"
    )


if __name__ == "__main__":
    sys.exit(main())
