"""The sockets of the channel: a ROUTER at rank 0, DEALERs elsewhere, with CURVE. No messages."""

from __future__ import annotations

import socket
from typing import Any

import zmq
from zmq.utils import z85

from cupynccl_reduce.errors import CommunicationError

from .frames import MAX_GATHER_BYTES, Invitation

__all__ = ["LINGER_MS", "Door", "Keys", "Server", "host_on_the_way", "open_socket", "own_address"]

LINGER_MS = 1000
# Of a host that vanishes; a stopped process may come back sooner.
HEARTBEAT_MS, GONE_MS = 1000, 60_000
MOST_BYTES = MAX_GATHER_BYTES + 4096  # a payload, its header, and what CURVE adds


class Door:
    """Lets in who has the ranks' key, by ZMQ's authentication protocol (RFC 27)."""

    def __init__(self, context: zmq.Context[Any], public_key: bytes) -> None:
        self._key = z85.decode(public_key)
        self.socket: Any = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer one request, which ZMQ itself makes."""
        version, request, _domain, _address, _identity, *shown = self.socket.recv_multipart()
        known = shown == [b"CURVE", self._key]
        status = (b"200", b"OK") if known else (b"400", b"not a rank of this world")
        self.socket.send_multipart([version, request, *status, b"", b""])


class Keys:
    """New key pairs, each public and secret: the listener's, and the one that lets ranks in."""

    def __init__(self) -> None:
        self.server, self.client = zmq.curve_keypair(), zmq.curve_keypair()

    def invite(self, host: str, port: int) -> Invitation:
        """Return the invitation to where they are asked for."""
        return Invitation(host, port, self.server[0], *self.client)


class Server:
    """A listening end before anybody knows of it: bound, with keys.

    Args:
        host: the address to listen on, which the other ranks reach.
        keys: to ask for; new ones by default.
        listener: what listens there already, and is taken over; else a new port does.
    """

    def __init__(
        self, host: str, keys: Keys | None = None, listener: socket.socket | None = None
    ) -> None:
        keys = keys or Keys()
        self.context = zmq.Context()
        self.socket: Any = self.context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.server
        self.socket.maxmsgsize = MOST_BYTES  # strangers' too, before they show a key
        _configure(self.socket)
        self.door = Door(self.context, keys.client[0])  # before it binds: without one all get in
        try:
            if listener is None:
                port = self.socket.bind_to_random_port(f"tcp://{host}")
            else:
                port = listener.getsockname()[1]
                self.socket.use_fd = listener.detach()
                self.socket.bind(f"tcp://{host}:{port}")
        except (zmq.ZMQError, OSError) as error:
            self.context.destroy(linger=0)
            msg = f"cannot listen on {host}: {error}"
            raise CommunicationError(msg) from error
        self.invitation = keys.invite(host, port)


def open_socket(rank: int, source: Server | Invitation) -> tuple[zmq.Context[Any], Any]:
    """Return this rank's context and socket, connected or bound; the socket has a monitor."""
    if isinstance(source, Server):
        return source.context, source.socket
    context: zmq.Context[Any] = zmq.Context()
    dealer: Any = context.socket(zmq.DEALER)
    dealer.identity = b"r%d" % rank
    dealer.curve_serverkey = source.server_key
    dealer.curve_publickey, dealer.curve_secretkey = source.public_key, source.secret_key
    _configure(dealer)
    dealer.connect(f"tcp://{source.host}:{source.port}")
    return context, dealer


def own_address(hosts: set[str]) -> str:
    """Return the address of this host on the way to another one; no packet is sent."""
    return _on_the_way(next(host for host in sorted(hosts) if host != socket.gethostname()))


def host_on_the_way(source: Server | Invitation) -> str:
    """Return the address of this host on the way to rank 0; at rank 0 where it listens."""
    if isinstance(source, Server):
        return source.invitation.host
    return _on_the_way(source.host)


def _on_the_way(other: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def _configure(end: Any) -> None:
    # From the start, so that no loss is missed. "Closed" is a connection that did not come about.
    end.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
    end.linger = LINGER_MS
    end.heartbeat_ivl, end.heartbeat_timeout, end.heartbeat_ttl = HEARTBEAT_MS, GONE_MS, GONE_MS
    end.sndhwm = end.rcvhwm = 10_000
