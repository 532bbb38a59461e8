"""torch.compile on blocks and on the whole model."""

import penstock
import pytest
import torch
from equality import train_both, world
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from models import DEVICE, Block, CheckpointedInside, Net, batch, make
from penstock._compile import not_compiled
from test_use_after_release import keeping, refuses_released
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class CompiledBlocks(Net):
    """`block.compile()`, as one would with FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class WrappedBlocks(Net):
    """`torch.compile(block)` called in place of the block."""

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            if "wrapped" not in block.__dict__:
                block.__dict__["wrapped"] = torch.compile(block, backend="aot_eager")
            x = block.wrapped(x)
        return x


class ReplacedBlocks(Net):
    """`torch.compile(block)` put in place of the block, as torchtitan does it."""

    def __init__(self) -> None:
        super().__init__()
        compiled = (torch.compile(block, backend="aot_eager") for block in self.blocks)
        self.blocks = torch.nn.ModuleList(compiled)


class Inductor(Net):
    def __init__(self) -> None:
        super().__init__(1)
        self.blocks[0].compile()


class CompiledCheckpointed(CheckpointedInside):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


def train_compiled(kind, stage):
    torch._dynamo.reset()
    penstock.close(train_both(kind, stage=stage))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "kind",
    [CompiledBlocks, WrappedBlocks, ReplacedBlocks, CompiledCheckpointed],
    ids=lambda k: k.__name__,
)
def test_compiled_blocks_equal_unsharded(worlds, kind, stage):
    worlds(2).run(train_compiled, kind, stage)


def run_machine_code():
    """A process's first takes half a minute: all of it is here."""
    train_compiled(Inductor, 3)
    with keeping() as kept:
        if world()[0] == 0:
            refuses_released(kept, "inductor")


def test_machine_code_equals_unsharded_and_raises_for_what_is_released(worlds):
    worlds(2).run(run_machine_code, answer_within=240)


def graphs_of_a_block():
    """Hooks are not traced, and a second step compiles nothing new."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = penstock.shard(make(Net))
    for block in model.blocks[:1]:
        block.compile(backend=backend, fullgraph=True)
    for step in range(3):
        model(torch.ones(2, 5, device=DEVICE) + step).sum().backward()
    penstock.close(model)
    return len(graphs)


def test_a_block_is_one_graph_and_compiled_once(worlds):
    assert worlds(2).run(graphs_of_a_block) == [1, 1]


def train_compiled_whole():
    torch._dynamo.reset()
    rank = torch.distributed.get_rank()
    plain, model = make(Net), penstock.shard(make(Net))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 5, device=DEVICE) + rank
    for _ in range(2):
        loss = compiled(x).square().sum()
        loss.backward()
        assert torch.allclose(loss, plain(x).square().sum())
    assert penstock.stats(compiled).forwards >= 2
    penstock.close(model)


def test_a_compiled_model_runs_with_breaks_at_the_hooks(worlds):
    worlds(2).run(train_compiled_whole)


def test_a_backward_that_is_to_be_compiled_is_refused():
    torch._dynamo.reset()
    model = penstock.shard(make(Net))
    x = torch.ones(2, 5, device=DEVICE)
    compiler = torch.compile(backend="eager")
    with (
        torch._dynamo.compiled_autograd._enable(compiler),
        pytest.raises(penstock.PenstockError, match="outside of torch.compile") as caught,
    ):
        model(x).sum().backward()
    assert caught.value.status == "EUNSUPPORTED" and "\n" not in str(caught.value)
    model(x).sum().backward()
    assert model.head.weight.grad is not None
    penstock.close(model)


def test_neither_a_hook_nor_what_it_calls_is_compiled():
    torch._dynamo.reset()
    names = []

    def backend(graph, inputs):
        names.extend(node.name for node in graph.graph.nodes if node.op == "call_method")
        return graph.forward

    def called(x):
        return x.sin()

    @not_compiled
    def hook(x):
        return called(x)

    torch.compile(lambda x: hook(x.exp()).cos(), backend=backend)(torch.ones(2))
    assert names == ["exp", "cos"]


# ---- checkpoints of compiled blocks -----------------------------------------------------------


def products_of_backwards(model, steps):
    """Compile the blocks, train, and return how many products the backward of each has at last."""
    counts = []

    def note(graph, _):
        counts.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=note,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(batch(step, 0), 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return counts[-len(model.blocks) :]


@pytest.mark.parametrize("options", [{"checkpoint": Block}, {"checkpoint": "auto", "memory": 1}])
def test_compiled_blocks_recompute_what_gradients_need_and_no_more(options):
    by_hand = make(Net)
    by_hand.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in by_hand.blocks)
    wanted = products_of_backwards(by_hand, 1)
    model = penstock.shard(make(Net), **options)
    assert products_of_backwards(model, 6) == wanted
    penstock.close(model)


class Scaled(nn.Module):
    """A block with an argument that torch's checkpoint has, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x, *, debug):
        return torch.tanh(self.linear(x)) * debug


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Scaled()

    def forward(self, x):
        return self.block(x, debug=x[:, :1])


def test_a_compiled_block_may_have_arguments_of_any_name():
    torch._dynamo.reset()
    reference, model = make(Scaling), make(Scaling)
    model.block.compile(backend="eager")
    penstock.shard(model, blocks=[model.block], checkpoint=Scaled)
    for each in (reference, model):
        each(batch(0, 0)).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad)
    penstock.close(model)
