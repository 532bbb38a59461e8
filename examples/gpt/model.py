"""A byte-level GPT: an ordinary nn.Module that knows nothing of sharding."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256  # the vocabulary
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Size of the model; `context` is the longest sequence in bytes."""

    layers: int
    width: int
    context: int
    head_width: int = 32

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.width // self.head_width


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position of x ([batch, sequence, width]) with those before it."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer of the decoder; its parameters are gathered and reduced together."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and MLP to x ([batch, sequence, width])."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Decoder over bytes whose input and output embeddings are one (tied) parameter."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `targets` (int64, [batch, sequence]) after `tokens`."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def build(shape: Shape, seed: int, device: torch.device = CPU) -> GPT:
    """Build the model with the same initial values on every rank."""
    torch.manual_seed(seed)
    return GPT(shape).to(device)
