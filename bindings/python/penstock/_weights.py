"""Files of weights: which tensors are in them, and the rows of these that a rank wants."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock._errors import PenstockError

_PIECE_BYTES = 4 << 20  # which are read at once, and copied while they are in the cache
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"

# What the format calls the dtypes that torch has.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Stored(NamedTuple):
    """What a tensor in a file is like."""

    dtype: torch.dtype
    shape: torch.Size


@dataclass
class Wanted:
    """Where a stored tensor goes.

    Attributes
    ----------
    whole : torch.Tensor
        All of it: a DTensor, or a plain tensor that has all rows.
    rows : torch.Tensor
        Those of this rank, in the memory of `whole`.
    block : tuple of slice
        Which of the whole tensor they are, and which part of each.
    """

    whole: torch.Tensor
    rows: torch.Tensor
    block: tuple[slice, ...]

    @property
    def first(self) -> int:
        """The number of the first row."""
        return self.block[0].start if self.block else 0

    def room(self) -> torch.Tensor:
        """Return memory for whole rows, contiguous: that of `rows` where it is such."""
        shape = (*self.rows.shape[:1], *self.whole.shape[1:])
        return self.rows.contiguous() if shape == self.rows.shape else self.rows.new_empty(shape)


Note = Callable[[int], None]  # so many bytes are in their place


class Weights(Protocol):
    """Opened files of weights.

    Attributes
    ----------
    stored : dict of str and Stored
        The tensors that are in them, by name.
    """

    stored: dict[str, Stored]

    def read(self, wanted: dict[str, Wanted], note: Note) -> None:
        """Copy rows of stored tensors, by name, to where they are wanted."""


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """Open a file of weights, or a folder of them.

    Parameters
    ----------
    path : str or path
        A file of safetensors, an index of several, a folder with ``model.safetensors`` or its
        index, or a folder that ``torch.distributed.checkpoint`` has written.

    Returns
    -------
    Weights
    """
    where = Path(path)
    if not where.is_dir():
        return Safetensors(_indexed(where) if where.suffix == ".json" else [where])
    if (where / ".metadata").exists():
        return Checkpoint(where)
    if (where / _INDEX).exists():
        return Safetensors(_indexed(where / _INDEX))
    if (where / _SINGLE).exists():
        return Safetensors([where / _SINGLE])
    raise PenstockError(
        "EINVAL",
        f"folder {str(path)!r} has neither {_INDEX!r} nor {_SINGLE!r}, nor '.metadata' as "
        "torch.distributed.checkpoint writes it: give the file itself",
    )


# ---- safetensors ---------------------------------------------------------------------------------


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index names."""
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, f"it is no index of safetensors ({error})") from error
    return [index.parent / name for name in sorted(set(names))]


def _damaged(path: Path, why: str) -> PenstockError:
    return PenstockError("EINVAL", f"file {str(path)!r} cannot be read: {why}")


class Safetensors:
    """Files of safetensors: each a header in JSON, which says where what lies, and then the rows.

    Parameters
    ----------
    paths : iterable of Path
        The files.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.stored: dict[str, Stored] = {}
        self._places: dict[str, tuple[Path, int]] = {}  # file, and offset in it
        for path in paths:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if length > size - 8:
                    raise _damaged(path, "it is no file of safetensors, or is cut off")
                try:
                    self._note(path, json.loads(file.read(length)), 8 + length, size)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise _damaged(path, f"its header is none of safetensors ({error})") from error

    def _note(self, path: Path, header: dict[str, Any], at: int, size: int) -> None:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise _damaged(
                    path, f"{name!r} has the dtype {entry['dtype']}, torch has none such"
                )
            stored = Stored(_DTYPES[entry["dtype"]], torch.Size(entry["shape"]))
            begin, end = entry["data_offsets"]
            if end - begin != stored.shape.numel() * stored.dtype.itemsize or at + end > size:
                raise _damaged(path, f"{name!r} is not all there")
            self.stored[name] = stored
            self._places[name] = path, at + begin

    def read(self, wanted: dict[str, Wanted], note: Note) -> None:
        """Copy rows piece by piece, in the order of the files."""
        piece = bytearray(_PIECE_BYTES)
        order = sorted(wanted, key=lambda name: self._places[name])
        for path, names in groupby(order, key=lambda name: self._places[name][0]):
            with path.open("rb", buffering=0) as file:
                for name in names:
                    stored, want = self.stored[name], wanted[name]
                    row_bytes = stored.shape[1:].numel() * stored.dtype.itemsize
                    file.seek(self._places[name][1] + want.first * row_bytes)
                    rows = want.room()
                    is_cut = rows.shape != want.rows.shape
                    counted = _ignore if is_cut else note
                    _read_rows(file, stored.dtype, rows.view(-1), piece, counted)
                    if is_cut:
                        columns = (slice(None), *want.block[1:])
                        rows = rows[columns]
                        note(want.rows.nbytes)
                    if rows is not want.rows:
                        want.rows.copy_(rows)


def _ignore(count: int) -> None:
    pass


def _read_rows(
    file: FileIO, dtype: torch.dtype, rows: torch.Tensor, piece: bytearray, note: Note
) -> None:
    """Read rows, flat, from where the file is; `piece` is what they pass through."""
    source = torch.frombuffer(piece, dtype=dtype)
    for target in rows.split(len(source)) if rows.numel() else ():
        size = len(target) * dtype.itemsize
        begin = 0
        while begin < size:
            count = file.readinto(memoryview(piece)[begin:size])
            if not count:
                raise _damaged(Path(cast(str, file.name)), "it has become shorter")
            begin += count
        target.copy_(source[: len(target)])
        note(target.nbytes)


# ---- torch.distributed.checkpoint ----------------------------------------------------------------


class Checkpoint:
    """A folder of ``torch.distributed.checkpoint``, by torch's own reader.

    That reads whole chunks, as the ranks have written them, of which a rank wants some rows.

    Parameters
    ----------
    folder : Path
        Which has a file ``.metadata``.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self.stored = {
            name: Stored(kind.properties.dtype, kind.size)
            for name, kind in self._metadata.state_dict_metadata.items()
            if isinstance(kind, TensorStorageMetadata)
        }

    def read(self, wanted: dict[str, Wanted], note: Note) -> None:
        """Copy rows, each rank by itself: ``torch.distributed.checkpoint.load`` asks all ranks."""
        planner = _NotingPlanner(note)
        whole: dict[str, Any] = {name: want.whole for name, want in wanted.items()}
        planner.set_up_planner(whole, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


class _NotingPlanner(DefaultLoadPlanner):
    """Notes how many bytes have come."""

    def __init__(self, note: Note) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._note = note

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """Note what the reader has copied."""
        self._note(tensor.nbytes)
