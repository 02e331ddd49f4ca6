"""The bench's arguments: how they are written, checked, and what they are as a value."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from cupynccl_reduce.cli.values import count, nbytes
from cupynccl_reduce.dtypes import DTYPES

__all__ = ["EXTRA_ROWS", "ROWS", "SIZES", "Settings", "add_arguments"]

ROWS = {
    "limit": "one raw reduce_scatter of all the bytes: the limit that ratios refer to",
    "limit_buckets": "raw reduce_scatters of the plan's buckets, back to back",
    "planned": "Reducer, policy='planned': backward(), one reduce_grad for each gradient, wait()",
    "arrival": "the same with policy='arrival', the reference algorithm",
    "backward": "no communication: backward of the torch module that the next three share; it "
    "computes nothing, each parameter's gradient is given",
    "attached": "that module under cupynccl_reduce.torch.attach",
    "ddp": "that module under DistributedDataParallel: all_reduce, so twice the bytes",
    "fsdp2": "that module under fully_shard, one group of parameters for each bucket; without "
    "the all_gather of parameters",
    "deepcompile": "reduce_grad of DeepSpeed's DeepCompile (ZeRO-3): cuda only, where deepspeed "
    "is installed; its end_backward blocks the host, which its host time so includes",
}
EXTRA_ROWS = {
    "accumulate": "planned, second backward of a cycle: added to the shards of the first",
    "unwatched": "planned, as with connect(check='off')",
    "compared": "planned, as with connect(check='sync'): every launch is compared before",
}
SIZES = ("small", "medium", "large")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure, and how. `max_elements` 0 is: 8 Mi on host, no limit on cuda."""

    model: str
    dtype: str
    bucket_bytes: tuple[int, ...]
    rows: tuple[str, ...]
    shard_dtype: str
    max_buffers: int
    max_elements: int
    rounds: int
    repeats: int
    steps: int
    size: str
    batch: int
    runtime: Literal["auto", "cuda", "host"]
    share_gpu: bool
    watchdog: bool
    json: bool
    plot: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; `Settings(**vars)` of them is the value."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = "\n".join(f"  {name:14} {told}" for name, told in {**ROWS, **EXTRA_ROWS}.items())
    parser.epilog = f"rows ({', '.join(EXTRA_ROWS)}: only when asked for):\n{rows}"
    add = parser.add_argument
    add("--model", default="gpt2", help="gpt2, resnet, moe, or a JSON file: [[name, shape, dtype]]")
    add("--dtype", default="bfloat16", choices=_floats(), help="of a built-in model (bfloat16)")
    add(
        "--bucket-bytes",
        type=nbytes,
        nargs="+",
        default=(64 << 20,),
        metavar="B",
        help="one or several, such as 1MiB 16MiB 64MiB: a sweep (64MiB)",
    )
    add(
        "--rows",
        nargs="+",
        choices=(*ROWS, *EXTRA_ROWS),
        default=(),
        metavar="ROW",
        help="only these (all)",
    )
    add(
        "--shard-dtype",
        default="wire",
        choices=("wire", *_floats()),
        help="of planned, arrival and attached; other than the wire's, it is cast (wire)",
    )
    add("--max-buffers", type=count, default=2, metavar="K", help="send buffers (2)")
    add(
        "--max-elements",
        type=count,
        default=0,
        metavar="N",
        help="shrink parameters and buckets in proportion (8 Mi on host, no limit on cuda)",
    )
    add("--rounds", type=count, default=5, metavar="N", help="all rows take turns in each (5)")
    add("--repeats", type=count, default=3, metavar="N", help="of a row in a round (3)")
    add(
        "--steps",
        type=count,
        default=0,
        metavar="N",
        help="train a GPT instead, N steps a round: no communication, attached, ddp, fsdp2, and "
        "what each bucket made compute wait",
    )
    add("--size", default="small", choices=SIZES, help="of that GPT (small)")
    add("--batch", type=count, default=4, metavar="N", help="its rows on each rank (4)")
    add("--runtime", default="auto", choices=("auto", "cuda", "host"), help="as connect() (auto)")
    add("--share-gpu", action="store_true", help="let several ranks of this host use one GPU")
    add(
        "--watchdog",
        action="store_true",
        help="what watching costs: rows unwatched, planned and compared, a launch, an idle second",
    )
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--plot", default="", metavar="PNG", help="draw the sweep and one step (needs matplotlib)")


def _floats() -> tuple[str, ...]:
    return tuple(name for name, dtype in DTYPES.items() if dtype.is_float)
