"""`trace`: record what a sharded model's lanes do, as a Chrome trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock._arguments import check_model, refuse
from penstock._engine import engine_of
from penstock._errors import PenstockError

PathLike = str | os.PathLike[str]


@contextmanager
def trace(model: nn.Module | PathLike | None = None, path: PathLike | None = None) -> Iterator[str]:
    """Record what happens inside, and write it as a Chrome trace that Perfetto opens.

    Each rank writes a file of its own; ``penstock.trace.merge`` makes one of them.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out (``trace(path)``) while only one lives.
    path : str or path
        The file; ``{rank}`` in it becomes the rank.

    Yields
    ------
    str
        The path of this rank's file.
    """
    if isinstance(model, (str, os.PathLike)):
        model, path = None, model
    if model is not None:
        check_model(model)
    if path is None:
        raise PenstockError("EINVAL", "trace: say which file to write: trace(model, path)")
    if not isinstance(path, (str, os.PathLike)):
        refuse("path", path, "give the file to write, a str or a path")
    engine = engine_of(model)

    def finish() -> None:
        if engine.world.device.type == "cuda":
            torch.cuda.synchronize(engine.world.device)  # what is in flight belongs to it
            engine.native.stats()  # reads what was timed

    engine.is_traced = True
    try:
        with recorded(engine.runtime, path, engine.world.rank, finish) as own:
            yield own
    finally:
        engine.is_traced = False


@contextmanager
def recorded(source: Any, path: PathLike, rank: int, finish: Callable[[], None]) -> Iterator[str]:
    """Record what a source of traces does, up to the end of `finish`; yield this rank's path."""
    own = os.fspath(path).replace("{rank}", str(rank))
    source.trace_start()
    try:
        yield own
    finally:
        finish()
        source.trace_stop()
    source.trace_write(own)
