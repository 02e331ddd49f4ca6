"""One case a job, by name: what goes wrong under mpirun, and what must not."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any

import numpy as np

import cupynccl_reduce as cr
from cupynccl_reduce import ParamSpec


def say(world_rank: int, text: object) -> None:
    """Print one whole line: ranks share the pipe."""
    sys.stdout.write(f"rank {world_rank}: {text}\n")
    sys.stdout.flush()


def reduce_once(world: cr.World, *, fail: bool = False) -> None:
    params = [ParamSpec("p", (7,), "float32"), ParamSpec("q", (3,), "float32")]
    registry = cr.Registry(params, world)
    with cr.Reducer(registry, op="sum") as reducer:
        with reducer.backward():
            reducer.reduce_grad("p", np.full(7, world.rank + 1, np.float32))
            if fail:
                msg = "planted"
                raise ValueError(msg)
            reducer.reduce_grad("q", np.ones(3, np.float32))
        full = registry.gather(reducer.wait())
    if not np.isnan(full["q"]).any():
        world_size = world.world_size
        assert set(full["p"].tolist()) == {world_size * (world_size + 1) / 2}
        assert set(full["q"].tolist()) == {world_size}


def direct() -> None:
    """Large gradients are sent from where they lie, or packed where a rank's does not lie so."""
    with cr.connect() as world:
        numel = world.communicator.direct_bytes // 4
        params = [ParamSpec("small", (7,), "float32"), ParamSpec("large", (numel,), "float32")]
        registry = cr.Registry(params, world)
        assert [bucket.direct for bucket in registry.buckets] == [1]
        values = np.arange(numel) % 1000 * (world.rank + 1) * world.world_size
        wide = np.repeat(values, 2).astype(np.float32)[::2]
        with cr.Reducer(registry) as reducer:
            for grad in (values.astype(np.float32), wide if world.rank == 1 else wide.copy()):
                with reducer.backward():
                    reducer.reduce_grad("large", grad)
                    reducer.reduce_grad("small", np.full(7, world.rank, np.float32))
            assert reducer.statistics().collectives == 4
            full = registry.gather(reducer.wait())
        ranks = world.world_size * (world.world_size + 1) / 2
        assert np.array_equal(full["large"], np.arange(numel) % 1000 * ranks * 2)
        say(world.rank, "direct")


def mismatch() -> None:
    """H1: whatever rank 1 gives differently, all ranks raise; the world itself stays usable."""
    given: dict[str, Any] = {"params": [ParamSpec("p", (4,), "float32")], "bucket_bytes": 64}
    others = {
        "shape": {"params": [ParamSpec("p", (8,), "float32")]},
        "dtype": {"params": [ParamSpec("p", (4,), "float16")]},
        "count": {"params": [*given["params"], ParamSpec("q", (2,), "float32")]},
        "bucket": {"bucket_bytes": 128},
        "invalid": {"bucket_bytes": 0},
    }
    with cr.connect() as world:
        for what, odd in others.items():
            own = {**given, **(odd if world.rank == 1 else {})}
            try:
                cr.Registry(own["params"], world, bucket_bytes=own["bucket_bytes"])
            except cr.ReduceError as error:
                say(world.rank, f"{what} {type(error).__name__} {error}")
        registry = cr.Registry(**given, world=world)
        for what, options in {
            "op": {"op": "mean" if world.rank == 1 else "sum"},
            "policy": {"policy": "arrival" if world.rank == 1 else "planned"},
        }.items():
            try:
                cr.Reducer(registry, **options)
            except cr.ReduceError as error:
                say(world.rank, f"{what} {type(error).__name__} {error}")
        reduce_once(world)
        world.control.all_gather(b"")
        cr.Registry([ParamSpec("p", (world.rank + 1,), "float32")], world)


def missing() -> None:
    """H3: missing="error" raises on all ranks and names what is missing; zero goes on."""
    with cr.connect() as world:
        for policy in ("planned", "arrival"):
            params = [ParamSpec("p", (7,), "float32"), ParamSpec("q", (3,), "float32")]
            registry = cr.Registry(params, world)
            with cr.Reducer(registry, missing="error", policy=policy) as reducer:
                try:
                    with reducer.backward():
                        reducer.reduce_grad("p", np.ones(7, np.float32))
                except cr.MismatchError as error:
                    say(world.rank, f"{policy} MismatchError {error}")
                reducer.discard()
        reduce_once(world)


def alone_in_a_collective() -> None:
    """Rank 1 fails while all others wait for it in a large collective."""
    with cr.connect() as world:
        if world.rank == 1:
            msg = "planted"
            raise ValueError(msg)
        numel = 1 << 20
        send, recv = np.ones(numel * world.world_size, np.float32), np.ones(numel, np.float32)
        world.communicator.reduce_scatter(send, recv, "float32", "sum", world.stream)
        world.stream.synchronize()


def alone_in_backward() -> None:
    """Rank 1 fails between reduce_grad and wait."""
    with cr.connect() as world:
        reduce_once(world, fail=world.rank == 1)


def alone_in_control() -> None:
    """Rank 1 fails while all others wait for it on the side channel."""
    with cr.connect() as world:
        if world.rank == 1:
            msg = "planted"
            raise ValueError(msg)
        world.control.all_gather(bytes(1 << 20))


def abort() -> None:
    """abort() frees whoever waits; later calls fail at once; then every rank ends."""
    world = cr.connect()
    array = np.ones(1 << 20, np.float32)
    if world.rank == 0:
        world.control.all_gather(b"before")
        for _ in range(2):
            world.fail(KeyError("planted"))
    else:
        world.control.all_gather(b"before")
        world.communicator.all_reduce(array, array, "float32", "sum", world.stream)
        for wait in (world.stream.synchronize, lambda: world.control.all_gather(b"never")):
            try:
                wait()
            except cr.CommunicationError as error:
                say(world.rank, f"freed: {error}")
        world.fail(RuntimeError("freed"))
    try:
        world.control.all_gather(b"late")
    except cr.CommunicationError as error:
        say(world.rank, f"late: {error}")
    for _ in range(2):
        world.close()
    say(world.rank, "ends")
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()  # the launcher ends the others when one has ended


def rejoin() -> None:
    """A world that broke while all ranks live makes way for another, and the job ends well."""
    world = cr.connect()
    world.control.all_gather(b"")
    world.fail(ValueError("planted"))
    world.close()
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with cr.connect() as world:
        assert len(world.control.all_gather(b"")) == world.world_size
        say(world.rank, "rejoin")


def again() -> None:
    """close() then connect(), three times in one process; no thread stays."""
    threads = threading.active_count()
    hook = sys.excepthook
    for _ in range(3):
        with cr.connect() as world:
            reduce_once(world)
        world.close()
        assert threading.active_count() == threads
    assert sys.excepthook is hook
    say(world.rank, "again")


def user_initialised() -> None:
    """MPI is the user's: initialised before, and used between and after."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    assert comm.allreduce(1) == comm.size
    with cr.connect() as world:
        reduce_once(world)
        assert comm.allreduce(1) == comm.size
        request = comm.irecv(source=(comm.rank - 1) % comm.size, tag=1)
        reduce_once(world)
        comm.send(comm.rank, (comm.rank + 1) % comm.size, tag=1)
        assert request.wait() == (comm.rank - 1) % comm.size
    assert comm.allreduce(1) == comm.size
    say(world.rank, "user")


def import_in_worker(queue: Any) -> None:
    """K11: runs in a spawned worker that has inherited mpirun's variables."""
    import os

    import cupynccl_reduce as package

    loaded = [name for name in ("mpi4py.MPI", "cupy", "torch") if name in sys.modules]
    results = package.run_local(2, lambda world: world.rank)
    queue.put((os.environ["OMPI_COMM_WORLD_RANK"], loaded, results))


def worker() -> None:
    context = multiprocessing.get_context("spawn")
    with cr.connect() as world:
        queue = context.Queue()
        process = context.Process(target=import_in_worker, args=(queue,))
        process.start()
        rank, loaded, results = queue.get(timeout=60)
        process.join(60)
        assert process.exitcode == 0
        assert (int(rank), loaded, results) == (world.rank, [], [0, 1])
        reduce_once(world)
    say(world.rank, "worker")


def refused() -> None:
    """connect() raises: say what, and end well."""
    try:
        cr.connect()
    except cr.LayoutError as error:
        from mpi4py import MPI

        say(MPI.COMM_WORLD.rank, f"LayoutError {error}")


CASES = {
    function.__name__: function
    for function in (
        *(direct, mismatch, missing, alone_in_a_collective, alone_in_backward, alone_in_control),
        *(abort, again, rejoin, user_initialised, worker, refused),
    )
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
