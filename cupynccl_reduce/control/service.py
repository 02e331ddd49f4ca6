"""The thread that owns a channel's sockets, and what other threads hand it. Nobody waits here."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zmq

from .forks import living
from .frames import Frame, Kind
from .hub import Hub, Leaf
from .pulse import BEAT_S, Clock, pace
from .sockets import LINGER_MS, Server, open_socket

if TYPE_CHECKING:
    from .frames import Invitation

__all__ = ["Service"]

DELIVERY_S = 60.0  # for ranks that answer and have not yet got all that rank 0 has sent


class Service:
    """Sends and receives for one rank.

    Args:
        rank: of this process.
        world_size: number of ranks.
        source: rank 0's Server, or the Invitation that it made.

    Attributes:
        changed: the lock of all that is below, notified of every change.
        node: this rank's end, as plain state.
        notices: those that have come, each with its rank.
        gathered: everyone's payloads of a turn, by turn.
        failure: what ended the thread, if not close().
        clock: seconds for which this process ran.
    """

    def __init__(self, rank: int, world_size: int, source: Server | Invitation) -> None:
        self._rank = rank
        self._pause_s = BEAT_S * pace(world_size)
        self.clock = Clock(world_size)
        self.changed = threading.Condition()
        self.node: Hub | Leaf = (
            Hub(world_size, self.clock) if rank == 0 else Leaf(rank, world_size, self.clock)
        )
        self.notices: deque[tuple[int, bytes]] = deque()
        self.gathered: dict[int, list[bytes]] = {}
        self.failure: BaseException | None = None
        self._outbox: deque[tuple[Kind, int, bytes]] = deque()
        self._over = False
        self._door = source.door if isinstance(source, Server) else None
        told = source.invitation if isinstance(source, Server) else source
        self.address = told.host, told.port
        living.add(self)
        self._context, self._socket = open_socket(rank, source)
        self._monitor = self._socket.get_monitor_socket()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._serve, name="cupynccl-channel", daemon=True)
        self._thread.start()

    def send(self, kind: Kind, body: bytes = b"", turn: int = 0) -> None:
        """Hand a message over; none after the end. Does not block the host."""
        with self.changed, suppress(BlockingIOError):  # full: it wakes up anyway
            if not self._over:  # else the pipe's number may be another file's by now
                self._outbox.append((kind, turn, body))
                os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Say goodbye and end; blocks the host."""
        self.send(Kind.GOODBYE)
        self._thread.join()

    def forked(self) -> None:
        """Become inert, in a forked child."""
        self.changed = threading.Condition()
        self.failure = RuntimeError("a forked child has none; connect() before or after")
        self._over = True

    def _serve(self) -> None:
        try:
            self._serve_until_goodbye()
        except BaseException as error:  # noqa: BLE001  # callers raise it
            self.failure = error
        finally:
            self._socket.disable_monitor()
            self._context.destroy(linger=LINGER_MS)
            living.discard(self)
            with self.changed:
                self._over = True
                os.close(self._wake_read)
                os.close(self._wake_write)
                self.changed.notify_all()

    def _serve_until_goodbye(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        if self._door is not None:
            poller.register(self._door.socket, zmq.POLLIN)
        next_beat = time.monotonic()
        goodbye_by: float | None = None
        while goodbye_by is None or not self._settled(goodbye_by):
            wait_s = max(0.0, next_beat - time.monotonic())
            ready = dict(poller.poll(1 + int(1000 * wait_s)))
            with self.changed:
                self.clock.turn()
            self._take(ready)
            if self._empty_outbox():
                goodbye_by = time.monotonic() + DELIVERY_S
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._pause_s
                with self.changed:
                    sent = self.node.beat()
                    self.changed.notify_all()
                self._transmit(sent)
        with self.changed:
            sent = self.node.own(Kind.GOODBYE, 0, b"", self.gathered)
        self._transmit(sent)

    def _settled(self, by: float) -> bool:
        with self.changed:
            return self.node.settled() or time.monotonic() > by

    def _take(self, ready: dict[Any, int]) -> None:
        """Take what has come, from whomever."""
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if self._door is not None and self._door.socket in ready:
            self._door.answer()
        if self._socket in ready or self._monitor in ready:
            self._take_all()  # what a connection brought comes before its end: read it before
        if self._monitor in ready:
            _event, fd = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
            with self.changed:
                self.node.dropped(fd)

    def _take_all(self) -> None:
        """Read what has come; strangers' and malformed messages are dropped."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            fd = parts[0].get(zmq.SRCFD)
            data = [part.bytes for part in parts]
            sender = data[0] if self._rank == 0 else b""
            frame = Frame.decode(data[-1]) if len(data) == 1 + (self._rank == 0) else None
            if frame is None:
                continue
            with self.changed:
                answers = self.node.take(sender, frame, fd, self.notices, self.gathered)
                self.changed.notify_all()
            self._transmit(answers)

    def _empty_outbox(self) -> bool:
        """Send what other threads have handed over; return whether a goodbye is to follow."""
        while self._outbox:
            kind, turn, body = self._outbox.popleft()
            if kind is Kind.GOODBYE:
                return True
            with self.changed:
                sent = self.node.own(kind, turn, body, self.gathered)
                self.changed.notify_all()
            self._transmit(sent)
        return False

    def _transmit(self, messages: list[tuple[bytes, bytes]]) -> None:
        for receiver, data in messages:
            # A receiver whose queue is full, or that is gone, misses this one: states come again,
            # and nobody waits for an answer of a rank that is gone.
            with suppress(zmq.ZMQError):
                self._socket.send_multipart([receiver, data] if receiver else [data], zmq.NOBLOCK)
