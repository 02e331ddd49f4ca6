"""A small GPT and the text it learns, for the demo. Nothing here knows of ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Gpt", "draw_batches", "load_text", "loss_of"]

WIDTH = 128
BLOCKS = 5
HEADS = 4
CONTEXT = 64  # characters that the model sees at once


class Block(nn.Module):
    """Causal self-attention and an MLP, each added to the residual stream.

    No biases in the linear layers: softmax ignores a bias of the keys, so its gradient is rounding
    noise, which AdamW would blow up to full-sized steps that differ from run to run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, positions, WIDTH) to the same shape."""
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + added


class Gpt(nn.Module):
    """Characters in, logits of the next character out; the head is the embedding, transposed."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.characters.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # noqa: PLR2004  # a matrix
                # The residual stream sums all blocks: what they add to it starts smaller.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * BLOCKS) if residual else 0.02)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Map (rows, positions) of character indices to (rows, positions, vocabulary)."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of every next character in `rows` (rows, CONTEXT + 1)."""
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


def draw_batches(text: torch.Tensor, batch: int, steps: int) -> Iterator[torch.Tensor]:
    """Yield `steps` batches of (batch, CONTEXT + 1) indices: the same ones in every process."""
    generator = torch.Generator().manual_seed(0)
    window = torch.arange(CONTEXT + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (batch, 1), generator=generator)
        yield text[starts + window]
