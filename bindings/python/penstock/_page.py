"""The page of a rank, as other processes read it: the layout of ``penstock/page.h``.

What is in a page is there at once, and stays for whoever has mapped it when the rank is stopped or
killed. Needs neither torch nor the library.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

BYTES = 65536
_MAGIC = int.from_bytes(b"pst-page", "little")
_VERSION = 1
_LANES = 16
_LINK = "/memfd:penstock"
_TRIES = 100  # to read lanes that are not being written
PHASES = ("", "forward", "recompute", "backward", "optimizer", "captured step")  # by pst_phase


def _words(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_uint64) for name in names.split()]


class Place(ctypes.Structure):
    """Where the program is: ``pst_page_place``."""

    _fields_ = _words("count place since steps steps_ns step_began")


class Figures(ctypes.Structure):
    """What an engine has done, and its memory: ``pst_page_engine``."""

    _fields_ = _words(
        "passes gathers gather_bytes reduces reduce_bytes all_reduces all_reduce_bytes exposed_ns "
        "stalled_ns timed_waits untimed_waits shard_bytes gathered_bytes bucket_bytes"
    )


class Lane(ctypes.Structure):
    """A lane, and its oldest task: ``pst_page_lane``."""

    _fields_ = [
        ("name", ctypes.c_char * 32),
        ("task", ctypes.c_char * 64),
        *_words("ticket since ended bytes busy_ns"),
    ]


class Head(ctypes.Structure):
    """A page but for the names: ``pst_page``."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("head_bytes", ctypes.c_uint32),
        ("pid", ctypes.c_int64),
        ("descriptor", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("unit_count", ctypes.c_uint32),
        ("job", ctypes.c_char * 128),
        ("place", Place),
        ("engine", Figures),
        *_words("pinned_bytes looked sequence lane_count"),
        ("lanes", Lane * _LANES),
    ]


def open_page(pid: int, descriptor: int) -> mmap.mmap | None:
    """Map the page of another process, or of this one; None: it is not to be read."""
    if descriptor < 0:
        return None
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            return mmap.mmap(file.fileno(), BYTES, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None


def read_page(page: mmap.mmap) -> Head | None:
    """Copy what a page says; None: no runtime has it, or it has another layout."""
    head = copy_head(page)
    is_known = head.version == _VERSION and head.head_bytes == ctypes.sizeof(Head)
    return head if head.magic == _MAGIC and is_known else None


def copy_head(page: mmap.mmap | memoryview) -> Head:
    """Copy a page whose layout is known; lanes of one moment."""
    for _ in range(_TRIES):  # an odd number that stays: its process was stopped as it wrote
        before = _sequence_of(page)
        head = Head.from_buffer_copy(page)
        if before % 2 == 0 and _sequence_of(page) == before:
            break
    return head


def _sequence_of(page: mmap.mmap | memoryview) -> int:
    at = Head.sequence.offset
    return int.from_bytes(page[at : at + 8], "little")


def unit_names(page: mmap.mmap, head: Head) -> list[str]:
    """Return what the units are called, by number."""
    names = page[head.head_bytes : BYTES].split(b"\0", head.unit_count)[: head.unit_count]
    return [text_of(name) for name in names]


def text_of(text: bytes) -> str:
    """Decode a text that may be cut in a character."""
    return text.decode("utf-8", "backslashreplace")


class Position:
    """A place taken apart.

    Attributes
    ----------
    step : int
        Its number, from 0.
    phase : str
        Empty before the first forward.
    unit : str
        Empty: all of the model.
    is_behind : bool
        Whether the program has left it.
    """

    def __init__(self, place: int, names: list[str]) -> None:
        unit, phase = place >> 8 & 0xFFFFFF, place >> 1 & 0x7F
        self.step = place >> 32
        self.phase = PHASES[phase] if phase < len(PHASES) else ""
        self.unit = names[unit] if 0 < unit < len(names) else ""
        self.is_behind = bool(place & 1)


def find_pages() -> Iterator[tuple[int, mmap.mmap]]:
    """Yield the pages of this user's processes, with the processes' ids."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended, or is not to be looked into
                yield from _pages_of(int(folder.name))


def _pages_of(pid: int) -> Iterator[tuple[int, mmap.mmap]]:
    folder = f"/proc/{pid}/fd"
    if os.stat(folder).st_uid != os.geteuid():
        return
    own = None
    for name in os.listdir(folder):
        try:
            is_page = os.readlink(f"{folder}/{name}").startswith(_LINK)
        except OSError:  # closed meanwhile
            continue
        page = open_page(pid, int(name)) if is_page else None
        head = read_page(page) if page is not None else None
        if page is None or head is None:
            continue
        own = _own_pid(pid) if own is None else own
        if (head.pid, head.descriptor) == (own, int(name)):  # and not a child's copy
            yield pid, page


def _own_pid(pid: int) -> int:
    """Return the id that a process has in its own namespace."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def state_of(pid: int) -> str:
    """Say what is wrong with a process of this machine, if anything is."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has ended"
    words = {"T": "is stopped", "t": "is stopped", "Z": "has ended", "X": "has ended"}
    return words.get(stat.rpartition(")")[2].split()[0], "")
