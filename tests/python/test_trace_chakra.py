"""Execution traces for Chakra, read by protobuf with what its schema has of nodes."""

from __future__ import annotations

import penstock
import penstock.trace as tool
import pytest
from made_traces import RankTrace, merged
from models import DEVICE, Net, loss_of, make

pytest.importorskip("google.protobuf.proto", reason="protobuf is missing: pip install it")
from google.protobuf import (  # noqa: E402
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    proto,
    unknown_fields,
)

# Fields of its messages: number, type, and whether there are several.
SCHEMA = {
    "AttributeProto": {
        "name": (1, "string", False),
        "int64_val": (9, "int64", False),
        "bool_val": (27, "bool", False),
    },
    "GlobalMetadata": {"version": (1, "string", False), "attr": (2, "AttributeProto", True)},
    "Node": {
        "id": (1, "uint64", False),
        "name": (2, "string", False),
        "type": (3, "int32", False),  # an enum there, which is encoded alike
        "ctrl_deps": (4, "uint64", True),
        "data_deps": (5, "uint64", True),
        "start_time_micros": (6, "uint64", False),
        "duration_micros": (7, "uint64", False),
        "attr": (10, "AttributeProto", True),
    },
}
COMPUTE, COLLECTIVE = 4, 7
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = 0, 2, 7


def described():
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    for message, fields in SCHEMA.items():
        described = file.message_type.add(name=message)
        for name, (number, kind, several) in fields.items():
            added = described.field.add(name=name, number=number)
            added.label = field.LABEL_REPEATED if several else field.LABEL_OPTIONAL
            if kind in SCHEMA:
                added.type, added.type_name = field.TYPE_MESSAGE, f".et.{kind}"
            else:
                added.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"et.{name}"))
        for name in SCHEMA
    }


MESSAGES = described()


def nodes_of(path):
    """The nodes of a file in its order, after what holds for all files."""
    nodes, seen = [], set()
    with path.open("rb") as file:
        assert proto.parse_length_prefixed(MESSAGES["GlobalMetadata"], file).version
        while node := proto.parse_length_prefixed(MESSAGES["Node"], file):
            nodes.append(node)
        written = file.tell()
    assert written == path.stat().st_size
    for node in nodes:
        assert not unknown_fields.UnknownFieldSet(node)
        assert node.id not in seen and node.name
        assert set(node.data_deps) <= seen and not node.ctrl_deps
        seen.add(node.id)
        assert [a.bool_val for a in node.attr if a.name == "is_cpu_op"] == [False]
    return nodes


def attributes_of(node):
    return {attr.name: attr.int64_val for attr in node.attr if attr.name != "is_cpu_op"}


def a_step(rank):
    trace = RankTrace(rank).host("step", 10, 1000)
    trace.host("forward a", 10, 200).host("forward b", 300, 400).host("backward b", 400, 900)
    trace.task("gather", "a", 0, 9, ticket=1, bytes=800).host("optimizer", 900, 1000)
    trace.task("gather", "b", 100, 280, ticket=2, bytes=400)
    trace.host("wait b", 200, 290)
    trace.task("reduce", "gradients b", 450, 700, ticket=1, bytes=1200)
    trace.task("reduce", "presence", 720, 740, ticket=2, bytes=8)
    return trace.task("copy", "c", 10, 20, bytes=8)


def test_nodes_have_kinds_times_and_what_they_depend_on(tmp_path):
    merged(tmp_path, a_step(0), a_step(1))
    command = ["chakra", str(tmp_path / "merged.json"), str(tmp_path / "out")]
    assert tool.main(command) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["rank.0.et", "rank.1.et"]
    for rank in range(2):
        nodes = nodes_of(tmp_path / "out" / f"rank.{rank}.et")
        names = {node.id: node.name for node in nodes}
        deps = [(n.name, n.type, sorted(names[dep] for dep in n.data_deps)) for n in nodes]
        assert deps == [
            ("a", COLLECTIVE, []),
            ("forward a", COMPUTE, ["a"]),  # which did not have to wait
            ("b", COLLECTIVE, ["a"]),
            ("step", COMPUTE, ["b", "forward a"]),  # between the wait and the next block
            ("forward b", COMPUTE, ["b", "step"]),
            ("backward b", COMPUTE, ["b", "forward b"]),
            ("gradients b", COLLECTIVE, ["forward b"]),
            ("presence", COLLECTIVE, ["forward b", "gradients b"]),
            ("optimizer", COMPUTE, ["backward b", "gradients b"]),
        ]
        b = next(node for node in nodes if node.name == "b")
        assert (b.start_time_micros, b.duration_micros) == (100, 180)
        kinds = {n.name: attributes_of(n) for n in nodes if n.type == COLLECTIVE}
        assert kinds == {
            "a": {"comm_type": ALL_GATHER, "comm_size": 400},  # what a rank gives
            "b": {"comm_type": ALL_GATHER, "comm_size": 200},
            "gradients b": {"comm_type": REDUCE_SCATTER, "comm_size": 1200},
            "presence": {"comm_type": ALL_REDUCE, "comm_size": 8},
        }
        assert all(attributes_of(node) == {} for node in nodes if node.type == COMPUTE)


@pytest.mark.parametrize(
    ("lane", "step", "said"),
    [("gather", "other", "has no steps"), ("reduce replicas", "step", "who takes part")],
)
def test_a_trace_of_which_too_little_is_known_is_refused(tmp_path, lane, step, said):
    trace = RankTrace(0).host(step, 0, 10).task(lane, "a", 0, 5, ticket=1)
    with pytest.raises(tool.TraceError, match=said):
        tool.write_chakra(trace.save(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def train(folder):
    model = penstock.shard(make(Net))
    optimizer = penstock.AdamW(model)
    with penstock.trace(model, f"{folder}/rank{{rank}}.json"):
        for step in range(2):
            loss_of(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
    penstock.close(model)


@pytest.mark.skipif(DEVICE == "cuda", reason="the files are alike on GPUs")
def test_a_training_is_written_with_all_its_collectives(worlds, tmp_path):
    worlds(2).run(train, str(tmp_path))
    tool.merge([tmp_path / "rank0.json", tmp_path / "rank1.json"], tmp_path / "merged.json")
    tool.write_chakra(tmp_path / "merged.json", tmp_path / "out")
    for rank in range(2):
        nodes = nodes_of(tmp_path / "out" / f"rank.{rank}.et")
        written = [n.name for n in nodes if n.type == COLLECTIVE]
        lanes = [t for t in tool.load(tmp_path / "merged.json").of_rank(rank) if t.is_lane]
        assert sorted(written) == sorted(s.name for t in lanes for s in t.slices if s.args)
        assert written.count("blocks.1") >= 2  # gathers
        assert any(name.startswith("gradients ") for name in written)
        forward = [n for n in nodes if n.name == "forward blocks.1"][-1]  # behind its wait
        before, passed = {node.id: node for node in nodes}, {forward.id}
        for node in reversed(nodes):  # what it depends on, and what that depends on
            passed |= set(node.data_deps) if node.id in passed else set()
        assert {"embed", "blocks.1"} <= {before[number].name for number in passed}
