"""How the blocks of a model are found."""

import pytest
import torch
from models import Block, Net, make
from penstock._blocks import find_blocks
from torch import nn


def names(model, blocks=None):
    return [name for name, _ in find_blocks(model, blocks)]


def linear():
    return nn.Linear(4, 4)


def layer():
    return nn.Sequential(linear(), nn.ReLU(), linear())


def test_elements_of_a_module_list_are_blocks():
    assert names(make(Net)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_lists_inside_blocks_are_part_of_them():
    model = nn.Module()
    model.layers = nn.ModuleList(layer() for _ in range(2))
    for each in model.layers:
        each.experts = nn.ModuleList([linear(), linear()])
    assert names(model) == ["layers.0", "layers.1"]


def test_elements_without_parameters_or_forward_are_not_blocks():
    model = nn.Module()
    inner = nn.ModuleList([linear(), linear()])
    model.layers = nn.ModuleList([nn.ReLU(), linear(), inner])
    assert names(model) == ["layers.1", "layers.2.0", "layers.2.1"]


def test_what_is_wrapped_to_be_compiled_is_a_block():
    model = make(Net)
    model.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in model.blocks)
    assert names(model) == names(model, list(model.blocks)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_two_lists_are_both_found():
    model = nn.Module()
    model.encoder = nn.ModuleList([layer(), layer()])
    model.decoder = nn.ModuleList([layer()])
    assert names(model) == ["encoder.0", "encoder.1", "decoder.0"]


def test_without_a_list_the_largest_repeated_class_is_found():
    model = nn.Sequential(linear(), Block(), Block(), linear())
    assert names(model) == ["1", "2"]


def test_a_plain_stack_of_linears_has_its_linears_as_blocks():
    assert names(layer()) == ["0", "2"]


def test_a_model_with_nothing_repeated_has_no_blocks():
    assert names(nn.Sequential(linear(), nn.LayerNorm(4))) == []


@pytest.mark.parametrize(
    ("blocks", "want"),
    [
        (["blocks.1"], ["blocks.1"]),
        (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
        ([Block], ["blocks.0", "blocks.1", "blocks.2"]),
        ([nn.LayerNorm, "embed"], ["embed", "norm"]),
        (lambda name, module: name.endswith("up"), ["blocks.0.up", "blocks.1.up", "blocks.2.up"]),
        ([], []),
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        (Block, ["blocks.0", "blocks.1", "blocks.2"]),
    ],
    ids=["name", "pattern", "class", "mixed", "predicate", "none", "a pattern", "a class"],
)
def test_blocks_can_be_named(blocks, want):
    assert names(make(Net), blocks) == want


def test_a_module_can_be_given_itself():
    model = make(Net)
    assert names(model, [model.head, model.embed]) == ["embed", "head"]
    assert names(model, model.head) == ["head"]
    assert names(model, model.blocks) == ["blocks.0", "blocks.1", "blocks.2"]


def test_named_blocks_inside_each_other_are_the_outermost():
    assert names(make(Net), ["blocks.0", "blocks.0.up"]) == ["blocks.0"]
