"""What a forked child lets go of: its copies of a channel's connections, and the channel itself.

A connection that a child still holds does not close when its parent is killed: the others would
take the parent for silent as long as the child lives. A lock that another thread of the parent held
is held for ever in the child.
"""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

__all__ = ["Forkable", "living"]

Address = tuple[str, int]


class Forkable(Protocol):
    """What has connections from or to rank 0's address, `address`."""

    address: Address

    def forked(self) -> None:
        """Become inert. Called in a forked child, which has this one thread."""


living = weakref.WeakSet[Forkable]()


def _forked() -> None:
    channels = list(living)
    if channels:
        _close_copies({channel.address for channel in channels})
    for channel in channels:
        channel.forked()


def _close_copies(addresses: set[Address]) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # else looking at a socket would change it, the parent's too
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # no socket, or one without connection
            end = socket.socket(fileno=fd)
            try:
                mine = end.getsockname() in addresses or end.getpeername() in addresses
            finally:
                end.detach()
            if mine:
                os.close(fd)
    socket.setdefaulttimeout(before)


os.register_at_fork(after_in_child=_forked)
