"""Two threads, each with a world and reducer of its own, on per-thread default streams."""

from __future__ import annotations

import threading

import cupy

import cupynccl_reduce as cr

FAILURES: list[BaseException] = []


def work(value: int) -> None:
    try:
        with cr.connect("cuda") as world:
            registry = cr.Registry([cr.ParamSpec("p", (1 << 16,), "float32")], world)
            with cr.Reducer(registry) as reducer:
                for _ in range(100):
                    grad = cupy.full(1 << 16, value, cupy.float32)
                    with reducer.backward():
                        reducer.reduce_grad("p", grad)
                    del grad
                    shard = reducer.wait()["p"]
                    assert bool((shard == value).all())
    except BaseException as error:  # noqa: BLE001  # raised below, on the main thread
        FAILURES.append(error)


threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if FAILURES:
    raise FAILURES[0]
print("UNMIXED")
