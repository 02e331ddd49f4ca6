"""This library's rows: gradients handed over by a plain loop, as a user without torch would."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from cupynccl_reduce.membership import Status
from cupynccl_reduce.reducer import Reducer
from cupynccl_reduce.registry import Registry

from .setup import first_of

if TYPE_CHECKING:
    from .setup import Setup

__all__ = ["Accumulating", "Looped", "with_check"]


def with_check(setup: Setup, check: Literal["sync", "off"]) -> Setup:
    """Return the same with a world that is watched otherwise, on the same streams."""
    status = Status()
    if check == "sync":
        status.flight, status.compares = setup.world.status.flight, True
    return replace(setup, world=replace(setup.world, status=status))


class Looped:
    """One backward a step, gradients in reverse order; every call checks what it is given."""

    def __init__(self, setup: Setup, policy: Literal["planned", "arrival"]) -> None:
        self._world = setup.world
        self._registry = Registry(setup.params, setup.world, bucket_bytes=setup.bucket_bytes)
        self._reducer = Reducer(self._registry, policy=policy, max_buffers=setup.max_buffers)
        names = [spec.name for spec in setup.params]
        self._pairs = list(zip(names, setup.gradients, strict=True))[::-1]
        self._largest = setup.largest
        taken = self._reducer.statistics()
        self.own_bytes = taken.shard_bytes + taken.buffer_bytes

    def prepare(self) -> None:
        """Do nothing."""

    def issue(self) -> None:
        """Hand all gradients over, and flush."""
        reduce_grad = self._reducer.reduce_grad
        with self._reducer.backward():
            for name, grad in self._pairs:
                reduce_grad(name, grad)

    def land(self) -> None:
        """Close the cycle and block the host until the shards are there."""
        self._reducer.wait()
        self._world.runtime.adopt(None).synchronize()

    def value(self) -> float:
        """Return an element of this rank's shard."""
        dtype = self._registry[self._largest].spec.shard_dtype
        return first_of(self._registry.shards[self._largest], dtype)

    def close(self) -> None:
        """Give the buffers and the shards' memory back."""
        self._reducer.close()


class Accumulating(Looped):
    """The second backward of a cycle, which is added to the first."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "planned")

    def prepare(self) -> None:
        """Run the first backward."""
        self.issue()
        self._reducer.synchronize()

    def value(self) -> float:
        """Return an element of this rank's shard: of one backward, on average."""
        return super().value() / 2
