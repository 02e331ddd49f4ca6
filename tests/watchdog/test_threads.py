"""Worlds of threads, watched: who fails is named on all others, and every later call says so."""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynccl_reduce as cr
from cupynccl_reduce import watching
from cupynccl_reduce.membership import Status
from cupynccl_reduce.report import Report

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

LIMIT_S = 60.0  # for what hangs
SPECS = [cr.ParamSpec(f"p{i}", (64,), "float32") for i in range(4)]
BROKEN = Report("died", (1,), "why", 0, None, "", 0.0, 1.0, (), {})

pytestmark = pytest.mark.limit(LIMIT_S)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Run:
    """Steps on threads; one rank does something else at one of them."""

    def __init__(
        self, world_size: int, bad: int, how: Callable[[Run, cr.World], None], at: str
    ) -> None:
        self.world_size, self.bad, self.how, self.at = world_size, bad, how, at
        self.errors: dict[int, cr.CommunicationError] = {}
        self.causes: dict[int, Any] = {}
        self.over = threading.Event()

    def __call__(self) -> Run:
        cr.run_local(self.world_size, self.work, timeout_s=1.0, check="heartbeat")
        return self

    def work(self, world: cr.World) -> str:
        bad = world.rank == self.bad
        registry = cr.Registry(SPECS, world, bucket_bytes=256)
        reducer = cr.Reducer(registry)
        try:
            for step in range(4):
                if bad and step == 2:
                    if self.at == "backward":
                        with reducer.backward():
                            reducer.reduce_grad("p3", np.ones(64, np.float32))
                            self.how(self, world)
                    self.how(self, world)
                    return "left"
                with reducer.backward():
                    for spec in SPECS[::-1]:
                        reducer.reduce_grad(spec.name, np.ones(64, np.float32))
                reducer.wait()
        except cr.CommunicationError as error:
            if bad:
                raise
            self.errors[world.rank] = error
            self.causes[world.rank] = world.status.fault
            check_later(world, registry, reducer, error)
        finally:
            if len(self.errors) == self.world_size - 1:
                self.over.set()
        return "told"


def check_later(
    world: cr.World, registry: cr.Registry, reducer: cr.Reducer, first: cr.CommunicationError
) -> None:
    """Whatever is called next raises the first cause, with the same report."""
    assert not world.usable
    assert "BROKEN" in repr(world)

    def backward() -> None:
        with reducer.backward():
            raise AssertionError("a backward of a broken world")

    calls: list[Callable[[], object]] = [
        world.check,
        backward,
        lambda: registry.gather({}),
        lambda: world.agree("things", ["a"]),
        lambda: cr.Registry(SPECS, world, bucket_bytes=256),
        lambda: world.guard(lambda: None),
    ]
    for call in calls:
        with pytest.raises(cr.CommunicationError) as later:
            call()
        assert later.value.report is first.report
        assert later.value.ranks == first.ranks
        assert str(world.status.fault) in str(later.value)
        if call in (world.check, backward):
            assert later.value.__cause__ is world.status.fault


def fail(run: Run, world: cr.World) -> None:
    raise ValueError("planted")


def interrupt(run: Run, world: cr.World) -> None:
    raise KeyboardInterrupt


def leave(run: Run, world: cr.World) -> None:
    pass


def sleep(run: Run, world: cr.World) -> None:
    """Until the world is broken here too: then this rank is told that it is to blame."""
    assert run.over.wait(LIMIT_S), "nobody was told"
    end = time.monotonic() + LIMIT_S
    while world.usable:
        assert time.monotonic() < end, "it was not told itself"
        time.sleep(0.005)
    with pytest.raises(cr.CommunicationError) as told:
        world.check()
    assert (told.value.report.reason, told.value.ranks) == ("did not call", (world.rank,))
    world.check()


REASONS = {fail: "raised", interrupt: "raised", leave: "left", sleep: "did not call"}


@pytest.mark.parametrize(
    ("how", "at", "world_size", "bad"),
    [
        (fail, "step", 2, 0),
        (fail, "step", 4, 3),
        (fail, "backward", 2, 1),
        (fail, "backward", 4, 0),
        (interrupt, "step", 2, 1),
        (interrupt, "backward", 3, 1),
        (leave, "step", 2, 0),
        (leave, "step", 2, 1),
        (leave, "step", 4, 2),
        (sleep, "step", 2, 1),
        (sleep, "step", 4, 0),
        (sleep, "backward", 3, 2),
    ],
)
def test_who_does_not_go_on_is_named_on_all_others(
    how: Callable[[Run, cr.World], None], at: str, world_size: int, bad: int, folder: Path
) -> None:
    run, reason = Run(world_size, bad, how, at), REASONS[how]
    if how is leave:
        run()
    else:
        # A rank that sleeps wakes in a broken world.
        expected = {fail: ValueError, interrupt: KeyboardInterrupt, sleep: cr.CommunicationError}
        with pytest.raises(expected[how]) as caught:
            run()
        assert f"on rank {bad} of {world_size} (run_local)" in caught.value.__notes__
    assert sorted(run.errors) == sorted(set(range(world_size)) - {bad})
    for rank, error in run.errors.items():
        report = error.report
        assert (report.reason, report.ranks, report.rank) == (reason, (bad,), rank)
        assert error.ranks == (bad,)
        assert run.causes[rank].report is report
        assert [state.rank for state in report.states] == list(range(world_size))
        told = json.loads(Path(str(error).rpartition(" are in ")[2]).read_text())
        assert told == json.loads(json.dumps(report.as_json()))
    said = {fail: "ValueError: planted", interrupt: "KeyboardInterrupt"}.get(how, "")
    assert all(said in error.report.detail for error in run.errors.values())
    assert not [thread for thread in threading.enumerate() if "watchdog" in thread.name]
    assert not [path for path in folder.iterdir() if path.suffix != ".json"]


def test_a_rank_that_fails_before_all_have_met_is_named_too() -> None:
    told: dict[int, cr.CommunicationError] = {}

    def work(world: cr.World) -> None:
        if world.rank == 1:
            raise ValueError("planted")
        try:
            cr.Registry(SPECS, world, bucket_bytes=256)
        except cr.CommunicationError as error:
            told[world.rank] = error
            raise

    with pytest.raises(ValueError, match="planted"):
        cr.run_local(3, work, timeout_s=1.0, check="heartbeat")
    assert {rank: (e.report.reason, e.ranks) for rank, e in told.items()} == dict.fromkeys(
        (0, 2), ("raised", (1,))
    )


@pytest.mark.parametrize(("check", "world_size"), [("heartbeat", 3), ("sync", 3), ("sync", 1)])
def test_a_world_that_ends_well_is_watched_and_leaves_nothing(
    check: Any, world_size: int, folder: Path
) -> None:
    worlds: list[cr.World] = []

    def work(world: cr.World) -> int:
        worlds.append(world)
        with cr.Reducer(cr.Registry(SPECS, world, bucket_bytes=256)) as reducer:
            for _ in range(5):
                with reducer.backward():
                    for spec in SPECS:
                        reducer.reduce_grad(spec.name, np.ones(64, np.float32))
                reducer.wait()
        return world.rank

    assert cr.run_local(world_size, work, check=check) == list(range(world_size))
    for world in worlds:
        assert world.status.fault is None
        assert world.status.closed
        assert (world.status.watchdog is None) == (world_size == 1)
        if world.status.flight is not None:
            state = world.status.flight.state()
            assert 5 <= state.queued == state.started == state.done
    assert not [thread for thread in threading.enumerate() if "watchdog" in thread.name]
    assert list(folder.iterdir()) == []


def test_ranks_that_disagree_all_raise_and_break_nothing() -> None:
    def work(world: cr.World) -> bool:
        with pytest.raises(cr.MismatchError, match="ranks disagree on things"):
            world.agree("things", [f"of {world.rank}"])
        world.agree("things", ["all alike"])
        return world.usable

    assert cr.run_local(3, work, timeout_s=1.0, check="heartbeat") == [True] * 3


def test_nothing_is_watched_unasked() -> None:
    def work(world: cr.World) -> Any:
        with world.launching(anything=1):
            return world.status.watchdog, world.status.flight, world.status.compares

    assert cr.run_local(2, work) == [(None, None, False)] * 2
    assert cr.run_local(1, work, check="heartbeat") == [(None, None, False)]


WRONG_TIMES = [
    0,
    -1,
    -0.5,
    float("inf"),
    float("-inf"),
    float("nan"),
    "1",
    None,
    True,
    1j,
    [],
]


@pytest.mark.parametrize("timeout_s", WRONG_TIMES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_limit_is_a_number_of_seconds(timeout_s: Any, world_size: int) -> None:
    for check in ("off", "heartbeat", "sync"):
        with pytest.raises(cr.LayoutError, match="timeout_s must be a number of seconds > 0"):
            cr.run_local(world_size, no_world, timeout_s=timeout_s, check=check)  # type: ignore[arg-type]


@pytest.mark.parametrize("check", ["on", "", "Off", "heartbeat ", None, True, 1, []])
def test_a_check_is_one_of_three(check: Any) -> None:
    with pytest.raises(
        cr.LayoutError, match="check must be one of 'heartbeat', 'sync', 'off', not"
    ):
        cr.run_local(2, no_world, check=check)


def no_world(world: cr.World) -> None:
    raise AssertionError("a world with wrong options")


def test_an_error_without_a_folder_for_its_file_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "none"))
    error = watching._make_error(BROKEN)
    assert str(error) == BROKEN.text
    assert (error.report, error.ranks) == (BROKEN, (1,))


class World:
    """What stands in for a world at the end of its process."""

    def __init__(
        self, *, closed: bool = False, shrunk: bool = False, fault: BaseException | None = None
    ) -> None:
        self.rank = 1
        self.status = Status()
        self.status.closed, self.status.shrunk, self.status.fault = closed, shrunk, fault
        self.did: list[Any] = []
        self.status.watchdog = SimpleNamespace(  # type: ignore[assignment]
            raised=self.did.append, stop=lambda: self.did.append("stop")
        )
        self.communicator = SimpleNamespace(abort=lambda: self.did.append("abort"))
        self.control = SimpleNamespace(close=lambda: self.did.append("close"))

    def fail(self, fault: BaseException) -> None:
        self.status.fault = fault


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that joins worlds and ends the process; it returns what that told."""
    ended: list[str] = []
    monkeypatch.setattr(watching, "_joined", [])
    monkeypatch.setattr(watching, "_end", lambda told, code=74: ended.append(f"{told} {code}"))
    monkeypatch.setattr(watching, "ABORT_S", 0.02)
    monkeypatch.setattr(atexit, "register", lambda *_: None)

    def leave(*worlds: Any, process: int | None = None) -> list[str]:
        for world in worlds:
            watching.leave_safely(world)
        watching._leave(os.getpid() if process is None else process)
        return ended

    return leave


@pytest.mark.parametrize(
    ("worlds", "ends"),
    [
        ([{"closed": True}], False),
        ([{"closed": True, "fault": ValueError()}], True),
        ([{"fault": ValueError()}], True),
        ([{"closed": True}, {"closed": True, "fault": ValueError()}], True),
        ([{"closed": True, "fault": ValueError()}, {"closed": True}], False),
        ([{"fault": ValueError()}, {"fault": ValueError()}], True),
    ],
)
def test_a_process_whose_last_world_broke_does_not_wait_for_its_peers(
    joined: Callable[..., list[str]],
    worlds: list[dict[str, Any]],
    ends: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = [World(**fields) for fields in worlds]
    told = ["rank 1 ends with a broken world; exit code 74 74"] if ends else []
    assert joined(*made) == told
    assert [world.did for world in made] == [[]] * len(made)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("code", [0, 1, 74])
def test_survivors_never_get_to_mpi_finalize(
    joined: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Without error, with one that nobody handled, and where their world broke as well."""
    monkeypatch.setattr(sys, "last_value", ValueError() if code else None, raising=False)
    fault = ValueError() if code == 74 else None
    told = "rank 1 ends with a broken world; exit code 74" if fault else ""
    before = World(closed=True, shrunk=True, fault=ValueError())
    assert joined(before, World(closed=True, fault=fault))[0] == f"{told} {code}"


@pytest.mark.parametrize("unhandled", [None, ValueError("unhandled")])
def test_a_world_that_was_not_closed_says_goodbye(
    joined: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    unhandled: Exception | None,
) -> None:
    monkeypatch.setattr(sys, "last_value", unhandled, raising=False)
    world = World()
    monkeypatch.setattr(watching, "ABORT_S", LIMIT_S)
    assert joined(world) == []
    raised = [] if unhandled is None else [unhandled]
    assert world.did == [*raised, "stop", "abort", "close"]
    told = "cupynccl_reduce: rank 1 ends without world.close(): its peers see it leave\n"
    assert capfd.readouterr().err == told


def test_a_goodbye_that_hangs_does_not_keep_the_process(joined: Callable[..., list[str]]) -> None:
    over = threading.Event()
    world = World()
    world.communicator.abort = lambda: over.wait(LIMIT_S)
    assert joined(world) == []
    assert world.did == ["stop"]
    over.set()


def test_a_forked_child_owns_no_world(joined: Callable[..., list[str]]) -> None:
    worlds = World(), World(fault=ValueError())
    assert joined(*worlds, process=os.getpid() + 1) == []
    assert [world.did for world in worlds] == [[], []]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_world_that_does_not_abort_ends_the_process(
    joined: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    world, over, error = World(), threading.Event(), cr.CommunicationError("rank 0 died")
    ended: list[str] = []
    monkeypatch.setattr(watching, "_end", ended.append)
    if hangs:
        world.fail = lambda fault: over.wait(LIMIT_S)  # type: ignore[method-assign,return-value]
    else:
        monkeypatch.setattr(watching, "ABORT_S", LIMIT_S)
    watching._abort(world, error)  # type: ignore[arg-type]
    over.set()
    if hangs:
        (told,) = ended
        assert told.startswith("rank 0 died\n  The communicator did not abort within")
    else:
        assert ended == []
        assert world.status.fault is error


def test_the_process_ends_with_its_own_code_and_says_why(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    source = "from cupynccl_reduce import watching; print('kept', end=''); watching._end('why')"
    ended = run_python(source)
    assert (ended.returncode, ended.stdout) == (watching.ABORTED, "kept")
    assert ended.stderr == "cupynccl_reduce: why\n"
