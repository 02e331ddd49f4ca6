"""A further thread of a simulated rank, such as torch's autograd thread. Not an OS thread's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .scheduler import Scheduler

__all__ = ["SimThread"]


class SimThread:
    """A thread that takes turns with all others. Made by `runtime.spawn`."""

    def __init__(self, scheduler: Scheduler, function: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self.joined = False
        self.host = scheduler.spawn(self._run)

    def join(self) -> Any:
        """Wait until the function has ended; return what it returned, or raise what it raised.

        All that it has asked for comes before what the caller asks for next.
        """
        self.joined = True
        self._scheduler.pause(self._ended, f"{self.host.name} to end")
        self._scheduler.detector.follow(self._scheduler.host.lane, self.host.lane)
        if self._error is not None:
            raise self._error
        return self._value

    def _ended(self) -> bool:
        return self.host.done

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  # raised again by join()
            self._error = error
