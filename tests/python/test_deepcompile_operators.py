"""The operators of the namespace `dc`: their schemas, and for which devices they have kernels."""

import pytest
import torch
from fake_deepspeed import OPERATORS
from penstock import PenstockError, _operators, dc

NAMES = [schema.split("(")[0] for schema in OPERATORS]
MOVES = ("offload_tensor", "wait_offload", "reload_tensor", "wait_reload")


@pytest.fixture(autouse=True)
def operators():
    _operators.load()


@pytest.mark.parametrize("schema", OPERATORS, ids=NAMES)
def test_schemas_are_deepspeeds(schema):
    name = schema.split("(")[0]
    assert str(getattr(torch.ops.dc, name).default._schema) == str(
        torch._C.parse_schema(f"dc::{schema}")
    )


@pytest.mark.parametrize("key", ["CPU", "CUDA", "Meta"])
@pytest.mark.parametrize("name", NAMES)
def test_each_operator_has_kernels_for_each_device(name, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dc::{name}", key)


def test_the_end_of_a_backward_is_found_without_tensors():
    with pytest.raises(RuntimeError, match=r"^dc::end_backward: .*\(ESTATE\)"):
        torch.ops.dc.end_backward([None, None], 12345, False)  # no graph has this number


@pytest.mark.parametrize("name", MOVES)
def test_shapes_of_what_moves_are_known_without_moving(name):
    moved = getattr(torch.ops.dc, name)(torch.empty(3, 5, device="meta"), 0, 7)
    assert moved.shape == (3, 5) and moved.is_meta


@pytest.mark.parametrize("name", MOVES)
def test_moves_take_their_numbers_by_name(name):
    move = getattr(torch.ops.dc, name)
    assert move(torch.empty(2, device="meta"), graph_id=0, id=7).shape == (2,)


def test_what_waits_or_releases_returns_its_argument():
    gathered = torch.empty(4, 2, device="meta")
    assert torch.ops.dc.wait_allgather(gathered, 0, 1) is gathered
    assert torch.ops.dc.release_param(gathered, 0, 1, 2) is gathered
    for by_name in (
        torch.ops.dc.wait_allgather(gathered, graph_id=0, ds_id=1),
        torch.ops.dc.release_param(gathered, graph_id=0, ds_id=1, n_users=2),
    ):
        assert by_name is gathered


def test_a_gradient_is_reduced_to_an_empty_tensor():
    gradient = torch.empty(4, 2, dtype=torch.bfloat16, device="meta")
    for reduced in (
        torch.ops.dc.reduce_grad(gradient, 0, 1),
        torch.ops.dc.reduce_grad(gradient, graph_id=0, ds_id=1),
    ):
        assert reduced.shape == (0,) and reduced.dtype == torch.bfloat16


def test_a_field_that_the_configuration_does_not_have_is_named():
    with pytest.raises(PenstockError, match="no field 'double_bufer'"):
        dc.init(None, {"double_bufer": True})
