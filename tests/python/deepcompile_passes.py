"""Passes that put operators of the namespace `dc` into the graphs of a model's forward and
backward, in the places and with the arguments in which DeepSpeed's passes put them."""

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


@dataclass
class Compiled:
    """A graph pair of one compile: which inputs are parameters, and what became of it."""

    graph_id: int
    ids: dict[int, int]  # parameter's number by the number of the input
    graph: fx.Graph  # kept, so that no later one gets its id
    needs_backward: bool = False
    names: list[str] = field(default_factory=list)  # of the inputs in the forward graph


def make_backend(
    id_of: Callable[[torch.Tensor], int | None],
    register: Callable[[int, list[int]], None],
    *,
    gathers: bool,
    prefetch: int = 0,
    order: list[Compiled],
    profile: Callable[[fx.GraphModule, list[Any]], None] | None = None,
) -> Callable[..., Any]:
    """A backend for torch.compile that runs the graphs with the operators in them.

    gathers: parameters are sharded and gathered in the graph; prefetch: so many of them at a time
    are announced ahead. `order` gets the graphs, in the order of their compilation; `profile` runs
    before the first run of each, with its arguments.
    """

    def backend(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found = {i: id_of(t) for i, t in enumerate(inputs) if isinstance(t, torch.nn.Parameter)}
        compiled = Compiled(id(module.graph), found, module.graph)

        def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            compiled.needs_backward = True
            if gathers:
                _recompute_views_of_parameters(joint.graph, compiled)
            return min_cut_rematerialization_partition(joint, joint_inputs, **options)

        def forward(graph: fx.GraphModule, _: Any) -> Any:
            order.append(compiled)
            register(compiled.graph_id, list(compiled.ids.values()))
            compiled.names = [node.name for node in _inputs(graph.graph)]
            if gathers:
                _add_gathers(graph.graph, compiled, prefetch)
            return _finish(graph, profile)

        def backward(graph: fx.GraphModule, _: Any) -> Any:
            reducing = [each for each in order if each.needs_backward]
            if gathers:
                _add_gathers(graph.graph, compiled, prefetch)
            _add_reductions(graph.graph, compiled, release=compiled is reducing[0])
            return _finish(graph, profile)

        return aot_module_simplified(
            module, inputs, fw_compiler=forward, bw_compiler=backward, partition_fn=partition
        )

    return backend


def _finish(module: fx.GraphModule, profile: Callable[..., None] | None) -> Any:
    module.graph.lint()
    module.recompile()
    profiled = profile is None

    def run(arguments: list[Any]) -> Any:
        nonlocal profiled
        if not profiled and profile is not None:
            profile(module, arguments)
        profiled = True
        return module.forward(*arguments)

    return make_boxed_func(lambda *arguments: run(list(arguments)))


def profile_with(handle: Callable[[], Any]) -> Callable[[fx.GraphModule, list[Any]], None]:
    """Measure a graph as DeepSpeed does: each node several times, then all of it once more."""

    def profile(module: fx.GraphModule, arguments: list[Any]) -> None:
        for interpreter in (_NodeByNode(module, handle()), fx.Interpreter(module)):
            handle().enable_profiling(True)
            interpreter.run(*arguments)
            handle().clear_all_gathered_params()
            handle().enable_profiling(False)

    return profile


class _NodeByNode(fx.Interpreter):
    """Runs each node three times; what is gathered is not there for the next node."""

    def __init__(self, module: fx.GraphModule, handle: Any) -> None:
        super().__init__(module)
        self.handle = handle

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function" or node.target is torch.ops.dc.end_backward.default:
            return None if node.op == "call_function" else super().run_node(node)
        if node.target is torch.ops.dc.release_param.default:
            return super().run_node(node)
        for times in (2, 3):
            for _ in range(times):
                result = super().run_node(node)
            dist.barrier()
        if node.target is torch.ops.dc.allgather_param.default:
            result = result.clone()
            self.handle.invalidate_gathered_param(node.args[2])
        return result


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _output(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "output")


# ---- gathers and releases -----------------------------------------------------------------------


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _cast_of(node: fx.Node) -> torch.dtype | None:
    if node.target not in _CASTS:
        return None
    return node.kwargs.get("dtype") or (node.args[1] if len(node.args) > 1 else None)


def _recompute_views_of_parameters(joint: fx.Graph, compiled: Compiled) -> None:
    """A view or cast of a gathered parameter must not be saved: the backward gathers again."""
    inputs = _inputs(joint)
    sharded = {inputs[i] for i in compiled.ids}
    for node in joint.nodes:
        node.meta.setdefault("ac_graph_id", 1)
        derived = _is_view(node) or _cast_of(node) is not None
        if derived and any(isinstance(a, fx.Node) and a in sharded for a in node.args):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            sharded.add(node)


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _real_users(node: fx.Node) -> list[fx.Node]:
    """Who reads the memory of a node: its users, and those of views of it."""
    found: dict[fx.Node, None] = {}
    for user in _users(node):
        found.update(dict.fromkeys(_real_users(user) if _is_view(user) else [user]))
    return list(found)


def _add_gathers(graph: fx.Graph, compiled: Compiled, prefetch: int) -> None:
    by_name = {compiled.names[i]: ds_id for i, ds_id in compiled.ids.items()}
    position = {node: i for i, node in enumerate(graph.nodes)}
    parameters = [node for node in _inputs(graph) if node.name in by_name and _users(node)]
    parameters.sort(key=lambda node: min(position[user] for user in _users(node)))
    firsts = [
        _add_gather(graph, compiled.graph_id, node, by_name[node.name]) for node in parameters
    ]
    if not prefetch:
        return
    ids = [by_name[node.name] for node in parameters]
    for begin in range(0, len(ids), prefetch):
        batch = slice(begin, begin + prefetch)
        before = firsts[max(0, begin - prefetch)]
        with graph.inserting_before(before):
            graph.call_function(
                torch.ops.dc.prefetch_params_fused.default,
                (compiled.graph_id, parameters[batch], ids[batch]),
            )


def _add_gather(graph: fx.Graph, graph_id: int, node: fx.Node, ds_id: int) -> fx.Node:
    """Gather and wait before the first use, release after each; returns the gather."""
    users = _users(node)
    dtype = node.meta["val"].dtype
    cast = _cast_of(users[0]) if len(users) == 1 else None
    narrower = cast is not None and cast.itemsize < dtype.itemsize
    first = min(users, key=list(graph.nodes).index)
    real = _real_users(users[0] if narrower else node)
    with graph.inserting_before(first):
        gathered = graph.call_function(
            torch.ops.dc.allgather_param.default,
            (node, graph_id, ds_id),
            {"dtype": cast if narrower else dtype},
        )
        waited = graph.call_function(
            torch.ops.dc.wait_allgather.default, (gathered, graph_id, ds_id)
        )
    for user in users:
        user.replace_input_with(node, waited)
    if narrower:  # the gather casts: the cast itself goes
        users[0].replace_all_uses_with(waited)
        graph.erase_node(users[0])
    for user in real:
        _add_release(graph, _value_of(user), (graph_id, ds_id, len(real)))
    return gathered


def _value_of(node: fx.Node) -> fx.Node:
    """The node itself, or the first element where its value is a tuple."""
    elements = (user for user in node.users if user.target is operator.getitem)
    return next(elements, node)


def _add_release(graph: fx.Graph, node: fx.Node, arguments: tuple[int, ...]) -> None:
    users = list(node.users)
    with graph.inserting_after(node):
        release = graph.call_function(torch.ops.dc.release_param.default, (node, *arguments))
    for user in users:
        user.replace_input_with(node, release)


# ---- reductions ---------------------------------------------------------------------------------


def _add_reductions(graph: fx.Graph, compiled: Compiled, *, release: bool) -> None:
    output = _output(graph)
    gradients = list(output.args[0])
    reduced = []
    for i, ds_id in compiled.ids.items():
        if gradients[i] is None:
            continue
        with graph.inserting_before(_after_inputs(graph, gradients[i])):
            reduced.append(
                graph.call_function(
                    torch.ops.dc.reduce_grad.default, (gradients[i], compiled.graph_id, ds_id)
                )
            )
        gradients[i] = None
    output.args = (tuple(gradients),)
    if reduced:
        with graph.inserting_before(output):
            graph.call_function(
                torch.ops.dc.end_backward.default, (reduced, compiled.graph_id, release)
            )


def _after_inputs(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The first place after a node that is not among the inputs."""
    nodes = list(graph.nodes)
    behind = itertools.islice(nodes, nodes.index(node) + 1, None)
    return next(other for other in behind if other.op != "placeholder")
