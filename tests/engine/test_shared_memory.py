"""Memory that two results would share is refused; what a broken call leaves behind is nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupynccl_reduce import LayoutError, ParamSpec, Registry, run_local

if TYPE_CHECKING:
    from cupynccl_reduce import World

PARAMS = [ParamSpec("a", (8,), "float32"), ParamSpec("b", (8,), "float32")]


def test_shards_that_share_memory_are_refused() -> None:
    def run(world: World) -> None:
        whole = np.zeros(12, np.float32)
        for first, second in ((whole[:8], whole[:8]), (whole[:8], whole[4:])):
            with pytest.raises(LayoutError, match="'a' and 'b' share memory"):
                Registry(PARAMS, world, shards={"a": first, "b": second})
        both = np.zeros(16, np.float32)
        Registry(PARAMS, world, shards={"a": both[8:], "b": both[:8]})

    run_local(1, run)


def test_full_arrays_that_share_memory_are_refused() -> None:
    def run(world: World) -> None:
        registry = Registry(PARAMS, world)
        out = np.zeros(8, np.float32)
        with pytest.raises(LayoutError, match="share memory"):
            registry.gather(registry.shards, out={"a": out, "b": out})
        registry.gather(registry.shards, out={"a": out, "b": out.copy()})

    run_local(2, run)


@pytest.mark.parametrize("params", [None, PARAMS[0], 3])
def test_what_is_no_list_of_parameters_is_refused(params: Any) -> None:
    def run(world: World) -> None:
        with pytest.raises(LayoutError, match="ParamSpec"):
            Registry(params, world)

    run_local(2, run)


def test_ctrl_c_in_run_local_ends_the_ranks_before_it_reaches_the_caller() -> None:
    program = (
        "import threading, time\n"
        "from cupynccl_reduce import run_local\n"
        "def work(world):\n"
        "    if world.rank == 0:\n"
        "        print('ready', flush=True)\n"
        "    while True:\n"
        "        world.control.all_gather(b'')\n"
        "try:\n"
        "    run_local(2, work)\n"
        "except KeyboardInterrupt:\n"
        "    print('ended with', threading.active_count(), 'thread', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)  # any moment will do
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "ended with 1 thread" in output
