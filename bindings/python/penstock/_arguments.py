"""Checks of arguments; an error names the argument, its value and the values allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import nn

from penstock._errors import PenstockError

OFFLOADS = ("optimizer", "parameters", "activations")
COMMUNICATORS = ("auto", "ce", "nccl", "crossover", "hierarchy")
_OF_GPUS = ("ce", "nccl", "crossover")
_MOST = 2**32 - 1  # what the engine counts in
_LONGEST = 10**9  # seconds


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise the error that an argument is not what it may be."""
    raise PenstockError("EINVAL", f"{name}={value!r}: {allowed}")


def check_model(model: Any) -> None:
    """Raise unless it is a module."""
    if not isinstance(model, nn.Module):
        refuse("model", model, "give an nn.Module")


def check_flag(name: str, value: Any) -> None:
    """Raise unless it is True or False."""
    if not isinstance(value, bool):
        refuse(name, value, "give True or False")


def check_count(name: str, value: Any, least: int, most: int = _MOST) -> None:
    """Raise unless it is a whole number within these limits."""
    if not _is_whole(value) or not least <= value <= most:
        refuse(name, value, f"give a whole number, {least} or more and at most {most}")


def check_bytes(name: str, value: Any, *, or_none: bool = True) -> None:
    """Raise unless it is a number of bytes, 1 or more; or None, where that is allowed."""
    if value is None and or_none:
        return
    if not _is_whole(value) or not 1 <= value < 2**63:
        leave_out = ", or leave it out" if or_none else ""
        refuse(name, value, f"give a number of bytes, 1 or more{leave_out}")


def check_memory(memory: Any, device: torch.device) -> None:
    """Raise unless it can be measured on that device."""
    is_fraction = isinstance(memory, float) and 0 < memory <= 1
    is_bytes = _is_whole(memory) and 1 <= memory < 2**63
    is_auto = isinstance(memory, str) and memory == "auto"
    if not is_auto and not is_fraction and not is_bytes:
        refuse(
            "memory", memory, "give a number of bytes, 1 or more, a fraction, up to 1.0, or 'auto'"
        )
    if device.type != "cuda" and not is_bytes:
        refuse(
            "memory",
            memory,
            f"the model is on {device}, where nobody counts what a step takes: give the bytes that "
            "may be taken beside it",
        )


def check_stage(name: str, value: Any) -> None:
    """Raise unless it is one of 1, 2, 3."""
    if not _is_whole(value) or value not in (1, 2, 3):
        refuse(name, value, "ZeRO has the stages 1, 2 and 3")


def check_dtype(name: str, value: Any) -> None:
    """Raise unless it is None or a dtype that can be computed with."""
    if value is None:
        return
    is_float = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1
    if not is_float:
        refuse(name, value, "give a floating-point dtype of 16 bits or more, as torch.bfloat16")


def check_communicator(name: Any, device: torch.device) -> None:
    """Raise unless there is a communicator of that name for models on that device."""
    if name not in COMMUNICATORS:
        refuse("communicator", name, f"give one of {', '.join(map(repr, COMMUNICATORS))}")
    if name in _OF_GPUS and device.type != "cuda":
        refuse(
            "communicator",
            name,
            f"it moves the data of GPUs, and the model is on {device}: leave it out, or move the "
            "model to a GPU before shard",
        )


def check_offload(offload: Any) -> None:
    """Raise unless it is None or says what lies on the host."""
    if offload is None:
        return
    names = offload if isinstance(offload, (list, tuple)) else [offload]
    if not all(name in OFFLOADS for name in names):
        some = ", ".join(map(repr, OFFLOADS))
        refuse("offload", offload, f"give one or several of {some}, or leave it out")


def check_seconds(timeout: Any) -> float:
    """Return a time-out in seconds; raise unless it is one."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or math.isnan(seconds) or not 0 < seconds <= _LONGEST:
        refuse(
            "timeout", timeout, f"give seconds, more than 0 and at most {_LONGEST}, or a timedelta"
        )
    return float(seconds)


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Options:
    """The options of `shard`, as its docstring describes them."""

    stage: int
    communicator: str
    ranks_per_node: int | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    prefetch_ahead: int
    prefetch_bytes: int | None
    bucket_bytes: int
    part_bytes: int | None
    timeout: float | timedelta
    verify: bool
    time_waits: bool
    broadcast: bool
    checkpoint: Any
    memory: str | int | float | None
    offload: str | Sequence[str] | None
    keep_copies: bool

    def check(self, device: torch.device) -> None:
        """Raise PenstockError (EINVAL) that names the first option that is not what it may be.

        Parameters
        ----------
        device : torch.device
            Where the model is.
        """
        check_stage("stage", self.stage)
        check_communicator(self.communicator, device)
        if self.ranks_per_node is not None:
            check_count("ranks_per_node", self.ranks_per_node, 1)
        if self.param_dtype != torch.float8_e4m3fn:  # of which bfloat16 is made
            check_dtype("param_dtype", self.param_dtype)
        check_dtype("reduce_dtype", self.reduce_dtype)
        check_dtype("output_dtype", self.output_dtype)
        check_count("prefetch_ahead", self.prefetch_ahead, 0)
        check_bytes("prefetch_bytes", self.prefetch_bytes)
        check_bytes("bucket_bytes", self.bucket_bytes, or_none=False)
        check_bytes("part_bytes", self.part_bytes)
        check_seconds(self.timeout)
        check_flag("verify", self.verify)
        check_flag("time_waits", self.time_waits)
        check_flag("broadcast", self.broadcast)
        check_offload(self.offload)
        check_flag("keep_copies", self.keep_copies)
        if self.budget is not None:
            check_memory(self.budget, device)
            if self.offloads_shards:
                self.refuse_budget("nothing is measured with offload=: leave one of them out")

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What lies in the host's memory."""
        one = isinstance(self.offload, str)
        return (self.offload,) if one else tuple(self.offload or ())  # type: ignore[return-value]

    @property
    def offloads_shards(self) -> bool:
        """Whether shards, their gradients and the optimizer's states do."""
        return "optimizer" in self.offloaded or "parameters" in self.offloaded

    @property
    def offloads_activations(self) -> bool:
        """Whether activations do: of blocks by plan, of those that are named by hand, or of all."""
        return "activations" in self.offloaded

    @property
    def makes_copies(self) -> bool:
        """Whether what peers read, where it is no shard, is made anew for each gather."""
        return "parameters" in self.offloaded or not self.keep_copies

    @property
    def used_dtype(self) -> torch.dtype | None:
        """What modules compute in: that of float8 parameters is made of them."""
        return torch.bfloat16 if self.param_dtype == torch.float8_e4m3fn else self.param_dtype

    @property
    def recomputes_by_plan(self) -> bool:
        """Whether it is measured which blocks recompute their activations."""
        return isinstance(self.checkpoint, str) and self.checkpoint == "auto"

    @property
    def selects(self) -> bool:
        """Whether all blocks recompute what is cheap to recompute, and that alone."""
        return isinstance(self.checkpoint, str) and self.checkpoint == "selective"

    @property
    def budget(self) -> str | int | float | None:
        """What may be taken, by what is measured; None: nothing is measured."""
        return "auto" if self.memory is None and self.recomputes_by_plan else self.memory

    def refuse_budget(self, why: str) -> NoReturn:
        """Raise the error that the argument which asks for a budget may not be given."""
        argument = "checkpoint" if self.memory is None else "memory"
        refuse(argument, getattr(self, argument), why)

    @property
    def seconds(self) -> float:
        """The time-out."""
        return check_seconds(self.timeout)
