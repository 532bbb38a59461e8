"""What the benchmark trains: its interface, and a decoder of Qwen3's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [sequence, head width]


@dataclass(frozen=True)
class Shape:
    """Sizes; the defaults are those of Qwen3-8B (its config.json on Hugging Face)."""

    layers: int = 36
    width: int = 4096
    heads: int = 32
    key_heads: int = 8
    head_width: int = 128
    hidden: int = 12288
    vocabulary: int = 151936


TINY = Shape(layers=3, width=64, heads=4, key_heads=2, head_width=16, hidden=96, vocabulary=203)


def rotation(sequence: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> Rotation:
    """Angles of the rotary embedding (base 1,000,000)."""
    half = torch.arange(0, shape.head_width, 2, device=device) / shape.head_width
    angles = torch.outer(torch.arange(sequence, device=device), 1e6**-half)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Apply the rotary embedding to [batch, heads, sequence, head width]."""
    first, second = x.chunk(2, dim=-1)
    return x * by[0] + torch.cat((-second, first), dim=-1) * by[1]


def next_token_loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of predicting each next one of tokens [batch, sequence]."""
    return functional.cross_entropy(scores[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class Model(nn.Module):
    """Takes tokens [batch, sequence] and returns their loss."""

    vocabulary: int
    attention_width: int  # heads times head width

    def blocks(self) -> list[nn.Module]:
        """Return the layers, which are compiled and sharded one by one."""
        raise NotImplementedError

    def beside(self) -> list[list[nn.Module]]:
        """Return what users of FSDP2 gather together beside the layers."""
        raise NotImplementedError


class Layer(nn.Module):
    """Attention and a gated perceptron, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, head = shape.width, shape.head_width
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.query = nn.Linear(width, shape.heads * head, bias=False)
        self.key = nn.Linear(width, shape.key_heads * head, bias=False)
        self.value = nn.Linear(width, shape.key_heads * head, bias=False)
        self.query_norm = nn.RMSNorm(head, eps=1e-6)
        self.key_norm = nn.RMSNorm(head, eps=1e-6)
        self.output = nn.Linear(shape.heads * head, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, shape.hidden, bias=False)
        self.up = nn.Linear(width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def attend(self, x: torch.Tensor, by: Rotation) -> torch.Tensor:
        """Causal attention of [batch, sequence, width]."""
        batch, sequence, _ = x.shape
        heads = (batch, sequence, -1, self.shape.head_width)
        query = rotate(self.query_norm(self.query(x).view(heads)).transpose(1, 2), by)
        key = rotate(self.key_norm(self.key(x).view(heads)).transpose(1, 2), by)
        value = self.value(x).view(heads).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, -1))

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] in and out."""
        x = x + self.attend(self.attention_norm(x), (cosines, sines))
        y = self.hidden_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(Model):
    """The whole built-in model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = shape.vocabulary
        self.attention_width = shape.heads * shape.head_width
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def blocks(self) -> list[nn.Module]:
        """Return the layers."""
        return list(self.layers)

    def beside(self) -> list[list[nn.Module]]:
        """Return the embedding, and the head with its norm."""
        return [[self.embedding], [self.norm, self.head]]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.embedding(tokens)
        cosines, sines = rotation(tokens.shape[1], self.shape, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return next_token_loss(self.head(self.norm(x)), tokens)


def build(shape: Shape, seed: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Make it the same on all ranks: normal weights of deviation 0.02, norms of one."""
    with torch.device("meta"):
        model = Decoder(shape).to(dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model
