"""Worlds of threads that break: the ranks that are left go on, exactly, with one of their own."""

from __future__ import annotations

import signal
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynccl_reduce as cr
from cupynccl_reduce.communicators.local import LocalCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPECS = [cr.ParamSpec(f"p{i}", (5 + i,), "float32") for i in range(4)]

pytestmark = pytest.mark.limit(60.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def step(world: cr.World, value: float) -> dict[str, np.ndarray]:
    """Return the sum over ranks of gradients that are `value`."""
    registry = cr.Registry(SPECS, world, bucket_bytes=48)
    with cr.Reducer(registry, op="sum") as reducer:
        with reducer.backward():
            for spec in reversed(SPECS):
                reducer.reduce_grad(spec.name, np.full(spec.shape, value, np.float32))
        return registry.gather(reducer.wait())


def check(world: cr.World, old: dict[int, int]) -> None:
    """All ranks of a world add up; `old` gives the value that each has, by its new rank."""
    total = sum(2.0**value for value in old.values())
    for name, array in step(world, 2.0 ** old[world.rank]).items():
        assert np.array_equal(array, np.full(array.shape, total)), name


def fault(world: cr.World) -> cr.CommunicationError:
    """Go on until a peer's fault breaks the world."""
    while True:
        try:
            step(world, 1.0)
        except cr.CommunicationError as error:
            return error


class PlannedError(Exception):
    pass


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("bad", [0, 1, -1])
@pytest.mark.parametrize("how", ["raises", "leaves"])
def test_the_others_go_on_when_a_rank_is_gone(world_size: int, bad: int, how: str) -> None:
    victim = bad % world_size
    left = [rank for rank in range(world_size) if rank != victim]

    def work(world: cr.World) -> list[int]:
        step(world, 1.0)
        if world.rank == victim:
            if how == "raises":
                raise PlannedError
            return []
        error = fault(world)
        assert error.ranks == (victim,)
        with world.shrink() as survivors:
            assert repr(world).endswith("BROKEN>")
            assert survivors.world_size == len(left)
            assert left[survivors.rank] == world.rank
            check(survivors, dict(enumerate(left)))
            with pytest.raises(cr.ProtocolError, match="this one is closed"):
                world.shrink()
            with pytest.raises(cr.CommunicationError, match="broken"):
                cr.Registry(SPECS, world)
        return [world.rank]

    def run() -> list[list[int]]:
        return cr.run_local(world_size, work, timeout_s=1.0, check="heartbeat")

    if how == "raises":
        with pytest.raises(PlannedError):
            run()
    else:
        assert run() == [[rank] if rank in left else [] for rank in range(world_size)]


def test_survivors_may_shrink_again() -> None:
    def work(world: cr.World) -> int:
        old = [0, 1, 2, 3]
        for victim in (0, 2):
            if old[world.rank] == victim:
                world.close()
                return victim
            fault(world)
            old.remove(victim)
            world = world.shrink()
            check(world, dict(enumerate(old)))
        world.close()
        return old[world.rank]

    assert cr.run_local(4, work, timeout_s=1.0, check="heartbeat") == [0, 1, 2, 3]


def test_the_rank_that_failed_may_come_along() -> None:
    """Out of memory on one rank breaks the world, and ends no process."""

    def work(world: cr.World) -> Any:
        if world.rank == 1:
            world.fail(PlannedError())
        else:
            assert fault(world).ranks == (1,)
        with world.shrink() as survivors:
            assert (survivors.rank, survivors.world_size) == (world.rank, 3)
            check(survivors, {0: 0, 1: 1, 2: 2})

    cr.run_local(3, work, timeout_s=1.0, check="heartbeat")


def test_a_rank_that_never_comes_is_left_behind() -> None:
    gone_on = threading.Event()

    def work(world: cr.World) -> Any:
        if world.rank == 2:
            world.fail(PlannedError())
            assert gone_on.wait(60)
            with pytest.raises(cr.CommunicationError, match="went on without this rank"):
                world.shrink()
            return
        fault(world)
        with world.shrink() as survivors:
            check(survivors, {0: 0, 1: 1})
        gone_on.set()

    cr.run_local(3, work, timeout_s=1.0, check="heartbeat")


def test_a_few_do_not_go_on() -> None:
    def work(world: cr.World) -> bool:
        if world.rank == 0:
            fault(world)
            while [peer.link for peer in world.control.peers()] != ["up", "left", "left"]:  # type: ignore[attr-defined]
                pass
            with pytest.raises(cr.CommunicationError, match="1 of 3 ranks are left, too few"):
                world.shrink()
            with pytest.raises(cr.ProtocolError, match="this one is shrunk already"):
                world.shrink()
        return True

    assert cr.run_local(3, work, timeout_s=1.0, check="heartbeat") == [True] * 3


@pytest.mark.parametrize(
    ("check", "prepare", "refusal", "message"),
    [
        ("heartbeat", lambda _: None, cr.ProtocolError, "this one is whole"),
        ("heartbeat", cr.World.close, cr.ProtocolError, "this one is closed"),
        (
            *("off", lambda world: world.fail(PlannedError()), cr.LayoutError),
            r"nobody watched this world; connect\(check='heartbeat'\)",
        ),
    ],
)
def test_what_cannot_be_shrunk_says_why(
    check: Any, prepare: Callable[[cr.World], Any], refusal: type[Exception], message: str
) -> None:
    def work(world: cr.World) -> None:
        prepare(world)
        with pytest.raises(refusal, match=rf"rank {world.rank}: shrink\(\).*{message}"):
            world.shrink()

    cr.run_local(2, work, check=check)


def test_ctrl_c_ends_the_survivors_too() -> None:
    """One waits for the other's data, which waits for ever in their side channel."""

    def work(world: cr.World) -> None:
        if world.rank == 0:
            return
        fault(world)
        with world.shrink() as survivors:
            if survivors.rank == 0:
                step(survivors, 1.0)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            survivors.control.all_gather(b"")

    with pytest.raises(KeyboardInterrupt):
        cr.run_local(3, work, timeout_s=1.0, check="heartbeat")


def test_what_the_transport_reports_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL does for a broken connection, between calls."""
    broken = threading.Event()

    def check(self: LocalCommunicator) -> None:
        if self.rank == 1 and broken.is_set():
            msg = "planted"
            raise cr.CommunicationError(msg)

    def work(world: cr.World) -> tuple[str, tuple[int, ...]]:
        step(world, 1.0)
        broken.set()
        error = fault(world)
        assert error.report is not None
        return error.report.reason, error.ranks

    monkeypatch.setattr(LocalCommunicator, "check", check)
    told = cr.run_local(3, work, timeout_s=1.0, check="heartbeat")
    assert told == [("asynchronous error", (1,))] * 3
