"""Penstock: sharded training whose compute never waits for parameters.

    import penstock
    penstock.shard(model, stage=3)

and then an ordinary training loop. Names are imported when they are first used, so that
``python -m penstock.trace`` and ``penstock.plan`` (but for ``predict``) need neither torch nor the
compiled extension.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import penstock._fork  # noqa: F401 - it has to see every fork

if TYPE_CHECKING:
    from penstock._adamw import AdamW
    from penstock._C import __version__
    from penstock._clipping import clip_grad_norm_
    from penstock._errors import PenstockError
    from penstock._load import load
    from penstock._plan import Plan, compile, get_recorded_ops, record
    from penstock._plans import Operation
    from penstock._shard import close, invalidate, no_sync, shard
    from penstock._stats import Stats, stats
    from penstock._step import step
    from penstock._tracing import trace

__all__ = [
    "AdamW",
    "Operation",
    "PenstockError",
    "Plan",
    "Stats",
    "__version__",
    "clip_grad_norm_",
    "close",
    "compile",
    "get_recorded_ops",
    "invalidate",
    "load",
    "no_sync",
    "record",
    "shard",
    "stats",
    "step",
    "trace",
]

_HOME = {
    "AdamW": "_adamw",
    "Operation": "_plans",
    "PenstockError": "_errors",
    "Plan": "_plan",
    "Stats": "_stats",
    "__version__": "_C",
    "clip_grad_norm_": "_clipping",
    "close": "_shard",
    "compile": "_plan",
    "get_recorded_ops": "_plan",
    "invalidate": "_shard",
    "load": "_load",
    "no_sync": "_shard",
    "record": "_plan",
    "shard": "_shard",
    "stats": "_stats",
    "step": "_step",
}


def __getattr__(name: str) -> Any:
    if name in ("trace", "plan"):  # modules; the first one can be called. Importing puts them here
        return importlib.import_module(f"penstock.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
