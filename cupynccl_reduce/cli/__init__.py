"""The command line: parses arguments, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import TYPE_CHECKING, Any

from cupynccl_reduce import __version__
from cupynccl_reduce.errors import LayoutError, ReduceError

from .bench.arguments import Settings, add_arguments
from .values import count

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0, 1 for a failure, 2 for wrong usage.

    Under a launcher a failure ends the whole world: this does not return then.
    """
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # argparse has printed the help, the version, or what is wrong
        return int(end.code or 0)
    if args.command is None:
        parser.print_help()
        return 0
    code = 1
    try:
        code = args.run(args)
    except ReduceError as error:
        print(f"cupynccl-reduce: error: {error}", file=sys.stderr)
    except BaseException:  # shown before the world ends, then raised as it is
        if _is_one_of_many():
            traceback.print_exc()
        raise
    finally:
        if code != 0:
            _end_world(code)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cupynccl-reduce",
        description="Sharded gradient reduction that overlaps with backward.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small GPT on several ranks, and compare it with one process",
        description=(
            "Train a small GPT on several ranks, and compare the parameters with a one-process "
            "run. Start it with: mpirun -n 4 python -m mpi4py -m cupynccl_reduce demo"
        ),
    )
    demo.add_argument(
        "--steps", type=_steps, default=100, metavar="N", help="optimizer steps, from 2 (100)"
    )
    demo.add_argument(
        "--share-gpu", action="store_true", help="let several ranks of this host use one GPU"
    )
    demo.set_defaults(run=_demo)
    prove = commands.add_parser(
        "prove",
        help="simulate a bucket plan under many schedules, with the race detector",
        description=(
            "Run the engine on a model's bucket plan in a simulator, with random arrival orders, "
            "streams and missing gradients, and look for races, deadlocks and wrong values."
        ),
    )
    prove.add_argument(
        "--model",
        default="gpt2",
        help="gpt2, resnet, moe, or a JSON file: [[name, shape, dtype], ...] (gpt2)",
    )
    prove.add_argument("--dtype", default="bfloat16", help="of a built-in model (bfloat16)")
    prove.add_argument("--world-size", type=count, default=2, metavar="N", help="ranks (2)")
    prove.add_argument("--runs", type=count, default=40, metavar="K", help="simulations (40)")
    prove.add_argument(
        "--bucket-bytes", type=count, default=64 << 20, metavar="B", help="of the plan (64 MiB)"
    )
    prove.add_argument("--seed", type=int, default=0, metavar="S", help="of the first run (0)")
    prove.add_argument(
        "--schedule", choices=("lazy", "eager", "random", "pct"), help="only this one (all)"
    )
    prove.set_defaults(run=_prove)
    bench = commands.add_parser(
        "bench",
        help="measure what reducing costs, beside its limit, DDP, FSDP2 and DeepCompile",
        description=(
            "Measure host time per gradient and the time until all shards are there, in rounds "
            "in which all rows take turns, alone or on several ranks: "
            "mpirun -n 2 python -m mpi4py -m cupynccl_reduce bench"
        ),
    )
    add_arguments(bench)
    bench.set_defaults(run=_bench)
    return parser


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:  # noqa: PLR2004  # the loss of one step cannot fall
        msg = f"{steps} is too few; from 2 on the loss can fall"
        raise argparse.ArgumentTypeError(msg)
    return steps


def _demo(args: argparse.Namespace) -> int:
    try:
        from .demo import run_demo
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        msg = "the demo needs torch, which is not installed; pip install 'cupynccl-reduce[torch]'"
        raise LayoutError(msg) from error
    return run_demo(steps=args.steps, share_gpu=args.share_gpu)


def _prove(args: argparse.Namespace) -> int:
    from .prove import SCHEDULES, run_prove

    return run_prove(
        model=args.model,
        dtype=args.dtype,
        world_size=args.world_size,
        runs=args.runs,
        bucket_bytes=args.bucket_bytes,
        seed=args.seed,
        schedules=(args.schedule,) if args.schedule else SCHEDULES,
    )


def _bench(args: argparse.Namespace) -> int:
    from .bench import run_bench

    fields: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in ("command", "run")}
    fields |= {key: tuple(fields[key]) for key in ("bucket_bytes", "rows")}
    return run_bench(Settings(**fields))


def _is_one_of_many() -> bool:
    """Return whether other ranks run, and MPI can still reach them."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return bool(mpi.COMM_WORLD.Get_size() > 1)


def _end_world(code: int) -> None:
    """Abort the other ranks, who may be waiting for this one; `python -m mpi4py` or not."""
    if _is_one_of_many():
        sys.stdout.flush()
        sys.stderr.flush()
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
