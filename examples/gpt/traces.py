"""Which steps are traced, and the one file in which all ranks' traces end."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import penstock
from penstock.trace import merge
from torch import nn

from gpt.ranks import Ranks

BEGIN = 4  # early, but after penstock has recorded and planned
STEPS = 3


def split(steps: int) -> tuple[range, range, range]:
    """Cut the training into the steps before, in and after the trace."""
    begin = min(BEGIN, steps - 1)
    end = min(begin + STEPS, steps)
    return range(begin), range(begin, end), range(end, steps)


@contextmanager
def traced(model: nn.Module, ranks: Ranks, file: Path | None) -> Iterator[Path]:
    """Trace what runs inside and merge all ranks' traces into `file` (None: a temporary one).

    Yields the path. The ranks share a file system.
    """
    folder = ranks.share(tempfile.mkdtemp(prefix="penstock-") if ranks.first else None)
    merged = file or Path(folder, "train_gpt.json")
    with penstock.trace(model, Path(folder, "rank{rank}.json")) as own:
        yield merged
    parts = ranks.gather(Path(own))
    if ranks.first:
        merge(parts, merged)
        for part in parts:
            part.unlink()
        if file:
            Path(folder).rmdir()
