"""Training over nodes: which there are, and that sums over them train as one process does."""

import penstock
import pytest
from equality import train_both
from models import DEVICE, Net, make
from penstock import PenstockError
from penstock._world import Nodes, nodes_of

# ---- nodes ------------------------------------------------------------------------------------


def test_the_ranks_of_a_host_are_a_node():
    assert nodes_of(["a", "a", "b", "b", "c", "c"], None) == Nodes(2, 3)
    assert nodes_of(["a", "a"], None) == Nodes(2, 1)
    assert nodes_of(["a", "b"], None) == Nodes(1, 2)


def test_nodes_may_be_given():
    assert nodes_of(["a"] * 6, 3) == Nodes(3, 2)


@pytest.mark.parametrize(
    ("hosts", "given", "text"),
    [
        (["a", "a", "b"], None, r"runs of \[2, 1\] on 2 hosts"),
        (["a", "b", "a", "b"], None, r"runs of \[1, 1, 1, 1\] on 2 hosts"),
        (["a"] * 4, 3, "ranks_per_node=3 does not divide 4 ranks"),
        (["a"] * 4, 0, "ranks_per_node=0 does not divide"),
    ],
)
def test_what_are_no_nodes_is_named(hosts, given, text):
    with pytest.raises(PenstockError, match=text) as caught:
        nodes_of(hosts, given)
    assert caught.value.status == "EINVAL"


# ---- training ---------------------------------------------------------------------------------


def train(stage, ranks_per_node):
    options = {"communicator": "hierarchy", "ranks_per_node": ranks_per_node}
    sharded = train_both(Net, stage=stage, **options)
    assert penstock.stats(sharded).communicator == "hierarchy"
    penstock.close(sharded)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_over_two_nodes_equals_one_process(worlds, stage):
    worlds(4).run(train, stage, 2)


def refuse(ranks_per_node, text):
    with pytest.raises(PenstockError, match=text) as caught:
        penstock.shard(make(Net), communicator="hierarchy", ranks_per_node=ranks_per_node)
    assert caught.value.status == "EINVAL"
    penstock.close(penstock.shard(make(Net)))  # the ranks are where they were


@pytest.mark.parametrize(
    ("ranks_per_node", "text"),
    [
        (None, "1 nodes of 2 ranks are no hierarchy"),
        (1, "2 nodes of 1 ranks are no hierarchy"),
        (3, "does not divide 2 ranks"),
    ],
)
def test_what_is_no_hierarchy_is_refused_on_all_ranks(worlds, ranks_per_node, text):
    worlds(2).run(refuse, ranks_per_node, text)


def automatic(ranks_per_node):
    sharded = train_both(Net, ranks_per_node=ranks_per_node)
    assert penstock.stats(sharded).communicator == "hierarchy"
    penstock.close(sharded)


@pytest.mark.skipif(
    DEVICE != "cuda", reason='"auto" takes nodes on GPUs: PENSTOCK_TEST_DEVICE=cuda'
)
def test_several_nodes_are_a_hierarchy_where_copy_engines_serve(worlds):
    worlds(4).run(automatic, 2)


def test_one_process_is_no_hierarchy():
    with pytest.raises(PenstockError, match="this process is alone"):
        penstock.shard(make(Net), communicator="hierarchy")
