"""Random models: nodes that make sharding hard, put together by a seeded generator.

A node maps a tensor of `WIDTH` columns to one of the same shape. Reference and sharded model are
two copies of one model; a `Control`, one a copy, tells the nodes in which step and on which rank
they are, and which of them fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
ROOT = -1  # the number of the model itself


class StopError(Exception):
    """The error of a node that the program makes fail."""


class Control:
    """The commands of a program to the nodes of a model.

    Attributes
    ----------
    rank, step : int
        Where the model runs now.
    fails_forward, fails_backward : int or None
        The number of the node that raises `error` there.
    nodes : int
        How many there are.
    """

    def __init__(self) -> None:
        self.rank = self.step = self.nodes = 0
        self.fails_forward: int | None = None
        self.fails_backward: int | None = None
        self.error: type[BaseException] = StopError


class _Failing(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: type[BaseException]) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.error("in the backward")


class Node(nn.Module):
    """A part of a model; kinds of it override `run`."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self.control = control
        self.number = control.nodes
        control.nodes += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        control = self.control
        if control.fails_forward == self.number:
            raise control.error("in the forward")
        has_backward = torch.is_grad_enabled() and x.requires_grad
        if control.fails_backward == self.number and has_backward:
            x = _Failing.apply(x, control.error)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


# ---- nodes with parameters ----------------------------------------------------------------------


class Residual(Node):
    def __init__(self, control: Control, hidden: int, bias: bool, activation: str) -> None:
        super().__init__(control)
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=not bias)
        self.activation = activation

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(getattr(torch, self.activation)(self.up(x)))


class Norm(Node):
    def __init__(self, control: Control, affine: bool) -> None:
        super().__init__(control)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=affine)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Scaled(Node):
    def __init__(self, control: Control, size: int) -> None:
        super().__init__(control)
        self.scale = nn.Parameter(torch.rand(size) + 0.5)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class LookedUp(Node):
    def __init__(self, control: Control, rows: int, sparse: bool) -> None:
        super().__init__(control)
        self.rows = nn.Embedding(rows, WIDTH, sparse=sparse)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        index = (x.detach() * 7).abs().clamp(max=1e6).long() % self.rows.num_embeddings
        return x + 0.1 * self.rows(index).mean(dim=-2)


class Unused(Node):
    def __init__(self, control: Control, rows: int) -> None:
        super().__init__(control)
        self.spare = nn.Linear(WIDTH, rows)
        self.more = nn.Parameter(torch.randn(rows, 2))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x


class WeightNormed(Node):
    """A weight that is computed from two parameters, beside one that is not used."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.direction = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.length = nn.Parameter(torch.rand(WIDTH, 1))
        self.unused = nn.Parameter(torch.rand(3))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        return x + torch.tanh(x @ weight)


class Listed(Node):
    """Parameters in a list and in a dictionary."""

    def __init__(self, control: Control, size: int) -> None:
        super().__init__(control)
        shifts = [nn.Parameter(torch.randn(1, WIDTH) * 0.2) for _ in range(size)]
        self.shifts = nn.ParameterList(shifts)
        self.matrix = nn.ParameterDict({"only": nn.Parameter(torch.rand(WIDTH, WIDTH) * 0.3)})

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for shift in self.shifts:
            x = x + shift
        return x @ self.matrix["only"]


class Borrowing(Node):
    """Has another node's weight."""

    def __init__(self, control: Control, weight: nn.Parameter) -> None:
        super().__init__(control)
        self.weight = weight

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * x @ self.weight[:WIDTH, :WIDTH].T


class OtherDtype(Node):
    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.float()).to(x.dtype)


class Attending(Node):
    """Reads the weight of a module inside of it that it does not call."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        row = x.unsqueeze(1)
        return x + self.attention(row, row, row, need_weights=False)[0].squeeze(1)


class Gated(Node):
    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x, x * 0.5)


class Convolved(Node):
    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.first = nn.Conv1d(1, 3, 3, padding=1)
        self.second = nn.Conv1d(3, 1, 1)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x.unsqueeze(1)))).squeeze(1)


class Viewed(Node):
    """Gives a view away."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).view(x.shape)


class Giving(nn.Module):
    """Gives its parameter away, or a view of it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, WIDTH) * 0.2)

    def forward(self) -> torch.Tensor:
        return self.rows if len(self.rows) == 1 else self.rows[:1]


class Given(Node):
    def __init__(self, control: Control, rows: int) -> None:
        super().__init__(control)
        self.giver = Giving(rows)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.giver()


class Steered(Node):
    """Follows the gradient of an inner function, which it takes in its forward."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.inner = nn.Linear(WIDTH, 1)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.inner(start)).sum(), start)
        return x + 0.2 * slope


# ---- nodes around nodes -------------------------------------------------------------------------


class Around(Node):
    def __init__(self, control: Control, inner: nn.Module) -> None:
        super().__init__(control)
        self.inner = inner


class Chain(Node):
    def __init__(self, control: Control, parts: list[nn.Module], listed: bool) -> None:
        super().__init__(control)
        self.parts = nn.ModuleList(parts) if listed else nn.Sequential(*parts)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.parts, nn.Sequential):
            return self.parts(x)
        for part in self.parts:
            x = part(x)
        return x


class Parallel(Node):
    def __init__(self, control: Control, left: nn.Module, right: nn.Module) -> None:
        super().__init__(control)
        self.left, self.right = left, right

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + 0.5 * self.right(x)


class Checkpointed(Around):
    def __init__(self, control: Control, inner: nn.Module, reentrant: bool) -> None:
        super().__init__(control, inner)
        self.reentrant = reentrant

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class OnOneRank(Around):
    """What is inside has gradients on one rank only."""

    def __init__(self, control: Control, inner: nn.Module, rank: int) -> None:
        super().__init__(control, inner)
        self.rank = rank

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + (y if self.control.rank == self.rank else y.detach())


class OnSomeSteps(Around):
    def __init__(self, control: Control, inner: nn.Module, every: int) -> None:
        super().__init__(control, inner)
        self.every = every

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.control.step % self.every == 0 else x


class WithoutGradients(Around):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.inner(x)
        return x + 0.1 * y


class BesideGradients(Around):
    """Gets an input without a gradient, and adds to one with."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.detach())


class Cut(Around):
    """Nothing before it has gradients."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.detach())


class Repeated(Around):
    def __init__(self, control: Control, inner: nn.Module, times: int) -> None:
        super().__init__(control, inner)
        self.times = times

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.inner(x)
        return x


class ChangedBefore(Around):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner((x * 1.0).tanh_())


class ChangedBehind(Around):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x * 1.0)
        y += 0.25
        return y


class ChangingItsInput(Around):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and x.is_leaf:
            x = x * 1.0
        return self.inner(x.add_(0.25))


class _Nest(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, batch: dict[str, Any], *, mask: Any = None, extra: Any = ()) -> Any:
        x = batch["x"]
        return {"x": self.inner(x) * self.gain, "list": [None, (x.sum(), 3)]}


class Nested(Node):
    """Dictionaries, lists, keywords and None go in and out."""

    def __init__(self, control: Control, inner: nn.Module) -> None:
        super().__init__(control)
        self.nest = _Nest(inner)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.nest({"x": x}, mask=None, extra=[x.detach()])["x"]


class _Two(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x * 1.0) + self.other(y), self.other(x)


class TwoInputs(Node):
    """Two tensors go in and out, of which the second may not be used."""

    def __init__(self, control: Control, inner: nn.Module, both: bool) -> None:
        super().__init__(control)
        self.two = _Two(inner)
        self.both = both

    def run(self, x: torch.Tensor) -> torch.Tensor:
        u, v = self.two(x, torch.sin(x))
        return u + v if self.both else u


# ---- the whole ----------------------------------------------------------------------------------


class _Builder:
    """Draws nodes.

    Parameters
    ----------
    control : Control
        Of all of them.
    chance : random.Random
        What draws.
    reads : bool
        Whether nodes may read a weight of a module inside that they do not call: that module must
        not be a block of its own.
    """

    def __init__(self, control: Control, chance: random.Random, reads: bool) -> None:
        self.control = control
        self.chance = chance
        self.reads = reads
        self.shared: list[nn.Module] = []
        self.weights: list[nn.Parameter] = []

    def node(self, depth: int) -> nn.Module:
        """Draw a node with at most so many around each other inside."""
        kinds = self._leaves() if depth == 0 else [*self._leaves(), *2 * self._around(depth - 1)]
        return self.chance.choice(kinds)()

    def _leaves(self) -> list[Callable[[], nn.Module]]:
        control, choice = self.control, self.chance.choice
        always: list[Callable[[], nn.Module]] = [
            self._residual,
            self._residual,
            self._residual,
            self._borrowing,
            self._again,
            lambda: Norm(control, self._likely(0.8)),
            lambda: Scaled(control, choice([1, WIDTH])),
            lambda: LookedUp(control, choice([2, 5, 17]), self._likely(0.5)),
            lambda: Unused(control, choice([1, 4, 9])),
            lambda: WeightNormed(control),
            lambda: Listed(control, choice([1, 2, 3])),
            lambda: OtherDtype(control),
            lambda: Gated(control),
            lambda: Convolved(control),
            lambda: Viewed(control),
            lambda: Given(control, choice([1, 4])),
            lambda: Steered(control),
        ]
        return [*always, lambda: Attending(control)] if self.reads else always

    def _around(self, depth: int) -> list[Callable[[], nn.Module]]:
        control, choice = self.control, self.chance.choice

        def some() -> list[nn.Module]:
            return [self.node(depth) for _ in range(choice([1, 2, 3]))]

        return [
            lambda: Chain(control, some(), self._likely(0.5)),
            lambda: Chain(control, some(), self._likely(0.5)),
            lambda: Parallel(control, self.node(depth), self.node(depth)),
            lambda: Checkpointed(control, self.node(depth), self._likely(0.5)),
            lambda: OnOneRank(control, self.node(depth), choice([0, 1])),
            lambda: OnSomeSteps(control, self.node(depth), choice([2, 3])),
            lambda: WithoutGradients(control, self.node(depth)),
            lambda: BesideGradients(control, self.node(depth)),
            lambda: Cut(control, self.node(depth)),
            lambda: Repeated(control, self.node(depth), choice([2, 3])),
            lambda: ChangedBefore(control, self.node(depth)),
            lambda: ChangedBehind(control, self.node(depth)),
            lambda: ChangingItsInput(control, self.node(depth)),
            lambda: Nested(control, self.node(depth)),
            lambda: TwoInputs(control, self.node(depth), self._likely(0.7)),
        ]

    def _likely(self, probability: float) -> bool:
        return self.chance.random() < probability

    def _residual(self) -> Residual:
        hidden, activation = self.chance.choice([1, 2, 3, 7, 13]), ["tanh", "relu", "sin"]
        node = Residual(self.control, hidden, self._likely(0.5), self.chance.choice(activation))
        if hidden >= WIDTH:
            self.weights.append(node.up.weight)
        return node

    def _borrowing(self) -> Borrowing:
        if not self.weights:
            rows = WIDTH + self.chance.randint(0, 3)
            self.weights.append(nn.Parameter(torch.randn(rows, WIDTH) * 0.3))
        return Borrowing(self.control, self.chance.choice(self.weights))

    def _again(self) -> nn.Module:
        """A node that is in several places."""
        if not self.shared or self._likely(0.3):
            self.shared.append(Residual(self.control, WIDTH, True, "tanh"))
        return self.chance.choice(self.shared)


class Model(nn.Module):
    """An embedding, nodes in lists and alone, a norm and a head; some parameters frozen.

    Parameters
    ----------
    chance : random.Random
        What draws it.
    reads : bool
        Whether modules may read weights of modules inside that they do not call.
    """

    def __init__(self, chance: random.Random, reads: bool) -> None:
        super().__init__()
        self.control = Control()
        builder = _Builder(self.control, chance, reads)
        self.embed = chance.choice([nn.Linear(5, WIDTH), nn.Embedding(11, WIDTH)])
        count = chance.randint(1, 5)
        self.blocks = nn.ModuleList(builder.node(chance.randint(0, 3)) for _ in range(count))
        more = 2 if chance.random() < 0.3 else 0
        self.more = nn.ModuleList(builder.node(1) for _ in range(more))
        self.middle = builder.node(1) if chance.random() < 0.3 else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, chance.choice([1, 3, WIDTH]), bias=chance.random() < 0.5)
        self.own = nn.Parameter(torch.rand(1, WIDTH)) if chance.random() < 0.3 else None
        reads = reads and any(True for _ in self.blocks.parameters())  # else others are the blocks
        self.reads = chance.choice(["", "", "head", "norm", "embed"]) if reads else ""
        self.order = self._draw_order(chance, count)
        self.checkpoints = chance.random() < 0.15
        self.gives = chance.choice(["tensor", "tuple", "dict"])
        for parameter in self.parameters():
            if chance.random() < 0.15:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            self.head.weight.requires_grad_(True)

    @staticmethod
    def _draw_order(chance: random.Random, count: int) -> list[int]:
        order = list(range(count))
        if chance.random() < 0.2:
            chance.shuffle(order)
        if chance.random() < 0.2:
            order.append(chance.choice(order))
        return order[:-1] if chance.random() < 0.15 and count > 1 else order

    def forward(self, x: torch.Tensor) -> Any:
        if self.control.fails_forward == ROOT:
            raise self.control.error("in the forward")
        h = self._embed(x)
        for place, block in enumerate(self.order):
            h = self._run_block(self.blocks[block], h, place)
        for block in self.more:
            h = block(h)
        h = self._read(self.middle(h))
        out = self.head(self.norm(h))
        if self.reads == "head":
            out = out + h @ self.head.weight.T
        if self.gives == "tuple":
            return out, h.detach()
        return {"out": out, "more": [h.mean()]} if self.gives == "dict" else out

    def _embed(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.embed, nn.Linear):
            return self.embed(x)
        return self.embed((x.detach() * 10).abs().long() % 11).mean(dim=1)

    def _run_block(self, block: nn.Module, h: torch.Tensor, place: int) -> torch.Tensor:
        if self.checkpoints and place % 2:
            return checkpoint(block, h, use_reentrant=False)
        return block(h)

    def _read(self, h: torch.Tensor) -> torch.Tensor:
        if self.own is not None:
            h = h * self.own
        if self.reads == "norm":
            h = h * self.norm.weight
        if self.reads == "embed":
            weight = self.embed.weight
            square = weight[:WIDTH, :5] if isinstance(self.embed, nn.Linear) else weight[:5].T
            h = h + (h @ square).sum(-1, keepdim=True) * 0.1
        return h


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss of whatever the model gives."""
    out = model(x)
    if isinstance(out, tuple):
        out = out[0]
    if isinstance(out, dict):
        out = out["out"] + 0 * out["more"][0]
    return out.square().mean()
