"""DeepCompile's order of a backward: gradients that wait for no gather are reduced first.

DeepSpeed 0.19.6 places a reduction behind the last gather that leads to it. One that none leads to,
as the output layer's of a language model, it leaves to the end of the backward: there it is reduced
with no computation beside it, and until then what it is computed from takes memory.

Only products are brought forward, which are what is large, and which nobody else reads: DeepCompile
frees a gradient's memory with its reduction, and others may be views of what is still needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

_PRODUCTS = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
)
_RESHAPED = frozenset(
    {
        torch.ops.aten.t.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)


def reduce_early(schedule: Callable[..., Graph]) -> Callable[..., Graph]:
    """Wrap the function that schedules a graph, so that such reductions follow its first gather.

    Parameters
    ----------
    schedule : callable
        Returns a graph in the order in which it is to run.

    Returns
    -------
    callable
        It, with the same arguments.
    """

    @functools.wraps(schedule)
    def scheduled(*args: Any, **kwargs: Any) -> Graph:
        graph = schedule(*args, **kwargs)
        _advance(graph)
        return graph

    return scheduled


def _advance(graph: Graph) -> None:
    gather = torch.ops.dc.allgather_param.default
    gathers = [node for node in graph.nodes if node.target is gather]
    behind = _behind(graph, gathers)
    reductions = [
        node
        for node in graph.nodes
        if node.target is torch.ops.dc.reduce_grad.default
        and node not in behind
        and _is_product_of_its_own(node.args[0])
    ]
    if not gathers or not reductions:
        return
    begun, early = _leading_to(gathers[:1]), _leading_to(reductions)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    others = [node for node in graph.nodes if node.op != "placeholder"]
    others.sort(key=lambda node: 0 if node in begun else 1 if node in early else 2)
    for before, node in zip([inputs[-1], *others], others, strict=False):
        before.append(node)
    graph.lint()


def _is_product_of_its_own(gradient: Any) -> bool:
    """Return whether it is a product, maybe reshaped or cast, that has no other user."""
    while len(gradient.users) == 1 and gradient.target in _RESHAPED:
        gradient = gradient.args[0]
    return len(gradient.users) == 1 and gradient.target in _PRODUCTS


def _behind(graph: Graph, first: Iterable[Node]) -> set[Node]:
    """Return what needs one of these, and these."""
    found = set(first)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _leading_to(last: Iterable[Node]) -> set[Node]:
    """Return what these need, and these."""
    found: set[Node] = set()
    waiting = list(last)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
