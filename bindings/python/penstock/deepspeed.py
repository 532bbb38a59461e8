"""Put Penstock under DeepSpeed's DeepCompile.

    import penstock.deepspeed
    penstock.deepspeed.install()

before ``engine.compile()`` is all that a DeepSpeed job changes.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.variable import Variable

from penstock import _device_optimizer, _host_optimizer, _operators
from penstock._early_reductions import reduce_early
from penstock._errors import PenstockError
from penstock._framework import Framework, Place

_deepspeed = Framework("DeepSpeed", "0.19.6")

# Entry points of DeepSpeed's engine behind which it calls the runtime.
_ENTRY_POINTS = ("forward", "_backward_prologue")
# What DeepSpeed keeps once a process and fills for each engine.
_SHARED_STATE = {
    "deepspeed.compile.util": ("pre_backward_hooks", "post_backward_hooks"),
    "deepspeed.compile.backend": (
        "remaining_schedule",
        "next_pass_step",
        "next_passes",
        "current_passes",
        "graph_order_with_frame_id",
        "profiling_results",
        "param_manager",
    ),
}


def install() -> None:
    """Make DeepSpeed use this runtime in place of its own; a second call does nothing.

    Where CUDA has not started, and the environment does not say how many queues of the GPU its
    streams share (CUDA_DEVICE_MAX_CONNECTIONS), they have 32 instead of 8.

    Warns where DeepSpeed is of another version than the one that this was proved with. Raises
    PenstockError where DeepSpeed has loaded its own operators already, or where an operator or a
    function is not as this DeepSpeed wants it; ImportError without DeepSpeed.
    """
    deepspeed = _deepspeed.load()
    places = _Places()
    if places.taken_by_penstock():
        return
    places.refuse_taken()
    _deepspeed.warn_of_other_version(deepspeed.__version__)
    native = _operators.load()
    _check_source(places.source(), native)
    _deepspeed.replace(_wrappers(native))  # or raises, before anything is in place
    places.put(native)
    if not torch.cuda.is_initialized():
        # DeepSpeed's collectives run beside the runtime's, and ranks may launch them in different
        # orders: in one queue two of them could wait for each other for ever.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def uninstall() -> None:
    """Give DeepSpeed its entry points back. Its own operators cannot be loaded in this process."""
    _deepspeed.load()
    places = _Places()
    if places.taken_by_penstock():
        places.put(None)
        _deepspeed.restore()
        _installed.active = None


class _Places:
    """Where DeepSpeed looks for its operators' module."""

    def __init__(self) -> None:
        self.util: Any = importlib.import_module("deepspeed.compile.util")
        builder = importlib.import_module("deepspeed.ops.op_builder.builder")
        self.loaded: dict[str, Any] = builder.OpBuilder._loaded_ops
        self.builder = importlib.import_module("deepspeed.ops.op_builder.dc").DeepCompileBuilder

    def taken_by_penstock(self) -> bool:
        return self.util.dc_handle is not None and self.util.dc_handle is _installed.native

    def refuse_taken(self) -> None:
        if self.util.dc_handle is not None or "dc" in self.loaded:
            raise PenstockError(
                "ESTATE",
                "DeepSpeed has loaded its own operators of the namespace dc in this process: call "
                "penstock.deepspeed.install() before the first engine is compiled",
            )

    def source(self) -> Path:
        """Return the path of the C++ file in which this DeepSpeed says what its operators are."""
        return Path(self.builder().deepspeed_src_path("csrc/compile/init.cpp"))

    def put(self, native: Any) -> None:
        _installed.native = native
        self.util.dc_handle = native
        if native is None:
            self.loaded.pop("dc", None)
        else:
            self.loaded["dc"] = native


class _Installed:
    """What is in place now."""

    native: Any = None
    active: weakref.ref[Any] | None = None  # the engine whose state DeepSpeed's modules hold


_installed = _Installed()


# ---- operators and functions are as this DeepSpeed has them --------------------------------------


def _check_source(source: Path, native: Any) -> None:
    """Compare with DeepSpeed's declarations, which are text: nothing of it is compiled here."""
    if not source.exists():
        warnings.warn(
            f"{source} is not there, so the operators are not compared with DeepSpeed's",
            stacklevel=3,
        )
        return
    text = source.read_text()
    for schema in _schemas_in(text):
        _check_schema(schema)
    for function in re.findall(r'm\.def\(\s*"(\w+)"\s*,', text):
        if not hasattr(native, function):
            raise PenstockError(
                "EMISMATCH",
                f"this DeepSpeed calls a function {function!r} of the runtime, which Penstock does "
                f"not have: install {_deepspeed.proved}",
            )


def _schemas_in(text: str) -> list[str]:
    """Return the operators' schemas: literals, maybe in several pieces, with parentheses."""
    literals = re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)', text)
    return ["".join(re.findall(r'"([^"]*)"', literal)) for literal in literals]


def _check_schema(wanted: str) -> None:
    parsed = torch._C.parse_schema(f"dc::{wanted}")
    packet = getattr(torch.ops.dc, parsed.name.removeprefix("dc::"), None)
    overload = getattr(packet, parsed.overload_name or "default", None)
    ours = overload._schema if overload is not None else None
    if str(ours) != str(parsed):
        raise PenstockError(
            "EMISMATCH",
            f"operator {parsed.name}: this DeepSpeed calls it as {parsed}, Penstock has "
            f"{ours or 'no such operator'}: install {_deepspeed.proved}",
        )


# ---- each call knows its engine ------------------------------------------------------------------
#
# The runtime keeps one context an engine, and one of them is current. DeepSpeed's modules keep
# hooks, schedule and graphs once a process. Both follow the engine that is at work.


class _EngineState:
    """What belongs to one engine, while another one is at work.

    Attributes
    ----------
    context : int
        Its context in the runtime; 0 before its first compile.
    backward : int
        The pass of autograd that has begun a backward of it last.
    shared : dict
        Values of `_SHARED_STATE`, by module and name.
    """

    def __init__(self) -> None:
        self.context = 0
        self.backward = -1
        self.shared: dict[tuple[str, str], Any] = {}


_ATTRIBUTE = "_penstock_state"


def _wrappers(native: Any) -> dict[Place, Callable[[Any], Any]]:
    runtime = importlib.import_module("deepspeed.runtime.engine")
    engine = runtime.DeepSpeedEngine
    zero = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    stage3 = importlib.import_module("deepspeed.compile.passes.zero3_compile")
    wrappers: dict[Place, Callable[..., Any]] = {
        **{(engine, name): _at_work() for name in _ENTRY_POINTS},
        (engine, "compile"): _around_compile,
        (engine, "_backward_epilogue"): _at_work(_finish_gradients),
        (engine, "step"): _at_work(_report_step),
        (engine, "load_checkpoint"): _at_work(_report_writes),  # behind torch's back
        (engine, "reload_states"): _at_work(_report_moves),
        (engine, "destroy"): _around_destroy,
        (zero.GatheredParameters, "__exit__"): _around_modification,
        (runtime, "deepcompile_backward_prologue"): _once_a_backward,
        (stage3, "fast_free_schedule"): lambda schedule, native: reduce_early(schedule),
    }
    return {place: functools.partial(wrap, native=native) for place, wrap in wrappers.items()}


def _around_compile(original: Callable[..., Any], native: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(engine: Any, *args: Any, **kwargs: Any) -> Any:
        state = engine.__dict__.setdefault(_ATTRIBUTE, _EngineState())
        _activate(engine, native)
        is_first = engine.is_deepcompile_enabled() and not engine.is_compiled
        if is_first:
            _host_optimizer.keep_gradients_on_device(engine.optimizer)
        result = original(engine, *args, **kwargs)
        state.context = native.current()
        if state.context == 0:  # compiled without DeepCompile
            _forget(engine)
        else:
            _leave_partitioned(engine)
            if is_first:
                _device_optimizer.pass_less(engine.optimizer)
        return result

    return compile


def _leave_partitioned(engine: Any) -> None:
    """Let DeepSpeed not gather after each step what its next forward partitions again at once.

    That is its small parameters, one by one, and it waits for the device then. They are persistent
    for its own hooks, and for DeepCompile no parameter is.
    """
    persistent = getattr(engine.optimizer, "persistent_parameters", [])
    if persistent and not any(parameter.ds_persist for parameter in persistent):
        engine.optimizer.persistent_parameters = []


def _at_work(report: Callable[[Any, Any], None] | None = None) -> Callable[..., Any]:
    """Wrap so that a compiled engine is the one at work, and ``report(engine, native)`` runs after.

    `report` passes on what has changed to the runtime, or to DeepSpeed's optimizer.
    """

    def around(original: Callable[..., Any], native: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def entry_point(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if _ATTRIBUTE not in engine.__dict__:
                return original(engine, *args, **kwargs)
            _activate(engine, native)
            result = original(engine, *args, **kwargs)
            if report is not None:
                report(engine, native)
            return result

        return entry_point

    return around


def _once_a_backward(original: Callable[..., Any], native: Any) -> Callable[..., Any]:
    """Wrap what DeepSpeed does for each forward that a backward goes back over.

    ZeRO-1 takes new memory for gradients there, and forgets those that have come already.
    """

    @functools.wraps(original)
    def prologue(*args: Any) -> None:
        engine = _installed.active() if _installed.active is not None else None
        backward = torch._C._current_graph_task_id()
        if engine is not None and backward != -1:
            state = engine.__dict__[_ATTRIBUTE]
            if backward <= state.backward:  # they count up; one inside of it may have come since
                return
            state.backward = backward
        original(*args)

    return prologue


def _finish_gradients(engine: Any, native: Any) -> None:
    if not engine.is_gradient_accumulation_boundary():
        return
    finish = functools.partial(_hand_over, engine.optimizer)
    if torch._C._current_graph_task_id() == -1:
        finish()
    else:  # behind the runtime's own end of this backward
        Variable._execution_engine.queue_callback(finish)


def _hand_over(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer have the gradients."""
    looks_for_overflow = getattr(optimizer, "reduce_and_partition_stream", None)
    if isinstance(looks_for_overflow, torch.cuda.Stream):  # ZeRO-3's, which waits for nothing
        looks_for_overflow.wait_stream(torch.cuda.current_stream(looks_for_overflow.device))
    _host_optimizer.deliver(optimizer)


def _report_step(engine: Any, native: Any) -> None:
    native.step_ends()


def _report_writes(engine: Any, native: Any) -> None:
    native.shards_written()


def _report_moves(engine: Any, native: Any) -> None:
    native.shards_written()
    partitions = getattr(engine.optimizer, _host_optimizer.GRADIENT_PARTITIONS, {})
    for number, partition in partitions.items():
        native.update_param_grad_buffer(number, partition, 0)


def _around_modification(original: Callable[..., Any], native: Any) -> Callable[..., Any]:
    """Wrap the end of GatheredParameters, where a rank whose shard is padding writes nothing."""

    @functools.wraps(original)
    def exit(parameters: Any, *reason: Any) -> Any:
        result = original(parameters, *reason)
        if parameters.enabled and parameters.src_rank is not None:
            native.shards_written()
        return result

    return exit


def _around_destroy(original: Callable[..., Any], native: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if _ATTRIBUTE not in engine.__dict__:
            return original(engine, *args, **kwargs)
        _activate(engine, native)
        try:
            return original(engine, *args, **kwargs)
        finally:
            _forget(engine)

    return destroy


def _forget(engine: Any) -> None:
    """Drop the engine's hooks and schedule, and its context, which has ended or never began."""
    del engine.__dict__[_ATTRIBUTE]
    _installed.active = None
    _put_shared({})


def _activate(engine: Any, native: Any) -> None:
    """Make the engine's context current and its state that of DeepSpeed's modules."""
    before = _installed.active() if _installed.active is not None else None
    state = engine.__dict__[_ATTRIBUTE]
    if before is not engine:
        if before is not None:
            before.__dict__[_ATTRIBUTE].shared = _take_shared()
        _put_shared(state.shared)
        _installed.active = weakref.ref(engine)
    native.select(state.context)


def _take_shared() -> dict[tuple[str, str], Any]:
    return {
        (module, name): getattr(importlib.import_module(module), name)
        for module, names in _SHARED_STATE.items()
        for name in names
        if hasattr(importlib.import_module(module), name)
    }


def _put_shared(values: dict[tuple[str, str], Any]) -> None:
    """Put values in place; of what is missing, new empty ones of the same type."""
    for (module, name), now in _take_shared().items():
        value = values.get((module, name), _empty_like(now))
        setattr(importlib.import_module(module), name, value)


def _empty_like(value: Any) -> Any:
    return value if isinstance(value, (int, type(None))) else type(value)()
