"""Laws of the communicators: threads and MPI here, NCCL where a GPU is. See laws.py."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from contract.laws import laws
from mpi.launch import Result, mpirun

from cupynccl_reduce import CommunicationError, MismatchError, run_local
from cupynccl_reduce.communicators.local import LocalCommunicator
from cupynccl_reduce.control.local import LocalControl
from cupynccl_reduce.meeting import Meeting
from cupynccl_reduce.runtimes.host import HostRuntime

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

LAWS = laws(host=True)
LIMIT_S = 20.0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LAWS)
def test_local(name: str, world_size: int) -> None:
    run_local(world_size, LAWS[name])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_mpi(world_size: int) -> None:
    check_laws(mpirun(world_size, "laws.py", "host", "default", "cut"), "default", "cut")


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nccl(world_size: int) -> None:
    check_laws(mpirun(world_size, "laws.py", "cuda", "default"), "default", host=False)


def check_laws(result: Result, *sizes: str, host: bool = True) -> None:
    result.check()
    expected = [f"law {size}: {name}" for size in sizes for name in laws(host=host)]
    assert result.lines("law ") == expected


def on_ranks(world_size: int, function: Callable[[int, Any, Any, Any], Any]) -> list[Any]:
    """Run `function(rank, communicator, control, stream)` on threads; return values or errors."""
    data, side = Meeting(world_size), Meeting(world_size)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        runtime = HostRuntime()
        try:
            results[rank] = function(
                rank, LocalCommunicator(data, rank), LocalControl(side, rank), runtime.stream()
            )
        except Exception as error:  # noqa: BLE001  # returned
            results[rank] = error
        runtime.close()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_different_collectives_are_a_mismatch_on_all_ranks(world_size: int) -> None:
    def different(rank: int, communicator: Any, _control: Any, stream: Any) -> None:
        array = np.ones(8 if rank else 12, np.float32)
        communicator.all_reduce(array, array, "float32", "sum", stream)
        stream.synchronize()

    for error in on_ranks(world_size, different):
        assert isinstance(error, CommunicationError)
        assert isinstance(error.__cause__, MismatchError)
        assert "float32 8" in str(error)
        assert "float32 12" in str(error)


@pytest.mark.parametrize("kind", ["op", "dtype", "collective", "root"])
def test_whatever_differs_is_a_mismatch(kind: str) -> None:
    def different(rank: int, communicator: Any, _control: Any, stream: Any) -> None:
        array = np.ones(4, np.float32)
        odd = rank == 1
        if kind == "op":
            communicator.all_reduce(array, array, "float32", "avg" if odd else "sum", stream)
        elif kind == "dtype":
            communicator.all_reduce(array, array, "int32" if odd else "float32", "sum", stream)
        elif kind == "root":
            communicator.broadcast(array, rank, "float32", stream)
        elif odd:
            communicator.broadcast(array, 0, "float32", stream)
        else:
            communicator.all_reduce(array, array, "float32", "sum", stream)
        stream.synchronize()

    for error in on_ranks(2, different):
        assert isinstance(error.__cause__, MismatchError)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_abort_frees_ranks_that_wait(world_size: int) -> None:
    def leave(rank: int, communicator: Any, control: Any, stream: Any) -> None:
        if rank == 0:
            for _ in range(2):
                communicator.abort()
                control.abort()
            return
        array = np.ones(4, np.float32)
        communicator.all_reduce(array, array, "float32", "sum", stream)
        with pytest.raises(CommunicationError):
            control.all_gather(b"never answered")
        stream.synchronize()

    first, *others = on_ranks(world_size, leave)
    assert first is None
    assert all(isinstance(error, CommunicationError) for error in others)


def test_every_rank_of_a_mismatch_raises_it_even_if_one_leaves_at_once() -> None:
    # Whoever hears of the mismatch first aborts the meeting: the others have met all the same.
    def disagree(rank: int, _communicator: Any, control: Any, _stream: Any) -> None:
        told = control.all_gather(str(rank).encode())
        control.abort()
        msg = str(told)
        raise MismatchError(msg)

    for _ in range(50):
        assert [type(e) for e in on_ranks(3, disagree)] == [MismatchError] * 3


def test_close_may_be_called_twice() -> None:
    def close_twice(world: World) -> None:
        for _ in range(2):
            world.communicator.close()
            world.control.close()
        for _ in range(2):
            world.close()

    run_local(2, close_twice)
