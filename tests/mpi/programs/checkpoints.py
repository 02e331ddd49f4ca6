"""Save or load one checkpoint: `checkpoints.py save PATH`, and `load PATH` at any world size."""

from __future__ import annotations

import sys
from pathlib import Path

from checkpoint.states import PARAMS, load_on, make_full, save_on

import cupynccl_reduce as cr

STATES = {"param": "bfloat16", "exp_avg": "float32", "exp_avg_sq": "float64"}


def main(what: str, path: Path) -> None:
    full = make_full(PARAMS, STATES)
    with cr.connect("host") as world:
        where = f"rank {world.rank}"
        try:
            if what == "save":
                save_on(world, path, PARAMS, full, {"step": 7, "rank": world.rank})
                told = "saved"
            else:
                told = f"meta {sorted(load_on(world, path, PARAMS[::-1], full, 64).items())}"
        except cr.CheckpointError as error:
            world.control.all_gather(b"")  # the world goes on
            told = f"refused: {error}"
        print(f"{where}: {told}", flush=True)


main(sys.argv[1], Path(sys.argv[2]))
