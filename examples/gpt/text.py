"""Training text as bytes, and the batches drawn from it."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

STANDARD_LIBRARY_BYTES = 4 << 20
CPU = torch.device("cpu")


def standard_library(limit: int = STANDARD_LIBRARY_BYTES) -> bytes:
    """Return at most `limit` bytes of the standard library's modules, in order of name."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


def load(file: Path | None, sequence: int) -> Tensor:
    """Read `file`, or the standard library, into a uint8 tensor.

    Raises ValueError when it is too short for one sequence of `sequence` bytes and its target.
    """
    text = file.read_bytes() if file else standard_library()
    if len(text) < sequence + 1:
        source = file or "the standard library's sources (none found? name a file with --text)"
        raise ValueError(f"{source}: {len(text)} bytes of text, {sequence + 1} are needed")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Random windows of a text. Batch (step, rank) is the same on whatever rank it is asked for."""

    def __init__(
        self, text: Tensor, batch: int, sequence: int, seed: int, device: torch.device = CPU
    ) -> None:
        self.text = text
        self.batch = batch
        self.sequence = sequence
        self.seed = seed
        self.device = device

    def draw(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, both int64 of shape [batch, sequence]."""
        generator = torch.Generator().manual_seed(hash((self.seed, step, rank)))
        starts = torch.randint(len(self.text) - self.sequence, (self.batch, 1), generator=generator)
        windows = self.text[starts + torch.arange(self.sequence + 1)].long().to(self.device)
        return windows[:, :-1], windows[:, 1:]
