"""Every way to end a process, from every state of its world: it ends, with the code that is due.

Ranks are started by mpirun, and without it: no launcher ends the others then, and each process's
own exit code is seen. A seeded sample runs by default, all with TEST_EXITS=all (some minutes).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mpi.launch import PATIENCE, PROGRAMS, environment, mpirun

if TYPE_CHECKING:
    from collections.abc import Callable

END_S = 10.0 * PATIENCE  # a process that ends, and all that it has started, has ended by then
START_S = 60.0 * PATIENCE
ABORTED = 74  # the exit code of a process with a broken world

# What a process ends with by itself: a negative one is the signal that ended it.
WAYS = {
    "return": 0,
    "exit-0": 0,
    "exit-3": 3,
    "raise": 1,
    "os-exit-5": 5,
    "sigterm": -signal.SIGTERM,
    "sigint": -signal.SIGINT,
}
AT_ONCE = ("os-exit-5", "sigterm")  # nothing of Python runs any more
STATES = (
    "closed",  # the world was closed before, on all ranks
    "idle",  # inside `with world`, nothing queued
    "flying",  # the same, with launched buckets that nobody has waited for
    "alone",  # the same, and the other rank never launches them
    "broken",  # the same, after world.fail()
    "forked",  # the same as idle, while a forked child lives
    "open",  # no `with`, and no close()
)
CASES = [(way, state, bad) for way in WAYS for state in STATES for bad in range(2)]


def due(way: str, state: str) -> int:
    """Return the exit code of the rank that ends."""
    if way in AT_ONCE or state in ("closed", "open"):
        return WAYS[way]
    # An exception that leaves the world's block breaks the world, SystemExit too. Leaving it well
    # waits for what is queued, which breaks the world if the other rank never comes.
    well = way == "return" and state not in ("broken", "alone")
    return 0 if well else ABORTED


def chosen(size: int, seed: int) -> list[tuple[str, str, int]]:
    """Return a sample in which no way and no state comes twice, or all cases."""
    if os.environ.get("TEST_EXITS") == "all":
        return CASES
    rng = random.Random(seed)
    pairs = zip(rng.sample(list(WAYS), size), rng.sample(STATES, size), strict=True)
    return [(way, state, rng.randrange(2)) for way, state in pairs]


def until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def those_in(folder: Path) -> list[int]:
    """Return the processes whose arguments name `folder`: ranks, and their forked children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if os.fsencode(folder) in arguments:
            found.append(int(path.parent.name))
    return found


def check_left_behind(folder: Path, bad: int) -> None:
    """No process is left, and what was written is there."""
    until(lambda: not those_in(folder), END_S, f"left behind: {those_in(folder)}")
    assert (folder / f"wrote-{bad}").read_text() == "before the end"
    assert (folder / f"wrote-{1 - bad}").read_text() == "before the end"
    assert (folder / f"ends-{bad}").exists()


@pytest.mark.limit(150)
@pytest.mark.parametrize(("way", "state", "bad"), chosen(7, 3))
def test_a_process_ends_with_its_code_and_the_other_rank_hears_of_it(
    way: str, state: str, bad: int, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        started = []
        for rank in range(2):
            out = stack.enter_context((tmp_path / f"out-{rank}").open("wb"))
            error = stack.enter_context((tmp_path / f"error-{rank}").open("wb"))
            command = [sys.executable, str(PROGRAMS / "exits.py"), "plain", way, state, str(bad)]
            process = subprocess.Popen(
                [*command, str(tmp_path), str(rank)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        ends = tmp_path / f"ends-{bad}"
        until(lambda: ends.exists() or started[bad].poll() is not None, START_S, "it never ends")
        until(lambda: all(p.poll() is not None for p in started), END_S, "a process goes on")
        codes = [process.returncode for process in started]
    told = (tmp_path / f"error-{bad}").read_text()
    assert codes[bad] == due(way, state), told
    check_left_behind(tmp_path, bad)
    assert (tmp_path / "child").exists() == (state == "forked")
    if way not in AT_ONCE:
        assert (tmp_path / f"out-{bad}").read_text() == "kept until the end\n"
        assert ("ends without world.close()" in told) == (state == "open")
        assert ("ValueError: planted" in told) == (way == "raise")
    if state == "closed":
        assert codes[1 - bad] == 0
        return
    assert codes[1 - bad] == ABORTED
    told = (tmp_path / f"told-{1 - bad}").read_text()
    assert f"rank {bad} " in told or (way, state) == ("return", "alone"), told


@pytest.mark.limit(90)
@pytest.mark.parametrize(("way", "state", "bad"), chosen(4, 4))
def test_a_job_of_mpirun_ends_and_leaves_nothing_behind(
    way: str, state: str, bad: int, tmp_path: Path
) -> None:
    """It ends the other rank too, so that only the job's exit code is seen."""
    arguments = ("exits.py", "mpi", way, state, str(bad), str(tmp_path))
    result = mpirun(2, *arguments, runner=(), limit_s=40)
    assert time.time() - (tmp_path / f"ends-{bad}").stat().st_mtime < END_S
    check_left_behind(tmp_path, bad)
    code = due(way, state)
    if state == "closed" and code == 0:
        result.check()
    elif code == ABORTED:
        assert result.returncode == ABORTED, result
    else:
        assert result.returncode != 0, result
