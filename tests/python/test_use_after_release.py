"""A gathered parameter that is used after its release raises an error that names it."""

from contextlib import contextmanager

import penstock
import pytest
import torch
from models import DEVICE, Net, batch, make

NAMED = r"parameter 'blocks\.1\.up\.weight' is sharded and not gathered now"


@contextmanager
def keeping():
    """What a forward left behind: the whole weight, a view of it, and what was computed from it."""
    model = penstock.shard(make(Net))
    found = {}

    def keep(module, inputs, output):
        found["weight"] = module.weight
        found["view"] = module.weight.t()[2:]
        found["output"] = output
        found["copy"] = module.weight.detach().clone()

    model.blocks[1].up.register_forward_hook(keep)
    model(batch(0, 0))
    yield found
    penstock.close(model)


@pytest.fixture
def kept():
    with keeping() as found:
        yield found


def test_eager_code_raises(kept):
    for use in (
        lambda w: w + 1,
        lambda w: w.sum(),
        lambda w: w.clone(),
        lambda w: w.tolist(),
        lambda w: w.detach().cpu().numpy(),
        lambda w: torch.nn.functional.linear(torch.ones(1, 7, device=DEVICE), w),
        lambda w: w.data_ptr(),
    ):
        with pytest.raises(RuntimeError, match=NAMED):
            use(kept["weight"])


def test_writing_raises(kept):
    with pytest.raises(RuntimeError, match=NAMED), torch.no_grad():
        kept["weight"].zero_()


def test_a_view_raises(kept):
    with pytest.raises(RuntimeError, match=NAMED):
        kept["view"].sum()


def refuses_released(kept, backend):
    function = torch.compile(lambda w: (w * 2).sum(), backend=backend)
    with torch.no_grad():
        assert torch.isfinite(function(kept["copy"]))
        with pytest.raises(RuntimeError, match=NAMED):
            function(kept["weight"].detach())


def test_compiled_code_raises(kept):  # machine code: test_compile.py
    refuses_released(kept, "aot_eager")


def test_a_saved_tensor_raises(kept):
    with pytest.raises(RuntimeError, match=NAMED):
        kept["output"].sum().backward()


def test_metadata_stays_readable(kept):
    weight = kept["weight"]
    assert weight.shape == (13, 7) and weight.dtype == torch.float32 and weight.requires_grad


def test_the_next_gather_makes_it_whole_again():
    model = penstock.shard(make(Net))
    seen = []
    model.blocks[1].up.register_forward_hook(
        lambda module, inputs, output: seen.append((module.weight, module.weight.detach().clone()))
    )
    for _ in range(2):
        model(batch(0, 0))
        with pytest.raises(RuntimeError, match=NAMED):
            seen[-1][0].sum()
    assert seen[0][0] is seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])
    assert torch.equal(seen[0][1], make(Net).blocks[1].up.weight)
    penstock.close(model)
