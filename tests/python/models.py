"""Small models with what makes sharding hard: odd sizes, ties, frozen and unused parts."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 7
DEVICE = os.environ.get("PENSTOCK_TEST_DEVICE", "cpu")  # "cuda": the one that is current


class Block(nn.Module):
    """A residual block; sizes that no world divides, and a parameter with a single row."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.scale = nn.Parameter(torch.rand(1) + 0.5)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Embedding, blocks, head; variants override `run_blocks`."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(11 + 2 * i) for i in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return self.head(self.norm(self.run_blocks(self.embed(x), rank)))


class Tied(Net):
    """Two blocks share a matrix, and embedding and head another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH, bias=False)
        self.head.weight = nn.Parameter(torch.randn(WIDTH, 3) / 3)
        self.embed.weight = self.head.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight = nn.Parameter(torch.randn(15, WIDTH))
        self.blocks[0] = self._wide(self.blocks[0])

    def _wide(self, block: Block) -> Block:
        wide = Block(15)
        wide.up.weight = block.up.weight
        return wide

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        x = self.run_blocks(self.embed(x[..., :3]), rank)
        return self.norm(x) @ self.head.weight


class Frozen(Net):
    """Frozen parameters at the beginning of a block, a frozen block, frozen ones in the root."""

    def __init__(self) -> None:
        super().__init__(4)
        self.embed.weight.requires_grad_(False)
        self.norm.weight.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)
        self.blocks[3].down.weight.requires_grad_(False)


class FrozenBetween(Net):
    """A trainable block, then a frozen layer of the root: needed in backward after the head."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(WIDTH, WIDTH)
        self.between.requires_grad_(False)

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = torch.tanh(self.between(self.blocks[0](x)))
        return self.blocks[2](self.blocks[1](x))


class Twice(Net):
    """A block used twice in a forward, not in a row, and another in a row."""

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        first, second, third = self.blocks
        return second(first(third(first(second(second(x))))))


class Unused(Net):
    """A parameter that no forward uses, and a block that none calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Parameter(torch.randn(9, 2))
        self.spare = nn.Linear(4, 4)

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


class Changing(Block):
    """Changes its input in place; has a parameter that it does not use."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.spare = nn.Parameter(torch.randn(9, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(1.0))


class FrozenFirst(nn.Module):
    """Changes its input in place, then uses frozen weights, then others."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, hidden).requires_grad_(False)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.frozen(torch.tanh_(x)))


class FrozenChangedInPlace(Net):
    """Blocks of which the last gradients are not the end of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FrozenFirst(11 + 2 * i) for i in range(3))


class ChangedInPlace(Net):
    """Blocks that change their only input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Changing(11 + 2 * i) for i in range(3))


class Optional(Block):
    """Uses its `down` matrix where it is told to."""

    def forward(self, x: torch.Tensor, down: bool = True) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return x + self.scale * (self.down(y) if down else y[..., :WIDTH])


class LookedUp(Net):
    """An embedding that is looked up: its backward needs no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)

    def look_up(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed((x * 10).long() % 31).mean(dim=1)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return self.head(self.norm(self.run_blocks(self.look_up(x), rank)))


class ReadAndCalled(LookedUp):
    """Logits by the embedding's matrix, which is not tied to anything."""

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return self.norm(self.run_blocks(self.look_up(x), rank)) @ self.embed.weight.T


class ReadAlone(Net):
    """A head that is never called."""

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        x = self.norm(self.run_blocks(self.embed(x), rank))
        return x @ self.head.weight.T + x @ self.head.weight.T


class ReadFrozen(Net):
    """A frozen norm that is read before the blocks and called behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return super().run_blocks(x * self.norm.weight, rank)


class ReadInCheckpoint(LookedUp):
    """A function that is run anew in the backward reads the embedding and the head."""

    reentrant = False

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        x = self.norm(self.run_blocks(self.look_up(x), rank))
        return checkpoint(self._score, x, use_reentrant=self.reentrant)

    def _score(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.head.weight.T) @ self.head.weight + x @ self.embed.weight.T[:, :WIDTH]


class ReadInCheckpointReentrant(ReadInCheckpoint):
    reentrant = True


class OnOneRank(Net):
    """A parameter of a block, a whole block's gradient, and one of the root's, on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Optional() for _ in range(4))
        self.extra = nn.Parameter(torch.rand(1, WIDTH))

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x), rank == 0)
        y = self.blocks[2](x)
        x = y * self.extra if rank == 0 else x + 0 * y.detach()
        return self.blocks[3](x)


class OnAnotherPath(Net):
    """The middle block is called on rank 0 alone: with whole parameters nowhere else."""

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.blocks[0](x)
        if rank == 0:
            x = self.blocks[1](x)
        return self.blocks[2](x)


class Checkpointed(Net):
    """Checkpointing around blocks."""

    reentrant = False

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class InnerCheckpoint(nn.Module):
    """Checkpointing of a part of a block."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, 9)
        self.second = nn.Linear(9, WIDTH)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.relu(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.part, x, use_reentrant=self.reentrant)


class CheckpointedInside(Net):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InnerCheckpoint(reentrant) for _ in range(3))


class CheckpointedInsideReentrant(CheckpointedInside):
    def __init__(self) -> None:
        super().__init__(reentrant=True)


class CheckpointedPairs(Net):
    """One checkpoint around two blocks, of which one is used in both."""

    reentrant = False

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for one, two in ((0, 1), (1, 2)):
            x = checkpoint(self._pair, x, one, two, use_reentrant=self.reentrant)
        return x

    def _pair(self, x: torch.Tensor, one: int, two: int) -> torch.Tensor:
        return self.blocks[two](self.blocks[one](x))


class CheckpointedPairsReentrant(CheckpointedPairs):
    reentrant = True


class TiedReentrant(Net):
    """Of two blocks that share a matrix the last one is run anew, in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Block(11)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        first, second, third = self.blocks
        return checkpoint(third, second(first(x)), use_reentrant=True)


class WeightNormed(nn.Module):
    """A weight computed from two parameters: its gradients come after the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.length = nn.Parameter(torch.rand(WIDTH, 1))
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        return x + torch.tanh(x @ weight)


class Reparametrized(Checkpointed):
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WeightNormed() for _ in range(3))


class Giving(Block):
    """Gives, beside its output, a view of a parameter of its own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.down.weight.T[:2]


class Latents(nn.Module):
    """Gives its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self) -> torch.Tensor:
        return self.rows


class GivenAway(Net):
    """The model uses parameters that modules return, and returns one itself."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = Latents()
        self.blocks = nn.ModuleList(Giving(11 + 2 * i) for i in range(3))
        self.gain = nn.Parameter(torch.rand(1, 3) + 0.5)

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        latents = self.latents()
        x = x * latents
        for block in self.blocks:
            x, given = block(x)
            x = x + given.sum(dim=0)
        return x @ latents.T @ latents

    def forward(self, x: torch.Tensor, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, rank), self.gain


class Viewed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(x.shape)


class ViewsChangedInPlace(Net):
    """Changes what blocks return, which are views, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewed(11 + 2 * i) for i in range(3))

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x


class GradientInside(Net):
    """Takes a gradient through blocks in its forward, and differentiates it."""

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            energy = self.blocks[1](self.blocks[0](start)).square().sum()
            (slope,) = torch.autograd.grad(energy, start, create_graph=True)
        return self.blocks[2](x + 0.1 * slope)


class NestedValues(Net):
    """Blocks that take and give dictionaries, keywords and None."""

    class Nest(Block):
        def forward(self, batch: dict, *, mask: torch.Tensor | None = None) -> dict:
            return {"x": super().forward(batch["x"]), "extra": [None, batch["x"].sum()]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Nest() for _ in range(3))

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = block({"x": x}, mask=None)["x"]
        return x


@dataclass(frozen=True)
class Values:
    """What torch's trees take for a leaf."""

    x: torch.Tensor
    more: dict[str, torch.Tensor]


@dataclass
class Seen:
    """What blocks write to."""

    blocks: int = 0


class Dataclasses(Net):
    """Blocks that take and give dataclasses."""

    class Nest(Block):
        def forward(self, values: Values, seen: Seen) -> Values:
            seen.blocks += 1
            return Values(values.x + 1, {"x": super().forward(values.x) + values.more["x"]})

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Nest() for _ in range(3))

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        values, seen = Values(x, {"x": x}), Seen()
        for block in self.blocks:
            values = block(values, seen)
        return values.x * values.more["x"] * seen.blocks


class MixedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down = self.down.to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)).double())
        return x + self.scale * y.float()


class Mixed(Net):
    """Blocks with fp32 and fp64 parameters, and a frozen bf16 one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(3))
        gain = torch.rand(WIDTH, dtype=torch.bfloat16)
        self.gain = nn.Parameter(gain, requires_grad=False)

    def run_blocks(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return super().run_blocks(x, rank) * self.gain.float()


class Half(Net):
    """All parameters in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return super().forward(x.bfloat16(), rank).float()


def make(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return kind().to(DEVICE)


def batch(step: int, rank: int, size: int = 4) -> torch.Tensor:
    """Input of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 5, generator=generator).to(DEVICE)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A loss of a rank's batch."""
    return model(batch(step, rank), rank).square().mean()
