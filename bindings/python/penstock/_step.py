"""A training step that becomes one CUDA graph by itself."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock._engine import Engine, engine_of
from penstock._errors import PenstockError
from penstock._memory import set_apart

_MOST_GRAPHS = 8
_MOST_SEEN = 64  # signatures that have come once
_MORE_CALLS = 6  # before one that has found gradients of uncaptured calls is captured
_MOST_CALLS = 32  # of one kind, until it is captured
_NEVER = float("-inf")
_NO_GRAPH = 0
_logger = logging.getLogger("penstock")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Makers = tuple[int | None, ...]  # by parameter: the number of a graph, _NO_GRAPH or no gradient
_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def step(model: nn.Module, optimizer: _Optimizers = ()) -> Callable[[_Function], _Function]:
    """Make a function that trains the sharded model a step a CUDA graph.

    The first calls run as they are; then each signature of the arguments (structure, shapes,
    dtypes, other values) is captured once and launched as one graph from then on, of which at most
    eight are kept. A step that cannot be captured goes on as it is, with one warning that says why
    and where; so does every step on CPUs, of models with DTensors over another dimension of a
    mesh, with hooks of a gather, as torchao's parameters have them, or with ``offload=``, and
    between several ranks over another communicator than ``ce`` or ``nccl``.

    Parameters
    ----------
    model : nn.Module
        As given to `shard`.
    optimizer : torch.optim.Optimizer or iterable of them
        Those that the function steps; none for a function that only adds to gradients. Where they
        can be captured (``capturable``), their learning rates become tensors on the device, so that
        schedules go on; others are captured anew whenever a hyperparameter changes. States of
        torch's own move, before a capture, out of memory that activations could have; the tensors
        stay the same.

    Returns
    -------
    callable
        A decorator. The function has no effect that matters but on tensors: its Python runs in the
        first calls only. Gradients are set to None in it, or outside of it if it has no optimizer.
        Tensors among its arguments lie on the device and are copied in; those that it returns are
        copies, detached, and safe to keep.

    Notes
    -----
    Models of ``transformers`` 5 ask the device in each forward whether their mask hides anything,
    and under a capture make another mask. Where attention is causal and nothing is padded,
    ``attention_mask={"full_attention": None}`` and ``position_ids`` spare them both.

    Examples
    --------
    >>> @penstock.step(model, optimizer)
    ... def train_step(tokens, targets):
    ...     loss = model(tokens, targets)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    """
    engine = engine_of(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)

    def decorate(function: _Function) -> _Function:
        return functools.wraps(function)(_Step(function, model, engine, optimizers))  # type: ignore[return-value]

    return decorate


class _Step:
    """A decorated function: its graphs, by signature."""

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module,
        engine: Engine,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._model = model
        self._engine = engine
        self._optimizers = optimizers
        self._rates = [_Rates(optimizer, engine.world.device) for optimizer in optimizers]
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: dict[Hashable, float] = {}  # how often; _NEVER: it cannot be captured
        self._captures = 0
        self._makers: dict[int, int] = {}  # by address: the number of the graph that has made it
        self._has_warned = False
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        engine.graph_owners.add(self)
        why = _why_never(engine)
        self._is_eager = why is not None
        if why is not None:
            self._warn(why)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_eager:
            return self._function(*args, **kwargs)
        self._engine.phases.begin_step()
        leaves, structure = pytree.tree_flatten((args, kwargs))
        for rates in self._rates:
            rates.refresh()
        signature = self._signature(leaves, structure)
        makers = self._makers_of_gradients()
        graph = self._graphs.get((signature, None)) or self._graphs.get((signature, makers))
        if graph is None and self._may_capture(signature, makers):
            graph = self._capture(leaves, structure, signature, makers)
        if graph is not None:
            result = self._launch(graph, leaves)
            if self._optimizers:
                self._engine.phases.end_optimizer()
            return result
        self._note((signature, makers))
        return self._function(*args, **kwargs)

    def _launch(self, graph: _Graph, leaves: list[Any]) -> Any:
        self._engine.phases.reach("captured step")
        try:
            return graph.launch(self._engine, leaves)
        except PenstockError as error:
            if error.status != "ESTATE":  # the engine has failed, and NCCL ends only behind graphs
                self._is_eager = True
                self.drop_graphs()
            raise

    def drop_graphs(self) -> None:
        """Destroy all graphs, which are captured anew where the model goes on."""
        for graph in self._graphs.values():
            graph.destroy()
        self._graphs.clear()
        self._makers.clear()

    def _makers_of_gradients(self) -> _Makers:
        """Return which graph has made each parameter's gradient; the same on all ranks."""
        return tuple(
            None if address is None else self._makers.get(address, _NO_GRAPH)
            for address in self._engine.gradient_addresses()
        )

    def _may_capture(self, signature: Hashable, makers: _Makers) -> bool:
        """Whether it is planned, and will not find its gradients elsewhere, as far as is known."""
        calls = _MORE_CALLS if _NO_GRAPH in makers else 1
        is_known = self._seen.get((signature, makers), 0) >= calls
        keeping = self._engine.keeping
        is_decided = keeping is None or keeping.is_decided
        return is_known and is_decided and self._engine.native.is_steady()

    def _note(self, key: Hashable) -> None:
        self._seen[key] = calls = self._seen.get(key, 0) + 1
        if calls == _MOST_CALLS:
            self._warn(
                "its passes still have no plan: they differ from each other, or leave parameters "
                "without a gradient"
            )
        if len(self._seen) <= _MOST_SEEN:
            return
        del self._seen[next(iter(self._seen))]
        if not self._graphs:
            self._warn("its arguments differ in each call: give it what changes as tensors")

    def _warn(self, why: str) -> None:
        """Say once why the step is not captured."""
        if not self._has_warned:
            _logger.warning("penstock.step: %s is not captured: %s", self._name, why)
        self._has_warned = True

    # ---- signatures ---------------------------------------------------------------------------

    def _signature(self, leaves: list[Any], structure: pytree.TreeSpec) -> Hashable:
        return (
            structure,
            tuple(map(_kind_of, leaves)),
            tuple(module.training for module in self._model.modules()),
            tuple(parameter.sharded.requires_grad for parameter in self._engine.parameters()),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            tuple(rates.constants() for rates in self._rates),
        )

    # ---- capturing ----------------------------------------------------------------------------

    def _capture(
        self,
        leaves: list[Any],
        structure: pytree.TreeSpec,
        signature: Hashable,
        makers: _Makers,
    ) -> _Graph | None:
        while len(self._graphs) >= _MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs))).destroy()
        graph, failure = None, ""
        before = [(p.sharded, p.sharded.grad) for p in self._engine.parameters()]
        begin = time.monotonic()
        try:
            graph = self._try(leaves, structure)
        except Exception as error:  # whatever a step may raise under capture
            failure = _reason_of(error)
        mine = torch.tensor([not failure], dtype=torch.uint8)
        if bool(self._engine.world.all_gather(mine).all()):
            self._note_graph(graph, signature, makers)  # type: ignore[arg-type]
            _logger.info(
                "penstock.step: %s is captured, in %.1f s", self._name, time.monotonic() - begin
            )
            return graph
        self._seen[signature, makers] = _NEVER
        self._warn(failure or "another rank could not capture it")
        for parameter, gradient in before:
            parameter.grad = gradient
        return None

    def _note_graph(self, graph: _Graph, signature: Hashable, makers: _Makers) -> None:
        """Keep it: for any gradients from before, if it has had some and not added to them."""
        self._captures += 1
        graph.number = self._captures
        is_for_any = not self._engine.has_added and any(maker is not None for maker in makers)
        self._graphs[signature, None if is_for_any else makers] = graph
        self._makers = {
            address: graph.number
            for graph in reversed(self._graphs.values())  # the first one, where others add to it
            for address in graph.addresses
            if address is not None
        }

    def _try(self, leaves: list[Any], structure: pytree.TreeSpec) -> _Graph:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device != self._engine.world.device:
                raise PenstockError(
                    "EUNSUPPORTED",
                    f"an argument is a tensor of {leaf.device}: move it to "
                    f"{self._engine.world.device} before the step",
                )
        self._engine.native.drain()
        torch.cuda.synchronize()
        set_apart(chain.from_iterable(map(_states_of, self._optimizers)))
        gc.collect()
        torch.cuda.empty_cache()
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.current_stream()
            if self._stream == torch.cuda.default_stream():  # which cannot be captured
                self._stream = torch.cuda.Stream()
        graph = _Graph(leaves, structure)
        graph.capture(self._function, self._engine, self._stream, self._pool, self._makers.keys())
        return graph


class _Graph:
    """One captured step: the tensors that it reads and writes."""

    def __init__(self, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        self.number = _NO_GRAPH
        self._structure = structure
        self._inputs = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        self._graph = torch.cuda.CUDAGraph()
        self._outputs: Any = None
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.addresses: list[int | None] = []  # theirs

    def capture(
        self,
        function: Callable[..., Any],
        engine: Engine,
        stream: torch.cuda.Stream,
        pool: Any,
        lasting: Collection[int],
    ) -> None:
        """Run the function under capture; nothing of it happens."""
        args, kwargs = pytree.tree_unflatten(self._inputs, self._structure)
        stream.wait_stream(torch.cuda.current_stream())
        collects = gc.isenabled()
        gc.disable()  # what it frees could end the capture
        torch.clear_autocast_cache()  # casts of before are in no graph
        try:
            with torch.cuda.stream(stream):
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    with engine.captured(stream, lasting):
                        self._outputs = function(*args, **kwargs)
                except BaseException:
                    self._abandon(engine.world.device, pool)
                    raise
                self._graph.capture_end()
        finally:
            torch.clear_autocast_cache()
            if collects:
                gc.enable()
        self._outputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self._outputs)
        self._gradients = [(p.sharded, p.sharded.grad) for p in engine.parameters()]
        self.addresses = engine.gradient_addresses()

    def _abandon(self, device: torch.device, pool: Any) -> None:
        """End a capture that is broken.

        Where the driver has invalidated it, torch leaves its allocator and its generators within
        it: the allocator is told, and an empty capture brings the generators out.
        """
        with contextlib.suppress(RuntimeError):
            self._graph.capture_end()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        empty.capture_end()

    def destroy(self) -> None:
        """Free the graph; what it has returned stays."""
        self._graph.reset()
        self._outputs = None
        self._gradients.clear()

    @torch.no_grad()
    def launch(self, engine: Engine, leaves: list[Any]) -> Any:
        """Train one step."""
        engine.refuse_stream("is stepped")
        for static, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                static.copy_(leaf)
        engine.native.before_graph()
        self._graph.replay()
        engine.native.after_graph()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, self._outputs)


class _Rates:
    """The hyperparameters of an optimizer; learning rates on the device, if it can be captured."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._is_capturable = device.type == "cuda" and all(
            "capturable" in group for group in optimizer.param_groups
        )
        self._state: Any = None
        self._loads = 0

    def refresh(self) -> None:
        """Take over what was assigned to the optimizer, or loaded, since."""
        if self._optimizer.state is not self._state:
            self._state = self._optimizer.state
            self._loads += 1
            if self._is_capturable:
                self._move_counts()
        if not self._is_capturable:
            return
        for i, group in enumerate(self._optimizer.param_groups):
            group["capturable"] = True
            rate = group["lr"]
            if i == len(self._tensors):
                self._tensors.append(torch.tensor(float(rate), device=self._device))
            elif rate is not self._tensors[i]:
                self._tensors[i].fill_(rate)
            group["lr"] = self._tensors[i]

    def _move_counts(self) -> None:
        for state in self._state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(self._device, torch.float32)

    def constants(self) -> Hashable:
        """Return what a capture makes constants of the graph, its tensors of state among them."""
        return self._loads, tuple(
            tuple(
                (name, id(value) if isinstance(value, torch.Tensor) else _constant_of(value))
                for name, value in group.items()
                if name != "params"
            )
            + (len(group["params"]),)
            for group in self._optimizer.param_groups
        )


def _states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return what an optimizer has made amid steps: of torch's own, which keep no views of it."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return []
    states = chain.from_iterable(state.values() for state in optimizer.state.values())
    return [state for state in states if isinstance(state, torch.Tensor)]


def _kind_of(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return (type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
    return _constant_of(leaf)


def _constant_of(value: Any) -> Hashable:
    """Return what tells a value from others: 1 is not True, and what is not compared is itself."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _why_never(engine: Engine) -> str | None:
    """Return why no step of this model can be captured; None: steps can."""
    if engine.world.device.type != "cuda":
        return f"there are no CUDA graphs on {engine.world.device}"
    offload = engine.options.offload
    if engine.options.offloads_shards or engine.options.offloads_activations:
        return f"the host has a part in steps of a model with offload={offload!r}"
    called = [p for p in engine.parameters() if p.extension and not p.extension.is_captured]
    if called:
        return f"hooks of the gather of {called[0].name!r} run in it, which no graph calls"
    if engine.world.axes is not None:
        return f"collectives along {engine.world.axes.names} are in it, which nobody captures"
    communicator = engine.native.communicator()
    if engine.world.size > 1 and communicator not in ("ce", "nccl"):
        return (
            f"communicator {communicator!r} cannot be captured between several ranks: give "
            "penstock.shard(..., communicator='ce') or 'nccl'"
        )
    return None


def _reason_of(error: BaseException) -> str:
    """Say what went wrong, and in which line of the user's."""
    others = {Path(torch.__file__).parent, Path(__file__).parent, Path(contextlib.__file__)}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not others & {Path(frame.filename), *Path(frame.filename).parents}
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip().splitlines()
    return f"{text[0] if text else type(error).__name__}{where}"
