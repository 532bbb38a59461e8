"""A step of DeepSpeed's optimizers on the device, in fewer passes over the gradients.

DeepSpeed 0.19.6 passes over them six times: it copies each to double precision, takes the norm of
that, joins those of a group, casts, scales, and updates by them; then it casts the parameters. In
bfloat16 with AdamW that moves 70 bytes an element. Here the norm reads them once, and in ZeRO-3 the
kernel of `penstock.AdamW` does all the rest: 30 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from penstock import _C
from penstock._adamw import LOW_PRECISION, MOMENTS, native_of, rate_of
from penstock._world import stream_of

_NORM_ELEMENTS = 1 << 26  # that a sum in float32 goes over
_NORM = "get_grad_norm_direct"
_UPDATE = (  # of ZeRO-3 alone
    "_prepare_fp32_grad_for_sub_group",
    "unscale_and_clip_grads",
    "_optimizer_step",
    "_reassign_or_swap_out_partitioned_parameters",
)


def pass_less(optimizer: Any) -> None:
    """Let the optimizer step in fewer passes, with the values that it has without.

    In ZeRO-1 and 2 that is the norm. In ZeRO-3 the update stays DeepSpeed's where the optimizer
    below is neither `torch.optim.AdamW` nor DeepSpeed's `FusedAdam` as AdamW, where it has hooks or
    no states yet (in its first step), where parameters are float32, and where the gradients of a
    group lie apart in memory. A norm of 1.8e19 and more is infinite, as DeepSpeed's own is in
    ZeRO-1 and 2.

    Parameters
    ----------
    optimizer : DeepSpeed's ZeRO optimizer
        One that is offloaded is left as it is.
    """
    is_offloaded = any(
        getattr(optimizer, name, False) for name in ("offload_optimizer", "cpu_offload")
    )
    if is_offloaded or not hasattr(optimizer, _NORM):
        return
    has_update = all(hasattr(optimizer, name) for name in _UPDATE)
    steps = _Steps(optimizer, (_NORM, *_UPDATE) if has_update else (_NORM,))
    for name in steps.original:
        setattr(optimizer, name, getattr(steps, name))


class _Steps:
    """Takes the place of the optimizer's methods of these names, which it calls group by group.

    Attributes
    ----------
    original : dict
        The optimizer's own methods.
    gradient : torch.Tensor or None
        All gradients of the group at work, where the kernel updates it; None where DeepSpeed does.
    factor : torch.Tensor or None
        What they are multiplied by.
    """

    def __init__(self, optimizer: Any, names: Sequence[str]) -> None:
        self.optimizer = optimizer
        self.original: dict[str, Callable[..., Any]] = {
            name: getattr(optimizer, name) for name in names
        }
        self.gradient: torch.Tensor | None = None
        self.factor: torch.Tensor | None = None

    def get_grad_norm_direct(
        self, gradients: Sequence[torch.Tensor], parameters: Sequence[Any], norm_type: float = 2
    ) -> Any:
        """Have DeepSpeed take the norm of the gradients' norms in place of that of all elements."""
        owned = gradients[: len(parameters)]  # padding may be behind them
        if owned and norm_type == 2 and self._counts_all(parameters):
            gradient = _joined(owned)
            parts = owned if gradient is None else gradient.split(_NORM_ELEMENTS)
            norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
            gradients = [torch.stack(norms)]
        return self.original[_NORM](gradients, parameters, norm_type)

    def _counts_all(self, parameters: Sequence[Any]) -> bool:
        """Return whether DeepSpeed leaves out no parameter as another rank's of the model."""
        is_first = self.optimizer.model_parallel_rank == 0
        return is_first and not any(
            getattr(parameter, "ds_pipe_replicated", False) for parameter in parameters
        )

    def _prepare_fp32_grad_for_sub_group(self, group: int) -> None:
        gradient = _joined(self.optimizer.averaged_gradients[group])
        self.gradient = gradient if self._fits(group, gradient) else None
        if self.gradient is None:
            self.original["_prepare_fp32_grad_for_sub_group"](group)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.averaged_gradients[group] = None

    def unscale_and_clip_grads(self, group: int, norm: torch.Tensor) -> None:
        """Note the factor, by DeepSpeed's formula; `norm` is that of the scaled gradients."""
        if self.gradient is None:
            self.original["unscale_and_clip_grads"](group, norm)
            return
        scale, most = self.optimizer.loss_scale, self.optimizer.clip_grad
        self.factor = None
        if most > 0:
            excess = torch.clamp((norm / scale + 1e-6) / most, min=1.0)
            self.factor = (1.0 / (excess * scale)).to(torch.float32)
        elif scale != 1:
            self.factor = _number(1.0 / scale, self.gradient.device)

    def _optimizer_step(self, group: int) -> None:
        if self.gradient is None:
            self.original["_optimizer_step"](group)
        else:
            device = self.gradient.device
            native_of(device).step(stream_of(device), **self._arguments(group, self.gradient))

    def _reassign_or_swap_out_partitioned_parameters(self, group: int) -> None:
        if self.gradient is None:
            self.original["_reassign_or_swap_out_partitioned_parameters"](group)
        else:  # the kernel has written them
            self.optimizer._unflatten_partitioned_parameters(group)
            self.gradient = self.factor = None

    def _fits(self, group: int, gradient: torch.Tensor | None) -> bool:
        """Return whether the kernel does what DeepSpeed would do."""
        base = self.optimizer.optimizer
        has_scaler = getattr(self.optimizer, "torch_autocast_gradscaler", None) is not None
        if gradient is None or has_scaler or not _is_adamw(base):
            return False
        master = self.optimizer.fp32_partitioned_groups_flat[group]
        copy = self.optimizer.fp16_partitioned_groups_flat[group]
        state = base.state.get(master, {})
        if not state.keys() >= {"step", "exp_avg", "exp_avg_sq"}:
            return False
        if copy is None or copy.dtype not in LOW_PRECISION:
            return False
        options = self._options(group)
        kept = [master, *(state[name] for name in MOMENTS if name in state)]
        return (
            all(one.dtype == torch.float32 for one in kept)
            and all(one.shape == gradient.shape for one in (*kept, copy))
            and all(one.device == gradient.device for one in (*kept, copy))
            and not any(isinstance(beta, torch.Tensor) for beta in options["betas"])
        )

    def _options(self, group: int) -> dict[str, Any]:
        """Return the hyperparameters."""
        number = self.optimizer.sub_group_to_group_id[group]
        options: dict[str, Any] = self.optimizer.optimizer.param_groups[number]
        return options

    def _arguments(self, group: int, gradient: torch.Tensor) -> _C.AdamWArguments:
        """Return the kernel's; the step is counted with that."""
        options = self._options(group)
        master = self.optimizer.fp32_partitioned_groups_flat[group]
        state = self.optimizer.optimizer.state[master]
        lr, lr_at = rate_of(options["lr"], gradient.device)
        return {
            "lr": lr,
            "beta1": options["betas"][0],
            "beta2": options["betas"][1],
            "eps": options["eps"],
            "weight_decay": options["weight_decay"],
            "maximize": options.get("maximize", False),
            "seed": 0,
            "lr_at": lr_at,
            "gradient_scale": None,
            "gradient_factor": self.factor,
            "found_inf": None,
            "parameters": [master.detach()],
            "gradients": [gradient],
            "exp_avgs": [state["exp_avg"]],
            "exp_avg_sqs": [state["exp_avg_sq"]],
            "largest": [state["max_exp_avg_sq"]] if options.get("amsgrad") else [],
            "copies": [self.optimizer.fp16_partitioned_groups_flat[group]],
            "steps": [_counter(state, gradient.device)],
            "firsts": [0],
            "rounds_randomly": False,
        }


def _is_adamw(optimizer: Any) -> bool:
    """Return whether a step of it is AdamW's and nothing else: torch's, or DeepSpeed's own."""
    if type(optimizer).__name__ == "FusedAdam":
        groups = optimizer.param_groups
        is_adamw = bool(optimizer.adam_w_mode) and all(
            # It ignores the last two, which a checkpoint of torch's may have brought.
            group["bias_correction"] and not group.get("amsgrad") and not group.get("maximize")
            for group in groups
        )
    else:
        is_adamw = type(optimizer) is torch.optim.AdamW
    return is_adamw and not _is_watched(optimizer)


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether somebody else is called at its steps; schedulers of torch's may be."""
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        return True
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
        _global_optimizer_post_hooks.values(),
    )
    return any(not str(getattr(hook, "__module__", "")).startswith("penstock.") for hook in hooks)


def _counter(state: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return what the kernel counts: the step, or a copy of one that the host counts, now."""
    step = state["step"]
    if isinstance(step, torch.Tensor) and step.device == device and step.dtype == torch.float32:
        return step
    state["step"] = step + 1
    return _number(float(step), device)


def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a flat view of tensors that lie one behind the other; None if they do not."""
    if not tensors:
        return None
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for one in tensors:
        begin = one.storage_offset() if one.untyped_storage().data_ptr() == storage else -1
        if begin != end or one.dtype != first.dtype or not one.is_contiguous():
            return None
        end += one.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
