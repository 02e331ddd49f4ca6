"""Parameter lists to try things on: built in by name, or read from a JSON file. No arrays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import LayoutError
from cupynccl_reduce.layout import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MODELS", "load_params", "shrink"]

Shapes = list[tuple[str, tuple[int, ...]]]

WIDTH, LAYERS, VOCABULARY = 1024, 24, 8192
MOE_WIDTH, MOE_LAYERS, EXPERTS, EXPERT_WIDTH = 768, 8, 8, 1536


def _gpt2() -> Shapes:
    """Return the 289 parameters (311 M elements) of a 24-layer GPT of GPT-2's shape."""
    params: Shapes = [("embedding.weight", (VOCABULARY, WIDTH))]
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


def _resnet() -> Shapes:
    """Return the 161 parameters (26 M elements) of ResNet-50: many small ones."""

    def normalized(
        name: str, norm: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", shape
        yield f"{norm}.weight", shape[:1]
        yield f"{norm}.bias", shape[:1]

    params: Shapes = [*normalized("conv1", "bn1", (64, 3, 7, 7))]
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            params += normalized(f"{at}.conv1", f"{at}.bn1", (width, channels, 1, 1))
            params += normalized(f"{at}.conv2", f"{at}.bn2", (width, width, 3, 3))
            params += normalized(f"{at}.conv3", f"{at}.bn3", (4 * width, width, 1, 1))
            if block == 0:
                shape = (4 * width, channels, 1, 1)
                params += normalized(f"{at}.downsample.0", f"{at}.downsample.1", shape)
            channels = 4 * width
    return [*params, ("fc.weight", (1000, channels)), ("fc.bias", (1000,))]


def _moe() -> Shapes:
    """Return the 185 parameters (176 M elements) of a GPT of 8 layers with 8 experts each."""
    params: Shapes = [("embedding.weight", (VOCABULARY, MOE_WIDTH))]
    for layer in range(MOE_LAYERS):
        at = f"blocks.{layer}"
        params += [
            (f"{at}.norm1.weight", (MOE_WIDTH,)),
            (f"{at}.norm1.bias", (MOE_WIDTH,)),
            (f"{at}.attention.in.weight", (3 * MOE_WIDTH, MOE_WIDTH)),
            (f"{at}.attention.out.weight", (MOE_WIDTH, MOE_WIDTH)),
            (f"{at}.norm2.weight", (MOE_WIDTH,)),
            (f"{at}.norm2.bias", (MOE_WIDTH,)),
            (f"{at}.router.weight", (EXPERTS, MOE_WIDTH)),
        ]
        for expert in range(EXPERTS):
            params += [
                (f"{at}.experts.{expert}.up.weight", (EXPERT_WIDTH, MOE_WIDTH)),
                (f"{at}.experts.{expert}.down.weight", (MOE_WIDTH, EXPERT_WIDTH)),
            ]
    return params


MODELS = {"gpt2": _gpt2, "resnet": _resnet, "moe": _moe}


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


def shrink(
    params: Sequence[ParamSpec], bucket_bytes: Sequence[int], elements: int
) -> tuple[list[ParamSpec], tuple[int, ...]]:
    """Return parameters of about `elements` elements together, and buckets in proportion.

    They are flat, of the same names, dtypes and proportions. Rounding may move a parameter to a
    neighbouring bucket; what is small enough stays as it is.
    """
    factor = max(1.0, sum(spec.numel for spec in params) / elements)
    if factor == 1.0:
        return list(params), tuple(bucket_bytes)
    small = [replace(s, shape=(max(1, round(s.numel / factor)) if s.numel else 0,)) for s in params]
    itemsize = max(DTYPES[spec.dtype].itemsize for spec in params)
    return small, tuple(max(itemsize, int(nbytes / factor)) for nbytes in bucket_bytes)
