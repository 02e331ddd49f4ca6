"""The sentinel ends a process in which Python does not run, and no other."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from cupynccl_reduce.sentinel import STUCK, Sentinel

LIMIT_S = 60.0  # for what hangs
TOLD = "rank 3 held its GIL: 100% of %s"
START = f"""
import ctypes, os, signal, sys, threading, time
from cupynccl_reduce.sentinel import Sentinel
sentinel = Sentinel(0.3, {TOLD!r})
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_process_whose_gil_is_held_ends_with_code_75_and_says_so() -> None:
    result = run("sentinel.feed(); ctypes.PyDLL(None).sleep(120)")
    assert result.returncode == STUCK == 75
    assert TOLD in result.stderr


def test_a_feeding_thread_keeps_the_process_alive() -> None:
    program = """
ended = time.monotonic() + 2
while time.monotonic() < ended:
    sentinel.feed()
    time.sleep(0.01)
sentinel.stop()
sys.exit(3)
"""
    result = run(program)
    assert result.returncode == 3
    assert not result.stderr


@pytest.mark.parametrize("before", ["pass;", "sentinel.feed(); sentinel.stop(); sentinel.stop();"])
def test_it_is_armed_between_the_first_feed_and_stop_only(before: str) -> None:
    result = run(f"{before} ctypes.PyDLL(None).usleep(1_500_000); sys.exit(3)")
    assert result.returncode == 3
    assert not result.stderr


def test_a_forked_child_is_not_ended() -> None:
    program = """
sentinel.feed()
child = os.fork()
if child == 0:
    ctypes.PyDLL(None).usleep(1_500_000)
    os._exit(3)
sentinel.stop()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(program).returncode == 3


def test_it_waits_anew_with_every_feed_and_takes_no_signal() -> None:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    sentinel = Sentinel(30.0, TOLD)
    for _ in range(3):
        sentinel.feed()
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before
    sentinel.stop()


def test_timers_are_given_back() -> None:
    for _ in range(50_000):  # more than a process may have at once
        Sentinel(1000.0, TOLD).stop()
