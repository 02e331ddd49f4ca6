"""Parameter lists to try things on: built in by name, or read from a JSON file. No arrays."""

from __future__ import annotations

import json
from pathlib import Path

from cupynccl_reduce.errors import LayoutError
from cupynccl_reduce.layout import ParamSpec

__all__ = ["MODELS", "load_params"]

WIDTH, LAYERS, VOCABULARY = 1024, 24, 8192


def _gpt2() -> list[tuple[str, tuple[int, ...]]]:
    """Return the 289 parameters (311 M elements) of a 24-layer GPT of GPT-2's shape."""
    params: list[tuple[str, tuple[int, ...]]] = [("embedding.weight", (VOCABULARY, WIDTH))]
    for layer in range(LAYERS):
        for name, shape in (
            ("norm1.weight", (WIDTH,)),
            ("norm1.bias", (WIDTH,)),
            ("attention.in.weight", (3 * WIDTH, WIDTH)),
            ("attention.in.bias", (3 * WIDTH,)),
            ("attention.out.weight", (WIDTH, WIDTH)),
            ("attention.out.bias", (WIDTH,)),
            ("norm2.weight", (WIDTH,)),
            ("norm2.bias", (WIDTH,)),
            ("mlp.in.weight", (4 * WIDTH, WIDTH)),
            ("mlp.in.bias", (4 * WIDTH,)),
            ("mlp.out.weight", (WIDTH, 4 * WIDTH)),
            ("mlp.out.bias", (WIDTH,)),
        ):
            params.append((f"blocks.{layer}.{name}", shape))
    return params


MODELS = {"gpt2": _gpt2}


def load_params(model: str, *, dtype: str) -> list[ParamSpec]:
    """Return the parameters of a built-in model, or of a JSON file: [[name, shape, dtype], ...].

    `dtype` is that of built-in models.

    Raises:
        LayoutError: no such model or file, or a file that is no such list.
    """
    if model in MODELS:
        return [ParamSpec(name, shape, dtype) for name, shape in MODELS[model]()]
    path = Path(model)
    if not path.is_file():
        msg = f"no model and no file {model!r}; give one of {', '.join(MODELS)}, or a JSON file"
        raise LayoutError(msg)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        triples = [(name, tuple(shape), dtype) for name, shape, dtype in entries]
    except (ValueError, TypeError) as error:  # JSON's and unicode's errors are ValueErrors
        msg = (
            f'{model}: give a JSON list of [name, shape, dtype], such as [["w", [3, 4], "float32"]]'
        )
        raise LayoutError(msg) from error
    return [ParamSpec(*triple) for triple in triples]
