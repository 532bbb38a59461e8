"""What trainers ask a model of FSDP2 for, where a sharded model can answer."""

from __future__ import annotations

from functools import partial

from penstock._arguments import check_flag
from penstock._engine import Engine


def install(engine: Engine) -> None:
    """Let a model answer.

    Parameters
    ----------
    engine : Engine
        The engine of the model.
    """
    model = engine.root.module
    for module in model.modules():
        # transformers asks for the first: where it is, all ranks run as many forwards in generate
        # as the one that needs most, and drop no layer on one alone.
        module._is_fsdp_managed_module = module._fsdp_use_orig_params = True  # type: ignore
    model.__dict__["set_requires_gradient_sync"] = partial(_set_requires_gradient_sync, engine)


def _set_requires_gradient_sync(engine: Engine, requires_gradient_sync: bool) -> None:
    """Switch whether backwards reduce, as `no_sync` does for a while."""
    check_flag("requires_gradient_sync", requires_gradient_sync)
    engine.sync = requires_gradient_sync
