"""Merge, report and draw traces: ``python -m penstock.trace merge|report|draw|hang|hta|chakra``.

Works on the Chrome trace JSON that Penstock writes, with the standard library alone; the package's
compiled extension is not needed. ``penstock.trace(path)``, which records, is another thing of the
same name: once this module is imported it stands in its place and calls it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock._picture_files import PictureError
from penstock._trace_chakra import write_chakra
from penstock._trace_draw import draw
from penstock._trace_files import TraceError, load
from penstock._trace_hang import Hang, format_hang
from penstock._trace_hang import read as read_hangs
from penstock._trace_hta import write_hta
from penstock._trace_html import write_html
from penstock._trace_merge import merge
from penstock._trace_report import report
from penstock._trace_text import format_report

__all__ = [
    "TraceError",
    "draw",
    "dump",
    "format_report",
    "load",
    "main",
    "merge",
    "report",
    "write_chakra",
    "write_hta",
    "write_html",
]


def dump(folder: str | os.PathLike[str] | None = None, reason: str = "") -> list[str]:
    """Write this rank's flight records: what each engine has done last, and has under way.

    It needs no other rank and no trace; ``python -m penstock.trace hang FOLDER`` reads the files of
    all ranks together. Failures write them by themselves where the environment variable
    ``PENSTOCK_DUMP`` names a folder, and so does SIGTERM.

    Parameters
    ----------
    folder : str or path, optional
        Where to, made if it is not there; left out: where ``PENSTOCK_DUMP`` says. A rank has one
        file an engine in it, which is replaced.
    reason : str
        Stands in the files.

    Returns
    -------
    list of str
        The files, one an engine of this process.

    Raises
    ------
    PenstockError
        EINVAL without a folder, EIO where a file cannot be written.
    """
    write = importlib.import_module("penstock._dump").dump_all
    return write(None if folder is None else os.fspath(folder), reason, is_failure=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock.trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("merge", help="put the traces of several ranks into one file")
    one.add_argument("out")
    one.add_argument("traces", nargs="+", help="files, or folders of them")
    one = commands.add_parser("report", help="exposed communication, stragglers, busy lanes")
    one.add_argument("trace")
    one.add_argument("--step", type=int, help="only this step, from 0 (default: all there is)")
    one.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="as JSON, printed if no file is named"
    )
    one.add_argument("--html", metavar="FILE", help="as a page with a picture of a step")
    one = commands.add_parser("hang", help="who is missing, by the dumps of all ranks")
    one.add_argument("folder", help="where the ranks have written them")
    one.add_argument("--json", action="store_true", help="as JSON")
    one = commands.add_parser("hta", help="files for Holistic Trace Analysis, one a rank")
    one.add_argument("trace")
    one.add_argument("folder", help="where to write them")
    one = commands.add_parser("chakra", help="Chakra's execution traces, one a rank")
    one.add_argument("trace")
    one.add_argument("folder", help="where to write them")
    one = commands.add_parser("draw", help="a picture of a step, SVG or PNG")
    one.add_argument("trace")
    one.add_argument(
        "out", help="the file: PNG if its name ends in .png (wants resvg-py), else SVG"
    )
    one.add_argument("--step", type=int, help="which step, from 0 (default: the middle one)")
    one.add_argument("--width", type=int, default=1400, help="in pixels (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "merge":
            print(_format_skews(merge(options.traces, options.out)), end="")
        elif options.command == "draw":
            draw(options.trace, options.out, options.step, options.width)
        elif options.command == "hta":
            write_hta(options.trace, options.folder)
        elif options.command == "chakra":
            write_chakra(options.trace, options.folder)
        elif options.command == "hang":
            print(_told(read_hangs(options.folder), as_json=options.json), end="")
        else:
            _report(options)
    except (TraceError, PictureError, OSError) as error:
        print(f"penstock.trace: {error}", file=sys.stderr)
        return 2
    return 0


def _report(options: argparse.Namespace) -> None:
    """Print the report, or write it to the files that are named."""
    if options.html:
        write_html(options.trace, options.html, options.step)
    if options.html and not options.json:
        return
    result = report(options.trace, options.step)
    text = json.dumps(result, indent=2) if options.json else format_report(result)
    if options.json in (None, "-"):
        print(text)
    else:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


def _told(hangs: list[Hang], *, as_json: bool) -> str:
    if as_json:
        return json.dumps([hang.as_dict() for hang in hangs], indent=2) + "\n"
    return "\n".join(map(format_hang, hangs))


def _format_skews(behind: dict[int, float]) -> str:
    lines = []
    for rank, by in behind.items():
        where = "behind" if by > 0 else "ahead"
        lines.append(f"rank {rank}: its clock was {abs(by) / 1000:.3f} ms {where}, and was set\n")
    return "".join(lines)


class _CallableModule(types.ModuleType):
    """Keeps ``penstock.trace(path)`` working after ``import penstock.trace``."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("penstock._tracing").trace(*arguments, **options)


if __name__ == "__main__":
    sys.exit(main())
else:
    sys.modules[__name__].__class__ = _CallableModule
