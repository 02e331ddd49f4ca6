"""A small GPT and the text it learns, for the demo. Nothing here knows of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Gpt", "Shape", "draw_batches", "load_text", "loss_of"]

WIDTH = 128
BLOCKS = 5
HEADS = 4
CONTEXT = 64  # characters that the model sees at once


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model is; the defaults are the demo's."""

    width: int = WIDTH
    blocks: int = BLOCKS
    heads: int = HEADS
    context: int = CONTEXT


class Block(nn.Module):
    """Causal self-attention and an MLP, each added to the residual stream.

    No biases in the linear layers: softmax ignores a bias of the keys, so its gradient is rounding
    noise, which AdamW would blow up to full-sized steps that differ from run to run.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, positions, width) to the same shape."""
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + added


class Gpt(nn.Module):
    """Characters in, logits of the next character out; the head is the embedding, transposed."""

    def __init__(self, vocabulary: int, shape: Shape = Shape()) -> None:  # frozen
        super().__init__()
        width, blocks = shape.width, shape.blocks
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(shape.context, width)
        self.blocks = nn.Sequential(*(Block(width, shape.heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.characters.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # noqa: PLR2004  # a matrix
                # The residual stream sums all blocks: what they add to it starts smaller.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * blocks) if residual else 0.02)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Map (rows, positions) of character indices to (rows, positions, vocabulary)."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of every next character in `rows` (rows, context + 1)."""
    logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def load_text() -> tuple[torch.Tensor, int]:
    """Return the help texts of Python's standard library as indices, and their vocabulary size.

    Half a megabyte of English that every Python brings. Sorted, so that ranks agree.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    vocabulary = sorted(set(text))
    index = {character: i for i, character in enumerate(vocabulary)}
    return torch.tensor([index[character] for character in text]), len(vocabulary)


def draw_batches(
    text: torch.Tensor, batch: int, steps: int, *, context: int = CONTEXT
) -> Iterator[torch.Tensor]:
    """Yield `steps` batches of (batch, context + 1) indices: the same ones in every process."""
    generator = torch.Generator().manual_seed(0)
    window = torch.arange(context + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        yield text[starts + window]
