"""The sockets of the channel: a ROUTER at rank 0, DEALERs elsewhere, with CURVE. No messages."""

from __future__ import annotations

import socket
from typing import Any

import zmq

from cupynccl_reduce.errors import CommunicationError

from .frames import Invitation

__all__ = ["LINGER_MS", "Server", "open_socket", "own_address"]

LINGER_MS = 1000
# Of a host that vanishes; a stopped process may come back sooner.
HEARTBEAT_MS, GONE_MS = 1000, 60_000


class Server:
    """Rank 0's end before the others know of it: bound, with new keys.

    Args:
        host: the address to listen on, which the other ranks reach.
    """

    def __init__(self, host: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = server
        _configure(self.socket)
        try:
            port = self.socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.context.destroy(linger=0)
            msg = f"rank 0 cannot listen on {host}: {error}"
            raise CommunicationError(msg) from error
        self.invitation = Invitation(host, port, server[0], *client)


def open_socket(rank: int, source: Server | Invitation) -> tuple[Any, Any]:
    """Return this rank's context and socket, connected or bound."""
    if isinstance(source, Server):
        return source.context, source.socket
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.identity = b"r%d" % rank
    dealer.curve_serverkey = source.server_key
    dealer.curve_publickey, dealer.curve_secretkey = source.public_key, source.secret_key
    _configure(dealer)
    dealer.connect(f"tcp://{source.host}:{source.port}")
    return context, dealer


def own_address(hosts: set[str]) -> str:
    """Return the address of this host on the way to another one; no packet is sent."""
    other = next(host for host in sorted(hosts) if host != socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def _configure(end: Any) -> None:
    end.linger = LINGER_MS
    end.heartbeat_ivl, end.heartbeat_timeout, end.heartbeat_ttl = HEARTBEAT_MS, GONE_MS, GONE_MS
    end.sndhwm = end.rcvhwm = 10_000
