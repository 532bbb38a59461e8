"""What the training prints: a progress bar, what a rank holds, and the closing tables."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

import penstock
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gpt.check import Comparison

BAR = 24
PLAIN_LINES = 10  # about so many where the output is no terminal


class Progress:
    """One line that is drawn over and over; a few plain lines where the output is no terminal."""

    def __init__(self, label: str, steps: int, output: TextIO | None = None) -> None:
        self.label = label
        self.steps = steps
        self.output = output or sys.stdout
        self.terminal = self.output.isatty()
        self.every = max(1, steps // PLAIN_LINES)

    def show(self, step: int, text: str = "") -> None:
        """Report that the step with index `step` is over."""
        done = step + 1
        counter = f"{self.label} {done:{len(str(self.steps))}}/{self.steps}"
        if self.terminal:
            bar = "#" * (BAR * done // self.steps)
            end = "\n" if done == self.steps else ""
            self.output.write(f"\r\033[K{counter} [{bar:-<{BAR}}] {text}{end}")
        elif done % self.every == 0 or done in (1, self.steps):
            self.output.write(f"{counter} {text}".rstrip() + "\n")
        self.output.flush()


@dataclass(frozen=True)
class Held:
    """Bytes of tensors that a process holds, counted by their storages."""

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def measure(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> "Held":
        """Count what is there now; call it after a step and a backward."""
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return cls(*(storage_bytes(tensors) for tensors in (parameters, gradients, states)))

    @classmethod
    def most(cls, held: Iterable["Held"]) -> "Held":
        """Return the largest of each over several ranks."""
        held = list(held)
        return cls(
            max(h.parameters for h in held),
            max(h.gradients for h in held),
            max(h.optimizer for h in held),
        )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages on this rank that the tensors lie in."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def speed(tokens: int, seconds: float, exposed: float) -> str:
    """Tokens a second and the share of the time in which the compute waited for communication."""
    return f"{tokens / seconds:,.0f} tokens/s  exposed {exposed / seconds:.1%}"


def size(count: float) -> str:
    """Return bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows in columns, the first to the left and the others to the right."""
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, columns[1:], strict=True)]
        lines.append("  ".join([f"{first:<{columns[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def memory_table(rank: Held, unsharded: Held, stats: penstock.Stats) -> str:
    """Lay out what a rank holds beside what one process holds that trains unsharded."""
    rows = [("bytes held", "a rank", "unsharded", "share")]
    for name, ours, whole in (
        ("parameters", rank.parameters, unsharded.parameters),
        ("  gathered, at most", stats.arena_peak, unsharded.parameters),
        ("gradients", rank.gradients, unsharded.gradients),
        ("  in buckets, at most", stats.bucket_peak, unsharded.gradients),
        ("optimizer state", rank.optimizer, unsharded.optimizer),
    ):
        share = f"{ours / whole:.1%}" if whole else "-"
        rows.append((name, size(ours), size(whole), share))
    return table(rows)


def communication_table(stats: penstock.Stats) -> str:
    """Lay out how often and how much was gathered and reduced, and what of it the compute felt."""
    rows = [("communication", "count", "bytes", "waited for")]
    for name, count, volume, exposed in (
        ("gather", stats.gathers, stats.gather_bytes, stats.exposed_gather_ns),
        ("reduce", stats.reduces, stats.reduce_bytes, stats.exposed_reduce_ns),
    ):
        rows.append((name, f"{count:,}", size(volume), f"{exposed / 1e9:.2f} s"))
    return table(rows)


def arena_line(stats: penstock.Stats) -> str:
    """Say how much of the arena was in use at most, beside what was planned."""
    plan, bound = stats.plan_peak, stats.plan_lower_bound
    return f"arena   peak {size(stats.arena_peak)}, planned {size(plan)}, lower bound {size(bound)}"


def comparison_table(comparisons: Iterable[Comparison]) -> str:
    """Lay out the worst deviation of each kind, with its limit and its name."""
    rows = [("against unsharded", "worst", "limit", "", "at")]
    for c in comparisons:
        verdict = "ok" if c.passed else "FAILED"
        rows.append((c.what, f"{c.deviation:.1e}", f"{c.limit:.0e}", verdict, c.name))
    return table(rows)
