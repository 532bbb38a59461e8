"""Put Penstock under Hugging Face's Accelerate, and so under Trainer and what else is built on it.

    import penstock.accelerate
    penstock.accelerate.install()

before the first ``Accelerator`` or ``TrainingArguments`` is all that a program changes.

Accelerate trains, clips, saves and resumes models of DTensors already, those of FSDP2. So it is
told to use FSDP2, by the variables that ``accelerate launch`` sets, and the functions by which it
makes a model one of FSDP2 are replaced.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer

from penstock._engine import is_sharded
from penstock._errors import PenstockError
from penstock._framework import Framework
from penstock._shard import shard

_accelerate = Framework("Accelerate", "1.15")

# As `accelerate launch` sets them. Trainer's save_model writes nothing but from whole state dicts.
_VARIABLES = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


class _Installed:
    """What is in place now."""

    options: dict[str, Any] = {}  # of shard
    variables: list[str] = []  # that were not set before


_installed = _Installed()


def install(**options: Any) -> None:
    """Have Accelerate shard models by `penstock.shard`; a second call replaces the options.

    ``Accelerator.prepare(model, optimizer)`` then shards the model where several processes train,
    on CPUs too. What Accelerate would have FSDP2 do, it has `shard` do: mixed precision, activation
    checkpointing, stage 3, or 2 for ``reshard_after_forward=False``. All ranks begin with what
    rank 0 has, and ``generate`` counts as a forward. State dicts are whole ones, unless
    ``FSDP_STATE_DICT_TYPE``, a plugin or ``fsdp_config`` says otherwise. A model that is sharded
    before it is prepared stays as it is.

    Parameters
    ----------
    **options
        Of `shard`; they go before what Accelerate says.

    Raises
    ------
    PenstockError
        EMISMATCH: Accelerate has not what is replaced. Later, in ``prepare``: EUNSUPPORTED, where
        FSDP2 is asked for something that `shard` has not, and what `shard` itself raises.
    ImportError
        There is no Accelerate.
    """
    accelerate = _accelerate.load()
    _installed.options = options
    if _accelerate.is_replaced:
        return
    _accelerate.warn_of_other_version(accelerate.__version__)
    main = importlib.import_module("accelerate.accelerator")
    state = importlib.import_module("accelerate.state")
    _accelerate.replace(
        {
            (main, "fsdp2_prepare_model"): lambda original: _prepare_model,
            (main, "fsdp2_apply_ac"): lambda original: _leave_model,
            (main.Accelerator, "prepare"): _around_prepare,
            (state.AcceleratorState, "__init__"): _around_state,
        }
    )
    _installed.variables = [name for name in _VARIABLES if name not in os.environ]
    os.environ.update({name: _VARIABLES[name] for name in _installed.variables})


def uninstall() -> None:
    """Give Accelerate its functions back, and take back the variables; for accelerators to come."""
    _accelerate.restore()
    for name in _installed.variables:
        os.environ.pop(name, None)
    _installed.variables = []


# ---- in place of Accelerate's functions ----------------------------------------------------------


def _leave_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """In place of what wraps layers that are to be recomputed: `shard` needs no wrappers."""
    return model


def _prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """In place of what calls ``fully_shard``."""
    module = _uncompiled(model)
    plugin = accelerator.state.fsdp_plugin
    _refuse_unsupported(plugin)
    options = {**_options_of(plugin, module), **_installed.options}
    if accelerator.mixed_precision != "no":
        _widen(module)
    if any(parameter.is_meta for parameter in module.parameters()):
        raise PenstockError(
            "EUNSUPPORTED",
            f"{type(module).__name__} is on the meta device, where Accelerate cannot tell which of "
            "its parameters an optimizer has: call penstock.shard and penstock.load on it before, "
            "and build the optimizer then",
        )
    module.to(accelerator.device)
    shard(module, **options)
    return model


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return what torch.compile has wrapped, if it has."""
    return getattr(model, "_orig_mod", model)


def _around_prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what has a model sharded and gives its optimizer the shards.

    A model may come without an optimizer, to be evaluated; and it may be sharded already, and its
    optimizer have the shards.
    """

    @functools.wraps(original)
    def prepare(accelerator: Any, *given: Any, **kwargs: Any) -> Any:
        models = [each for each in given if isinstance(each, nn.Module)]
        if accelerator.is_fsdp2 and not any(isinstance(each, Optimizer) for each in given):
            for model in models:
                if not is_sharded(_uncompiled(model)):
                    _prepare_model(accelerator, model)
        if not any(is_sharded(_uncompiled(model)) for model in models):
            return original(accelerator, *given, **kwargs)
        accelerator._models.extend(model for model in models if model not in accelerator._models)
        for first_pass in (True, False):  # schedulers come after their optimizers
            given = tuple(
                each if each in models else accelerator._prepare_one(each, first_pass=first_pass)
                for each in given
            )
        for each in given:
            if isinstance(each, (nn.Module, Optimizer)):
                each._is_accelerate_prepared = True  # type: ignore[union-attr]
        return given if len(given) > 1 else given[0]

    return prepare


def _options_of(plugin: Any, model: nn.Module) -> dict[str, Any]:
    """Return what a plugin for FSDP2 says, in options of `shard`."""
    options: dict[str, Any] = {
        "stage": 3 if plugin.reshard_after_forward else 2,
        "broadcast": True,
    }
    if callable(getattr(type(model), "generate", None)):
        options["forward_methods"] = ["generate"]
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        options["offload"] = "parameters"
    if plugin.activation_checkpointing:
        options["checkpoint"] = _all_blocks
    policy = plugin.mixed_precision_policy
    if policy is not None:
        options["param_dtype"] = policy.param_dtype
        options["reduce_dtype"] = policy.reduce_dtype
        options["output_dtype"] = policy.output_dtype
    return options


def _all_blocks(name: str, module: nn.Module) -> bool:
    return True


def _refuse_unsupported(plugin: Any) -> None:
    policy = plugin.mixed_precision_policy
    wishes = {
        "ignored_modules": plugin.ignored_modules is not None,
        "activation_checkpointing_offload": plugin.activation_checkpointing_offload,
        "cast_forward_inputs=False": policy is not None and not policy.cast_forward_inputs,
    }
    for wish, is_wished in wishes.items():
        if is_wished:
            raise PenstockError(
                "EUNSUPPORTED",
                f"Accelerate's plugin asks for {wish}, which penstock.shard has not: leave it out",
            )


def _widen(model: nn.Module) -> None:
    """Have what is trained in mixed precision in float32, as with FSDP2."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32)


def _around_state(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap what makes a plugin for FSDP2 count on GPUs: it does on CPUs, too."""

    @functools.wraps(original)
    def initialise(state: Any, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and plugin.fsdp_version != 2:
            raise PenstockError(
                "EUNSUPPORTED",
                f"fsdp_version={plugin.fsdp_version} asks for FSDP1, and Penstock takes the place "
                "of FSDP2: give 2",
            )
        original(state, *args, **kwargs)
        if plugin is not None:
            _refuse_alone(state)
            _count_on_cpus(state, plugin)

    return initialise


def _refuse_alone(state: Any) -> None:
    """Raise where Accelerate leaves ranks alone, as it does on CPUs that it was not told to use."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and state.num_processes == 1:
        raise PenstockError(
            "ESTATE",
            f"{ranks} processes were started, and Accelerate has each train alone, as it finds no "
            "GPU: give Accelerator(cpu=True), or TrainingArguments(use_cpu=True)",
        )


def _count_on_cpus(state: Any, plugin: Any) -> None:
    kinds = importlib.import_module("accelerate.utils").DistributedType
    if state.distributed_type != kinds.MULTI_CPU:
        return
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    state.fsdp_plugin = plugin
    of_process = importlib.import_module("accelerate.state").PartialState._shared_state
    state.distributed_type = of_process["distributed_type"] = kinds.FSDP
