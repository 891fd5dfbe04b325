"""Owns the GPT of examples and benchmarks: byte-level, pre-norm and rotary, without dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. The defaults give about 10 M parameters."""

    vocabulary: int = 256
    layers: int = 8
    width: int = 320
    heads: int = 5
    context: int = 256


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs of x, [..., length, channels], by an angle that grows with the position (rotary embedding)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """A transformer block: attention and a feed-forward layer, each on normalised input and with a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + y


class GPT(nn.Module):
    """A GPT. `model(tokens)` returns logits, and `model(tokens, targets)` the mean cross-entropy in nats.

    tokens and targets are integers, [batch, length]. Logits are [batch, length, vocabulary]. The length is at most
    `config.context`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        half = config.width // config.heads // 2
        angles = torch.outer(torch.arange(config.context), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, Attention):
                nn.init.normal_(module.out.weight, std=0.02 / (2 * config.layers) ** 0.5)
            if isinstance(module, Block):
                nn.init.normal_(module.down.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def rotations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (cosines, sines) for the positions of `x`, in the dtype of `x`. The tables keep their own dtype."""
        length = x.shape[1]
        return self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.rotations(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss
