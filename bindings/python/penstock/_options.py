"""The options of `shard`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from penstock import _arguments


@dataclass(frozen=True)
class Options:
    """What `shard` was told of how to train; its docstring says what each is."""

    stage: int
    communicator: str
    ranks_per_node: int | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    prefetch_ahead: int
    prefetch_bytes: int | None
    bucket_bytes: int
    part_bytes: int | None
    timeout: float | timedelta
    verify: bool
    time_waits: bool
    broadcast: bool

    def check(self, device: torch.device) -> None:
        """Raise PenstockError (EINVAL) that names the first option that is not what it may be.

        Parameters
        ----------
        device : torch.device
            Where the model is.
        """
        _arguments.check_stage("stage", self.stage)
        _arguments.check_communicator(self.communicator, device)
        if self.ranks_per_node is not None:
            _arguments.check_count("ranks_per_node", self.ranks_per_node, 1)
        _arguments.check_dtype("param_dtype", self.param_dtype)
        _arguments.check_dtype("reduce_dtype", self.reduce_dtype)
        _arguments.check_count("prefetch_ahead", self.prefetch_ahead, 0)
        _arguments.check_bytes("prefetch_bytes", self.prefetch_bytes)
        _arguments.check_bytes("bucket_bytes", self.bucket_bytes, or_none=False)
        _arguments.check_bytes("part_bytes", self.part_bytes)
        _arguments.check_seconds(self.timeout)
        _arguments.check_flag("verify", self.verify)
        _arguments.check_flag("time_waits", self.time_waits)
        _arguments.check_flag("broadcast", self.broadcast)

    @property
    def seconds(self) -> float:
        """The time-out."""
        return _arguments.check_seconds(self.timeout)
