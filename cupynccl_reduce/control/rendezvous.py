"""Where the survivors of a broken world find each other, whoever of them is gone.

Every rank listens from the start, at an address that all know. After a fault, the lowest rank that
still answers hears who else is there, and tells them.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from cupynccl_reduce.errors import CommunicationError

from .forks import living
from .frames import Invitation
from .sockets import LINGER_MS, Keys, Server, open_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from cupynccl_reduce.peers import Link

__all__ = ["Rendezvous"]

POLL_MS = 50
_HERE = b"here"
_COUNT = struct.Struct("=I")


class Rendezvous:
    """One rank's place to meet. It costs a port, and no thread until it is used; it is used once.

    Args:
        rank: of this process.
        host: the address to listen on, which the other ranks reach.
    """

    def __init__(self, rank: int, host: str) -> None:
        self._rank = rank
        self._keys = Keys()
        self._listener = socket.create_server((host, 0))
        self.address = host, int(self._listener.getsockname()[1])
        self.invitation = self._keys.invite(*self.address)
        living.add(self)

    def meet(
        self,
        invitations: list[Invitation],
        links: Callable[[], Sequence[Link]],
        blamed: Container[int],
        limit_s: float,
    ) -> tuple[list[int], Server | Invitation]:
        """Return the ranks that came, in order, and the source of their new channel.

        Collective among the survivors, blocks the host: until all ranks that answer have come, for
        `limit_s` at most.

        Args:
            invitations: of every rank's rendezvous.
            links: gives every rank's link.
            blamed: ranks that the fault is known to have taken.
            limit_s: how long to wait for ranks that may still come.

        Raises:
            CommunicationError: a lower rank left after the fault: the others may have gone on.
        """
        for host in range(self._rank):
            met = self._visit(host, invitations[host], links, limit_s)
            if met is not None:
                return met
            if links()[host] in ("up", "left") and host not in blamed:
                msg = (
                    f"rank {self._rank}: rank {host} meets its peers no more: it has left, or the "
                    "survivors went on without this rank"
                )
                raise CommunicationError(msg)
        return self._collect(links, limit_s)

    def close(self) -> None:
        """Listen no more. Idempotent."""
        living.discard(self)
        self._listener.close()

    def forked(self) -> None:
        """Forget the listener, in a forked child, where it is closed already."""
        self._listener.detach()

    def _collect(
        self, links: Callable[[], Sequence[Link]], limit_s: float
    ) -> tuple[list[int], Server]:
        """Hear who is there until nobody is missing, then tell them all."""
        server = Server(self.address[0], self._keys, self._listener)
        try:
            here = self._hear(server, links, limit_s)
            ranks, successor = sorted([self._rank, *here]), Server(self.address[0])
            told = b"".join(map(_COUNT.pack, [len(ranks), *ranks])) + successor.invitation.encode()
            for identity in here.values():
                server.socket.send_multipart([identity, told])
            return ranks, successor
        finally:
            server.context.destroy(linger=LINGER_MS)

    def _hear(
        self, server: Server, links: Callable[[], Sequence[Link]], limit_s: float
    ) -> dict[int, bytes]:
        """Return the identities of the ranks that came."""
        here: dict[int, bytes] = {}
        poller = zmq.Poller()
        poller.register(server.socket, zmq.POLLIN)
        poller.register(server.door.socket, zmq.POLLIN)
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends:
            missing = [r for r, link in enumerate(links()) if link == "up" and r != self._rank]
            if here.keys() >= set(missing):
                break
            ready = dict(poller.poll(POLL_MS))
            if server.door.socket in ready:
                server.door.answer()
            if server.socket in ready:
                identity, *parts = server.socket.recv_multipart()
                if parts == [_HERE] and identity[:1] == b"r" and identity[1:].isdigit():
                    here[int(identity[1:])] = identity
        return here

    def _visit(
        self,
        host: int,
        invitation: Invitation,
        links: Callable[[], Sequence[Link]],
        limit_s: float,
    ) -> tuple[list[int], Server | Invitation] | None:
        """Come to the lowest rank that answers; None if it does not."""
        if links()[host] != "up":
            return None
        try:
            socket.create_connection((invitation.host, invitation.port), limit_s).close()
        except OSError:
            return None  # nobody listens there any more
        context, dealer = open_socket(self._rank, invitation)
        try:
            dealer.send(_HERE)
            ends = time.monotonic() + 2 * limit_s  # it may have begun to wait later
            while links()[host] == "up" and time.monotonic() < ends:
                if dealer.poll(POLL_MS):
                    return _decode(dealer.recv())
            return None
        finally:
            context.destroy(linger=0)


def _decode(told: bytes) -> tuple[list[int], Invitation] | None:
    with suppress(struct.error):
        (count,) = _COUNT.unpack_from(told)
        ranks = [_COUNT.unpack_from(told, _COUNT.size * (1 + i))[0] for i in range(count)]
        invitation = Invitation.decode(told[_COUNT.size * (1 + count) :])
        if invitation is not None:
            return ranks, invitation
    return None
