"""AdamW in one pass over gradients, moments and parameters."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock import _C
from penstock._arguments import refuse
from penstock._engine import engines_of
from penstock._errors import PenstockError
from penstock._memory import Lasting
from penstock._norms import gradient_of, norm_of
from penstock._sharded import end_watch, watch
from penstock._world import local_of, stream_of

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
LOW_PRECISION = (torch.bfloat16, torch.float16)
_LINE = 64  # elements that a line of a GPU's memory has, at most
_OPTIONS = ("moments", "stochastic_rounding", "masters", "skip_nonfinite", "seed")
_logger = logging.getLogger("penstock")
_live: weakref.WeakSet[AdamW] = weakref.WeakSet()


class AdamW(torch.optim.Optimizer):
    """AdamW as `torch.optim.AdamW`, in one pass over all parameters.

    A step reads gradient, parameter and moments once and writes parameter and moments, in fp32
    arithmetic whatever the dtypes are. It never waits for the device: learning rates that are
    tensors, the scale and the flag of a `torch.amp.GradScaler`, the factor of
    `penstock.clip_grad_norm_` and the steps are read there, so that `penstock.step` and other CUDA
    graphs can hold it. State dicts are those of `torch.optim.AdamW`, both ways.

    Parameters
    ----------
    params : nn.Module, iterable of torch.Tensor or of dict
        A model, its parameters, or groups of them; sharded or not, in float32, bfloat16 or float16.
    lr : float or torch.Tensor
        Learning rate.
    betas : (float, float)
        Coefficients of the moments.
    eps : float
        Added to the divisor.
    weight_decay : float
        Decoupled weight decay.
    maximize : bool
        Go up the gradient instead of down.
    amsgrad : bool
        Divide by the largest second moment so far.
    moments : torch.dtype
        Of both moments: float32 or bfloat16.
    stochastic_rounding : bool
        Round bfloat16 moments up or down at random, so that small changes count in the mean. The
        random numbers follow from `seed`, the step and the element's place in the whole model: a
        run repeats, on any number of ranks.
    masters : bool
        Keep parameters of fewer bits in float32 too (``state["master"]``), taken from them at their
        first step. Load the model before that: what is written to a parameter later is lost.
    skip_nonfinite : bool
        Leave out a step in which some gradient of any rank is infinite or NaN, without waiting for
        the device. It costs one more pass over the gradients, unless `penstock.clip_grad_norm_` has
        made one.
    in_backward : bool
        Update a sharded model's parameters behind the reductions of a backward, beside the rest of
        it: `step` then finds them updated, their ``.grad`` is None, and no gradient of the whole
        model is ever held. From the first planned backward on, on GPUs; each backward is a step
        then. What needs gradients between backward and step (clipping, a `GradScaler`, hooks of
        ``register_post_accumulate_grad_hook``, accumulation other than in `no_sync`) is noticed in
        the first steps, and all parameters are updated in `step` from then on. What only reads
        them, as for a log, is not noticed in a process alone. A backward that fails may leave some
        of the parameters updated.
    seed : int
        Of the stochastic rounding.
    capturable : bool
        As torch has it: a program of the caller's captures the step. `penstock.step` sets it.

    Raises
    ------
    PenstockError
        EINVAL: an argument is out of range; `in_backward` with `skip_nonfinite`, with shards on the
        host, or without a sharded model that the parameters are of. ESTATE: two backwards without a
        step between them, the first of which has updated parameters. EUNSUPPORTED: a parameter or
        gradient that is not dense and real, at its first step.

    Examples
    --------
    >>> penstock.shard(model)
    >>> optimizer = penstock.AdamW(model, lr=3e-4, moments=torch.bfloat16)
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        moments: torch.dtype = torch.float32,
        stochastic_rounding: bool = True,
        masters: bool = False,
        skip_nonfinite: bool = False,
        in_backward: bool = False,
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": (float(betas[0]), float(betas[1])),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            "moments": moments,
            "stochastic_rounding": stochastic_rounding,
            "masters": masters,
            "skip_nonfinite": skip_nonfinite,
            "seed": seed,
            # What torch.optim.AdamW has besides, for state dicts.
            "foreach": None,
            "fused": None,
            "differentiable": False,
            "decoupled_weight_decay": True,
        }
        _check(defaults)
        self._forget()
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, defaults)
        if in_backward:
            self._join_backward()

    def _join_backward(self) -> None:
        """Have the engines of the parameters update them in their backwards."""
        if any(group["skip_nonfinite"] for group in self.param_groups):
            refuse("in_backward", True, "skip_nonfinite needs all gradients first: leave one out")
        engines = engines_of(self)
        if not engines:
            refuse("in_backward", True, "shard the model before: penstock.shard(model)")
        if any(engine.options.offloads_shards for engine in engines):
            refuse("in_backward", True, "shards on the host, by offload=, are updated in step()")
        self._is_late = False
        for engine in engines:
            engine.updaters.add(self)

    def _forget(self) -> None:
        """Begin with what belongs to no state dict."""
        self._step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf
        self._firsts: dict[int, int] = {}  # by parameter: the number of this rank's first element
        self._lasting = Lasting()
        self._loading: tuple[dict[str, Any], list[dict[str, Any]]] | None = None
        self.gradient_factor: torch.Tensor | None = None  # of clip_grad_norm_, until the next step
        self.gradient_norm: torch.Tensor | None = None
        self._is_late = True  # nothing is updated in a backward
        self._is_ahead = False  # a backward has updated parameters, and `step` has not come yet
        self._versions: int | None = None  # of gradients, when a backward had ended
        self._prepared: list[torch.Tensor] = []  # whose step the latest backward has begun
        _live.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_firsts" not in self.__dict__:  # a copy, or out of a pickle
            self._forget()
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if self._loading is not None:
            self._take_over(*self._loading)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do.

        Parameters
        ----------
        param_group : dict
            ``params``, and options in place of the optimizer's.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check(group)
        for parameter in group["params"]:
            if parameter.dtype not in (torch.float32, *LOW_PRECISION):
                refuse("params", parameter.dtype, "give float32, bfloat16 or float16 parameters")
        if all(parameter.device.type == "cuda" for parameter in group["params"]):
            group["fused"] = True  # torch.optim.AdamW finds steps on the device, then
        self._firsts.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, or zero them, and what was known of them.

        Parameters
        ----------
        set_to_none : bool
            Drop them.
        """
        self.gradient_factor = self.gradient_norm = None
        super().zero_grad(set_to_none)

    # ---- saving and loading ---------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the hyperparameters that `torch.optim.AdamW` has.

        Those beyond are the optimizer's own, whatever it loads; and torch gathers no dtypes.

        Returns
        -------
        dict
        """
        state = super().state_dict()
        for group in state["param_groups"]:
            for name in _OPTIONS:
                group.pop(name, None)
        return state

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a `penstock.AdamW` or a `torch.optim.AdamW`.

        Moments become those of ``moments``. Masters that are missing are taken from the parameters
        at the next step, which therefore have to be loaded before; those too many are left out.

        Parameters
        ----------
        state_dict : dict
            As `state_dict` returns it.
        """
        options = [{name: group[name] for name in _OPTIONS} for group in self.param_groups]

        def note(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            self._loading = given, options

        last = self.register_load_state_dict_pre_hook(note)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            self._loading = None

    def _take_over(self, given: dict[str, Any], options: list[dict[str, Any]]) -> None:
        """Put states in their own dtypes in the place of those that torch has made."""
        for group, own in zip(self.param_groups, options, strict=True):
            group.update(own)
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        for (group, parameter), number in zip(self._parameters(), numbers, strict=True):
            values = given["state"].get(number)
            if not values:
                continue
            state = self.state[parameter]
            for name in MOMENTS:
                if name in values:
                    state[name] = self._make_state(parameter, group["moments"]).copy_(values[name])
            state.pop("master", None)
            if "master" in values and self._has_master(group, parameter):
                state["master"] = self._make_state(parameter, torch.float32).copy_(values["master"])
            self._fit_step(state, parameter)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def _make_state(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._lasting.make(parameter.device, lambda: _beside(parameter, dtype))

    def _has_master(self, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        return bool(group["masters"]) and parameter.dtype in LOW_PRECISION

    @staticmethod
    def _fit_step(state: dict[str, Any], parameter: torch.Tensor) -> None:
        """Have the step where the kernel counts it."""
        step = state["step"]
        is_tensor = isinstance(step, torch.Tensor)
        if not is_tensor or step.dtype != torch.float32 or step.device != parameter.device:
            state["step"] = torch.as_tensor(step).to(parameter.device, torch.float32)

    # ---- a step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss anew.

        Returns
        -------
        object
            What `closure` returns.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = self._found_inf()
        if not self._is_late:
            self._look_for_late_users()
        self._is_ahead = False
        for group in self.param_groups:
            by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_device[parameter.device].append(parameter)
            for device, parameters in by_device.items():
                self._update(group, device, parameters, found_inf)
        self.gradient_factor = self.gradient_norm = None
        return loss

    def _update(
        self,
        group: dict[str, Any],
        device: torch.device,
        parameters: list[torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> None:
        for some in self._by_masters(group, parameters):
            given = self._arguments(group, device, some, found_inf)
            given["gradients"] = [gradient_of(parameter) for parameter in some]
            native_of(device).step(stream_of(device), **given)

    def _by_masters(
        self, group: dict[str, Any], parameters: list[torch.Tensor]
    ) -> Iterator[list[torch.Tensor]]:
        for has_masters in (False, True):
            some = [p for p in parameters if self._has_master(group, p) == has_masters]
            if some:
                yield some

    def _arguments(
        self,
        group: dict[str, Any],
        device: torch.device,
        some: list[torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> _C.AdamWArguments:
        """Return all but the gradients of parameters that are about to be written."""
        lr, lr_at = rate_of(group["lr"], device)
        states = [self._state_of(group, parameter) for parameter in some]
        locals_ = [local_of(parameter) for parameter in some]
        has_masters = self._has_master(group, some[0])
        sharded = [parameter for parameter in some if isinstance(parameter, DTensor)]
        torch.autograd.graph.increment_version(sharded)  # the kernel does it to what it writes
        return {
            "lr": lr,
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
            "seed": group["seed"],
            "lr_at": lr_at,
            "gradient_scale": _on(device, getattr(self, "grad_scale", None)),
            "gradient_factor": _on(device, self.gradient_factor),
            "found_inf": _on(device, found_inf),
            "parameters": [local_of(s["master"]) for s in states] if has_masters else locals_,
            "gradients": [],
            "exp_avgs": [local_of(state["exp_avg"]) for state in states],
            "exp_avg_sqs": [local_of(state["exp_avg_sq"]) for state in states],
            "largest": [local_of(s["max_exp_avg_sq"]) for s in states] if group["amsgrad"] else [],
            "copies": locals_ if has_masters else [],
            "steps": [state["step"] for state in states],
            "firsts": [self._first_of(parameter) for parameter in some],
            "rounds_randomly": group["stochastic_rounding"] and group["moments"] == torch.bfloat16,
        }

    def _state_of(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state, which its first step makes."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
        names = MOMENTS if group["amsgrad"] else MOMENTS[:2]
        for name in names:
            if name not in state:
                state[name] = self._make_state(parameter, group["moments"]).zero_()
        if "master" not in state and self._has_master(group, parameter):
            state["master"] = self._make_state(parameter, torch.float32).copy_(parameter.detach())
        self._fit_step(state, parameter)
        return state

    def _first_of(self, parameter: torch.Tensor) -> int:
        """Return the number of this rank's first element in all parameters, laid end to end."""
        if not self._firsts:
            begin = 0
            for _, each in self._parameters():
                self._firsts[id(each)] = begin + _first_within(each)
                begin += each.numel()
        return self._firsts[id(parameter)]

    def _found_inf(self) -> torch.Tensor | None:
        """Return a flag on the device that skips the step where it is not 0; None: nothing does."""
        given = getattr(self, "found_inf", None)
        found: torch.Tensor | None = given.full_tensor() if isinstance(given, DTensor) else given
        owned = (p for group, p in self._parameters() if group["skip_nonfinite"])
        checked = [p for p in owned if p.grad is not None]
        if not checked:
            return found
        norm = self.gradient_norm if self.gradient_norm is not None else norm_of(checked)
        own = (~torch.isfinite(norm)).float()
        return own if found is None else own + found.to(own.device)

    # ---- in a backward --------------------------------------------------------------------------

    def owned(self) -> list[torch.Tensor]:
        """Return what backwards may update."""
        return [] if self._is_late else [parameter for _, parameter in self._parameters()]

    @torch.no_grad()
    def prepare_updates(self, numbers: dict[int, int]) -> list[_C.AdamWUpdates]:
        """Begin the step of parameters that a backward, which begins, updates."""
        self._is_ahead = True
        self._prepared = [
            parameter for _, parameter in self._parameters() if id(parameter) in numbers
        ]
        updates = []
        for group in self.param_groups:
            own = [parameter for parameter in group["params"] if id(parameter) in numbers]
            for some in self._by_masters(group, own):
                device = some[0].device
                given = self._arguments(group, device, some, None)
                indices = [numbers[id(parameter)] for parameter in some]
                native = native_of(device)
                updates.append(native.prepare_updates(stream_of(device), indices, **given))
        return updates

    def refuse_backward(self) -> None:
        """Raise an error if the last backward has updated parameters, and no step was done."""
        if self._is_ahead:
            raise PenstockError(
                "ESTATE",
                "a backward begins, and the one before has updated parameters: call step() behind "
                "each backward, accumulate in penstock.no_sync, or build penstock.AdamW without "
                "in_backward",
            )

    @torch.no_grad()
    def note_gradients(self) -> None:
        """Remember the gradients of a backward that has ended.

        What it has left a gradient of is updated in `step`, which counts then.
        """
        self._take_back([p for p in self._prepared if p.grad is not None])
        gradients = self._gradients()
        self._versions = sum(gradient._version for gradient in gradients)
        for gradient in gradients:
            watch(gradient)

    @torch.no_grad()
    def break_off(self, updated: set[int]) -> None:
        """End a backward that has failed; no `step` has to come behind it.

        Parameters
        ----------
        updated : set of int
            Parameters, by id, that it has updated, or is about to.
        """
        if self._prepared:  # else it was refused because of the one before, which stays
            self._take_back([p for p in self._prepared if id(p) not in updated])
            self._is_ahead = False

    def _take_back(self, parameters: list[torch.Tensor]) -> None:
        """Count no step of parameters that a backward has prepared, and not updated."""
        counts = [self.state[parameter]["step"] for parameter in parameters]
        if counts:
            torch._foreach_sub_(counts, 1.0)
        self._prepared = []

    def need_gradients(self, why: str) -> None:
        """Update in `step` from now on."""
        if not self._is_late:
            _logger.info("penstock.AdamW: parameters are updated in step(): %s", why)
        self._is_late = True

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for _, p in self._parameters() if p.grad is not None]

    def _look_for_late_users(self) -> None:
        gradients = self._gradients()
        is_used = sum(map(end_watch, gradients)) > 0
        versions = sum(gradient._version for gradient in gradients)
        if getattr(self, "grad_scale", None) is not None or self.gradient_factor is not None:
            self.need_gradients("gradients are scaled")
        elif is_used or (self._versions is not None and self._versions != versions):
            self.need_gradients("gradients were used between backward and step")
        self._versions = None


def optimizers_of(model: nn.Module) -> list[AdamW]:
    """Return all that hold parameters of the model.

    Parameters
    ----------
    model : nn.Module
        Sharded or not.

    Returns
    -------
    list of AdamW
    """
    ids = {id(parameter) for parameter in model.parameters()}
    return [one for one in _live if any(id(parameter) in ids for _, parameter in one._parameters())]


# ---- arguments ----------------------------------------------------------------------------------


def _check(options: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not options[name] >= 0:
            refuse(name, options[name], "give a number that is not negative")
    if not all(0 <= beta < 1 for beta in options["betas"]):
        refuse("betas", options["betas"], "give two numbers from 0 on, below 1")
    if options["moments"] not in (torch.float32, torch.bfloat16):
        refuse("moments", options["moments"], "give torch.float32 or torch.bfloat16")
    if not 0 <= options["seed"] < 2**64:
        refuse("seed", options["seed"], "give a number of 64 bits")


def rate_of(lr: float | torch.Tensor, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """Return a learning rate as a number, or as a tensor that the device reads."""
    if not isinstance(lr, torch.Tensor):
        return float(lr), None
    if lr.device.type == "cpu":
        return float(lr), None
    return 0.0, lr.to(device, torch.float32)


def _on(device: torch.device, given: torch.Tensor | None) -> torch.Tensor | None:
    return None if given is None else local_of(given).to(device, torch.float32)


@functools.cache
def native_of(device: torch.device) -> _C.AdamW:
    """Return the kernel of a device, of which a process has one."""
    return _C.AdamW(device)


def _beside(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a state, whose elements lie in lines of memory as the parameter's do."""
    state = torch.empty_like(parameter.detach(), dtype=dtype)
    if isinstance(parameter, DTensor):
        return state  # shards are aligned
    ahead = parameter.data_ptr() // parameter.element_size() % _LINE
    if ahead == 0:
        return state
    memory = torch.empty(parameter.numel() + ahead, dtype=dtype, device=parameter.device)
    return memory.as_strided(state.shape, state.stride(), ahead)


def _first_within(parameter: torch.Tensor) -> int:
    """Return the number of this rank's first element within a parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return sum(
        offset * math.prod(parameter.shape[dimension + 1 :])
        for dimension, offset in enumerate(offsets)
    )
