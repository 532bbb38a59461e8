"""A page of memory that says where a rank is, for the other ranks of its machine to read.

What is in it is there at once, and stays for whoever has mapped it when the rank is stopped or
killed. Writing to it is a store to memory.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

BYTES = mmap.PAGESIZE


class Page:
    """The page of this rank, of three numbers.

    Parameters
    ----------
    is_shared : bool
        Whether others may read it.

    Attributes
    ----------
    words : memoryview
        How many places it has been at, which one it is at, and since when (``monotonic_ns``).
    descriptor : int
        What others open; -1: no one can.
    """

    def __init__(self, is_shared: bool) -> None:
        self.descriptor = -1
        memory: mmap.mmap | bytearray = bytearray(BYTES)
        if is_shared:
            with suppress(OSError, AttributeError):  # no descriptor is left; not on Linux
                self.descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
                os.ftruncate(self.descriptor, BYTES)
                memory = mmap.mmap(self.descriptor, BYTES)
        self.words = memoryview(memory).cast("Q")

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def open_page(pid: int, descriptor: int) -> memoryview | None:
    """Return the words of another process's page; None: it is not to be read."""
    if descriptor < 0:
        return None
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), BYTES, prot=mmap.PROT_READ)).cast("Q")
    except (OSError, ValueError):
        return None
