"""Gradients that wait for no gather are reduced first, whatever the order was before."""

import os
import random
import sys
import time

import fake_deepspeed
import penstock.deepspeed
import pytest
import torch
from fake_deepspeed import declarations
from penstock import _operators
from penstock._early_reductions import reduce_early
from torch.fx import Graph

_operators.load()
ATEN, DC = torch.ops.aten, torch.ops.dc


class Backward:
    """A graph that grows node by node; each is named after what it is."""

    def __init__(self):
        self.graph = Graph()
        self.shards = [self.graph.placeholder(f"shard_{i}") for i in range(3)]
        self.values = [self.graph.placeholder(name) for name in ("tangent", "hidden")]

    def _call(self, name, target, *args):
        return self.graph.create_node("call_function", target, args, {}, name)

    def gather(self, number):
        gathered = self._call(
            f"gather_{number}", DC.allgather_param.default, self.shards[number], 1, number
        )
        return self._call(f"wait_{number}", DC.wait_allgather.default, gathered, 1, number)

    def multiply(self, name, *factors):
        return self._call(name, ATEN.mm.default, *factors)

    def reduce(self, number, gradient):
        return self._call(f"reduce_{number}", DC.reduce_grad.default, gradient, 1, number)

    def names(self):
        return [node.name for node in self.graph.nodes if node.op == "call_function"]

    def output(self, *nodes):
        self.graph.output(nodes)
        return reduce_early(lambda graph: graph)(self.graph)


def test_the_last_layers_gradient_is_reduced_beside_the_first_gather():
    backward = Backward()
    tangent, hidden = backward.values
    logits = backward.multiply("logits", tangent, hidden)
    below = backward.multiply("below", logits, backward.gather(0))
    first = backward.reduce(1, backward.multiply("weight_1", below, hidden))
    last = backward.reduce(0, backward.multiply("weight_0", logits, hidden))
    graph = backward.output(first, last)
    assert graph is backward.graph
    assert backward.names() == [
        "gather_0", "logits", "weight_0", "reduce_0", "wait_0", "below", "weight_1", "reduce_1"
    ]  # fmt: skip
    assert [node.op for node in graph.nodes][-1] == "output"


def test_what_the_first_gather_needs_stays_before_it():
    backward = Backward()
    tangent, hidden = backward.values
    cast = backward.multiply("cast", tangent, hidden)
    backward.shards[0] = cast
    below = backward.multiply("below", tangent, backward.gather(0))
    weight = backward.multiply("weight", tangent, cast)
    backward.output(below, backward.reduce(0, weight))
    assert backward.names() == ["cast", "gather_0", "weight", "reduce_0", "wait_0", "below"]


@pytest.mark.parametrize("is_read_by_others", [False, True])
def test_gradients_that_others_read_stay_where_they_are(is_read_by_others):
    backward = Backward()
    tangent, hidden = backward.values
    product = backward.multiply("product", tangent, hidden)
    turned = backward._call("turned", ATEN.t.default, product)
    below = backward.multiply(
        "below", product if is_read_by_others else tangent, backward.gather(0)
    )
    reduced = backward.reduce(0, turned)
    summed = backward.reduce(1, tangent)  # an input of the graph, which is not its own
    before = backward.names()
    backward.output(below, reduced, summed)
    moved = ["gather_0", "product", "turned", "reduce_0", "wait_0", "below", "reduce_1"]
    assert backward.names() == (before if is_read_by_others else moved)


@pytest.mark.parametrize("has_gather", [False, True])
def test_other_graphs_keep_their_order(has_gather):
    backward = Backward()
    tangent, hidden = backward.values
    gathered = backward.gather(0) if has_gather else hidden
    ahead = backward.multiply("ahead", tangent, hidden)  # of no reduction
    reduced = backward.reduce(0, backward.multiply("weight", tangent, gathered))
    before = backward.names()
    backward.output(ahead, reduced)
    assert backward.names() == before


def test_any_graph_stays_in_an_order_that_runs():
    seed = int(os.environ.get("PST_SEED", time.time_ns() % 2**32))
    print(f"PST_SEED={seed}")
    draw = random.Random(seed)
    for _ in range(50):
        backward = Backward()
        nodes = list(backward.values)
        reduced = []
        for number in range(draw.randrange(2, 20)):
            kind = draw.randrange(4)
            if kind == 0:
                nodes.append(backward.gather(draw.randrange(3)))
            elif kind == 1:
                reduced.append(backward.reduce(number, draw.choice(nodes)))
            else:
                nodes.append(backward.multiply(f"m_{number}", *draw.choices(nodes, k=2)))
        before = backward.names()
        backward.output(*reduced, nodes[-1]).lint()  # raises if a node needs a later one
        assert sorted(backward.names()) == sorted(before)
        assert [n for n in backward.names() if n.startswith("gather")] == [
            n for n in before if n.startswith("gather")
        ]


def install(folder):
    fake_deepspeed.put(folder, source=declarations())
    stage3 = sys.modules["deepspeed.compile.passes.zero3_compile"]
    original = stage3.fast_free_schedule
    penstock.deepspeed.install()
    assert stage3.fast_free_schedule.__wrapped__ is original
    penstock.deepspeed.uninstall()
    assert stage3.fast_free_schedule is original
    fake_deepspeed.remove()


def test_deepspeeds_schedule_is_wrapped_while_penstock_is_installed(fresh_world, tmp_path):
    fresh_world(1).run(install, tmp_path)
