"""Owns the Llama that `make accelerator` trains: its shapes, and its operations in plain torch, without a model library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, with heads of `width // heads` elements."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """The number of parameters; the head is not tied to the embedding."""
        keys = self.width * self.key_heads // self.heads
        block = 2 * self.width * self.width + 2 * self.width * keys + 3 * self.width * self.inner + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width

    def flops(self, tokens: int, context: int) -> float:
        """Return the floating-point operations of a forward and a backward over `tokens`, without recomputation.

        Each token takes 6 operations per parameter of a matrix product. Causal attention takes another 6 per layer, position of
        the context and element of the width (arXiv:2204.02311, appendix B).
        """
        products = self.parameters - self.vocabulary * self.width
        return 6.0 * tokens * (products + self.layers * self.width * context)


SHAPES = {
    "1.2 B": Shape(layers=16, width=2048, heads=32, key_heads=8, inner=8192, vocabulary=65_536),
    "1.3 B": Shape(layers=26, width=2048, heads=32, key_heads=8, inner=5632, vocabulary=32_000),
    "3.2 B": Shape(layers=28, width=3072, heads=24, key_heads=8, inner=8192, vocabulary=65_536),
    "5.4 B": Shape(layers=34, width=4096, heads=32, key_heads=8, inner=8960, vocabulary=32_000),
    "8.0 B": Shape(layers=32, width=4096, heads=32, key_heads=8, inner=14_336, vocabulary=128_256),
    "9.6 B": Shape(layers=38, width=4608, heads=36, key_heads=9, inner=13_824, vocabulary=32_000),
    "12.6 B": Shape(layers=40, width=5120, heads=40, key_heads=8, inner=15_360, vocabulary=65_536),
    "tiny": Shape(layers=2, width=32, heads=2, key_heads=1, inner=64, vocabulary=64),
}


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.key_heads = shape.key_heads
        keys = width * shape.key_heads // shape.heads
        self.before_attention = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, keys, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_inner = nn.RMSNorm(width)
        self.gate = nn.Linear(width, shape.inner, bias=False)
        self.up = nn.Linear(width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.before_attention(x)
        query = self.query(normed).view(batch, length, self.heads, -1).transpose(1, 2)
        key = self.key(normed).view(batch, length, self.key_heads, -1).transpose(1, 2)
        value = self.value(normed).view(batch, length, self.key_heads, -1).transpose(1, 2)
        times = self.heads // self.key_heads
        key = _turned(key, cosine, sine).repeat_interleave(times, 1)
        attended = F.scaled_dot_product_attention(
            _turned(query, cosine, sine), key, value.repeat_interleave(times, 1), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.before_inner(x)
        made: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return made


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the two halves of each head by position."""
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Llama(nn.Module):
    """A Llama whose forward returns the mean cross-entropy, [], of targets [batch, length] after tokens [batch, length]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.half_width = shape.width // shape.heads // 2
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        place = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)
        speed = 10_000.0 ** (-torch.arange(self.half_width, device=x.device, dtype=torch.float32) / self.half_width)
        angles = place[:, None] * speed
        cosine = angles.cos().to(x.dtype)
        sine = angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
