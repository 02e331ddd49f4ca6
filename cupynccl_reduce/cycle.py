"""Where a cycle stands, and which calls that allows. No gradients and no streams."""

from __future__ import annotations

from enum import Enum

from .errors import ProtocolError

__all__ = ["Cycle"]


_CLOSED = "this reducer is closed; build another one on the registry"


class _State(Enum):
    """The value completes "the shards hold ..."."""

    NEW = "nothing yet: no backward has run"
    REDUCING = "a cycle that wait() has not closed"
    CLIPPED = "a cycle that clip() has scaled already"
    LANDED = "the last cycle"
    FAILED = "a step whose backward failed; every rank calls discard() first"
    DISCARDED = "nothing: the last cycle was discarded"


class Cycle:
    """The life of a reducer's cycles: any number of backwards, then `land` or `discard`."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._state = _State.NEW
        self.step = 0
        self.backwards = 0
        self.open = False
        self.closed = False

    @property
    def name(self) -> str:
        """The state, for a repr."""
        return "CLOSED" if self.closed else "OPEN" if self.open else self._state.name

    def where(self, message: str) -> str:
        """Return `message` with the rank and step that it happened on."""
        return f"{message} [{self._place}, step {self.step}]"

    def check(self) -> None:
        """Raise ProtocolError after close."""
        if self.closed:
            raise ProtocolError(self.where(_CLOSED))

    def check_outside(self, call: str) -> None:
        """Raise ProtocolError inside backward, or after close."""
        self.check()
        if self.open:
            msg = f"{call} inside backward(): leave the with block first"
            raise ProtocolError(self.where(msg))

    def check_inside(self) -> None:
        """Raise ProtocolError outside backward, or after close; the caller adds the place."""
        if self.closed:
            raise ProtocolError(_CLOSED)
        if not self.open:
            msg = "a gradient outside backward(): hand it over inside `with reducer.backward():`"
            raise ProtocolError(msg)

    def begin(self) -> bool:
        """Open a backward; return whether it accumulates onto an earlier one of this cycle."""
        self.check_outside("backward()")
        if self._state in (_State.FAILED, _State.CLIPPED):
            remedy = "; wait() or discard() first" if self._state is _State.CLIPPED else ""
            msg = f"backward(): the shards hold {self._state.value}{remedy}"
            raise ProtocolError(self.where(msg))
        accumulate = self._state is _State.REDUCING
        self.step += not accumulate
        self.open = True
        self._state = _State.REDUCING
        return accumulate

    def end(self) -> None:
        """Close the open backward."""
        self.open = False
        self.backwards += 1

    def fail(self) -> None:
        """Mark the cycle failed: only `discard` leads on."""
        self._state = _State.FAILED

    @property
    def failed(self) -> bool:
        """Whether a backward of this cycle failed on this rank."""
        return self._state is _State.FAILED

    def check_norm(self, call: str, *, clips: bool) -> None:
        """Raise ProtocolError unless this cycle's gradients are reduced and not waited for.

        A cycle that failed on this rank counts as well: other ranks may not know.
        """
        self.check_outside(call)
        allowed = (_State.REDUCING, _State.FAILED, *(() if clips else (_State.CLIPPED,)))
        if self._state not in allowed:
            when = "once between" if clips else "between"
            msg = (
                f"{call}: the shards hold {self._state.value}; call it {when} the cycle's last "
                "backward() and its wait()"
            )
            raise ProtocolError(self.where(msg))

    def clip(self) -> None:
        """Mark the gradients scaled: none may be added to them."""
        if self._state is _State.REDUCING:
            self._state = _State.CLIPPED

    def check_wait(self) -> None:
        """Raise ProtocolError unless the shards hold what a caller may read."""
        self.check_outside("wait()")
        if self._state not in (_State.REDUCING, _State.CLIPPED, _State.LANDED):
            msg = f"wait(): the shards hold {self._state.value}"
            raise ProtocolError(self.where(msg))

    def land(self) -> bool:
        """Close the cycle; return whether it was still open. Again: nothing changes."""
        self.check_wait()
        newly = self._state is _State.REDUCING
        self._state = _State.LANDED
        return newly

    def discard(self) -> None:
        """Close the cycle without a result."""
        self.check_outside("discard()")
        self._state = _State.DISCARDED
