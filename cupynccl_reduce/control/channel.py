"""The side channel between ranks, apart from MPI and NCCL: a star whose centre is rank 0.

Authenticated and encrypted by CurveZMQ. Rank 0's public key is known to nobody but the ranks, and
without it no handshake succeeds. One thread in each process owns the sockets.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from cupynccl_reduce.errors import CommunicationError, LayoutError
from cupynccl_reduce.peers import Peer

from .frames import (
    MAX_GATHER_BYTES,
    MAX_NOTICE_BYTES,
    MAX_STATE_BYTES,
    Frame,
    Invitation,
    Kind,
)
from .hub import Hub, Leaf
from .sockets import LINGER_MS, Server, open_socket, own_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.protocols import Control

__all__ = ["Channel"]

BEAT_S = 0.2
PATIENCE = 10  # times the timeout, for ranks that answer and do not come


class Channel:
    """protocols.Control and peers.Beats over one star. Making it blocks until all ranks are there.

    Args:
        rank: of this process.
        world_size: number of ranks.
        source: rank 0's Server, or the Invitation that it made.
        timeout_s: how long to wait for ranks that do not answer, here and in `all_gather`; ten
            times as long for ranks that answer and do not come.

    Raises:
        CommunicationError: ranks did not come; it names them.
    """

    def __init__(
        self, rank: int, world_size: int, source: Server | Invitation, *, timeout_s: float = 60.0
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._outbox: deque[tuple[Kind, int, bytes]] = deque()
        self._notices: deque[tuple[int, bytes]] = deque()
        self._gathered: dict[int, list[bytes]] = {}
        self._turn = 0
        self._ending = self._over = self._aborted = False
        self._failure: BaseException | None = None
        self._context, self._socket = open_socket(rank, source)
        self._node: Hub | Leaf = (
            Hub(world_size, time.monotonic) if rank == 0 else Leaf(rank, world_size, time.monotonic)
        )
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._serve, name="cupynccl-channel", daemon=True)
        self._thread.start()
        try:
            self.all_gather(b"")
        except BaseException:
            self.close()
            raise

    @classmethod
    def meet(cls, control: Control, rank: int, world_size: int, *, timeout_s: float) -> Channel:
        """Make a channel between ranks that have another one, over which its keys travel.

        Collective, blocks the host. Rank 0 listens on the loopback interface where all ranks are on
        one host, else on the address by which its host knows itself.
        """
        hosts = {name.decode() for name in control.all_gather(socket.gethostname().encode())}
        source: Server | Invitation | None = None
        complaint = b""
        if rank == 0:
            try:
                source = Server("127.0.0.1" if len(hosts) == 1 else own_address(hosts))
            except (CommunicationError, OSError) as error:
                complaint = str(error).encode()
        made = source.invitation.encode() if isinstance(source, Server) else complaint
        told = control.all_gather(made)[0]
        source = source or Invitation.decode(told)
        if source is None:
            msg = f"no channel between ranks: {told.decode()}; connect(check='off') goes without"
            raise CommunicationError(msg)
        return cls(rank, world_size, source, timeout_s=timeout_s)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective, blocks the host: return every rank's payload, in rank order.

        Raises:
            CommunicationError: a rank left, died, or was silent for too long; or after abort().
            LayoutError: over 64 MiB.
        """
        if len(payload) > MAX_GATHER_BYTES:
            msg = f"all_gather takes at most {MAX_GATHER_BYTES} bytes a rank, not {len(payload)}"
            raise LayoutError(msg)
        self._check()
        with self._changed:
            turn = self._turn = self._turn + 1
        self._send(Kind.GATHER, payload, turn)
        began = time.monotonic()
        stuck_since: float | None = None
        with self._changed:
            while turn not in self._gathered:
                self._check()
                late = self._late(turn)
                gone = [peer for peer in late if peer.link in ("left", "lost")]
                if gone:
                    raise _absent(gone, "all_gather")
                # A rank that answers may still load its data; one that is silent may not.
                silent = not late or any(peer.link == "silent" for peer in late)
                now = time.monotonic()
                stuck_since = (stuck_since or now) if silent else None
                patience_s = now - began - PATIENCE * self._timeout_s
                if patience_s > 0 or now - (stuck_since or now) > self._timeout_s:
                    raise _absent(late or [Peer(0, link="silent")], "all_gather")
                self._changed.wait(BEAT_S)
            return self._gathered.pop(turn)

    def publish(self, state: bytes) -> None:
        """Set what the others see of this rank: at most 256 bytes, sent with the next beat."""
        if len(state) > MAX_STATE_BYTES:
            msg = f"a state has at most {MAX_STATE_BYTES} bytes, not {len(state)}"
            raise LayoutError(msg)
        with self._changed:
            self._node.state = state

    def peers(self) -> list[Peer]:
        """Return all ranks as last heard of. Does not block the host."""
        with self._changed:
            return self._node.peers()

    def tell(self, notice: bytes) -> None:
        """Send a notice to every other rank. Does not block the host."""
        if len(notice) > MAX_NOTICE_BYTES:
            msg = f"a notice has at most {MAX_NOTICE_BYTES} bytes, not {len(notice)}"
            raise LayoutError(msg)
        self._send(Kind.NOTICE, notice)

    def notices(self) -> list[tuple[int, bytes]]:
        """Return the notices that have come since the last call. Does not block the host."""
        with self._changed:
            taken = list(self._notices)
            self._notices.clear()
        return taken

    def close(self) -> None:
        """Say goodbye and end; blocks for about a second at most. Idempotent."""
        if os.getpid() != self._process or self._ending:
            return
        self._ending = True
        self._send(Kind.GOODBYE, b"")
        self._thread.join()

    def abort(self) -> None:
        """Free whoever waits in all_gather; notices still come and go until close(). Idempotent."""
        if os.getpid() == self._process:  # else the lock may be held, for ever
            with self._changed:
                self._aborted = True
                self._changed.notify_all()

    def _check(self) -> None:
        if os.getpid() != self._process:
            msg = f"rank {self._rank}: a forked child has no channel; connect() before or after"
            raise CommunicationError(msg)
        if self._failure is not None:
            msg = f"rank {self._rank}: the channel failed: {self._failure}"
            raise CommunicationError(msg) from self._failure
        if self._aborted or self._ending:
            msg = f"rank {self._rank} left this world after a failure"
            raise CommunicationError(msg)

    def _late(self, turn: int) -> list[Peer]:
        """Return the ranks that have not come to `turn`, as far as is known here."""
        turns = self._node.turns()
        if self._node.peers()[0].link != "up":
            turns[0] = -1  # it came, perhaps, but it does not answer
        return [p for p in self._node.peers() if turns[p.rank] < turn and p.rank != self._rank]

    def _send(self, kind: Kind, body: bytes, turn: int = 0) -> None:
        self._outbox.append((kind, turn, body))
        with self._changed, suppress(BlockingIOError):  # full: it wakes up anyway
            if not self._over:  # else the number may be another file's by now
                os.write(self._wake_write, b"x")

    # The thread that owns the sockets.

    def _serve(self) -> None:
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        for source in (self._socket, monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        pause_s = BEAT_S * max(1.0, self._world_size / 64)  # a table goes to every rank
        next_beat = time.monotonic()
        try:
            leaving = False
            while not leaving:
                wait_s = max(0.0, next_beat - time.monotonic())
                ready = dict(poller.poll(1 + int(1000 * wait_s)))
                if self._wake_read in ready:
                    with suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                if monitor in ready:
                    fd = recv_monitor_message(monitor)["value"]
                    with self._changed:
                        self._node.dropped(int(fd))
                if self._socket in ready:
                    self._take_all()
                leaving = self._empty_outbox()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + pause_s
                    with self._changed:
                        sent = self._node.beat()
                        self._changed.notify_all()
                    self._transmit(sent)
        except BaseException as error:  # noqa: BLE001  # callers raise it
            self._failure = error
        finally:
            self._socket.disable_monitor()
            self._context.destroy(linger=LINGER_MS)
            with self._changed:
                self._over = True
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._changed.notify_all()

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
            with self._changed:
                answers = self._node.take(sender, frame, fd, self._notices, self._gathered)
                self._changed.notify_all()
            self._transmit(answers)

    def _empty_outbox(self) -> bool:
        """Send what other threads have handed over; return whether this was the last."""
        while self._outbox:
            kind, turn, body = self._outbox.popleft()
            with self._changed:
                sent = self._node.own(kind, turn, body, self._gathered)
                self._changed.notify_all()
            self._transmit(sent)
            if kind is Kind.GOODBYE:
                return True
        return False

    def _transmit(self, messages: list[tuple[bytes, bytes]]) -> None:
        for receiver, data in messages:
            # A receiver whose queue is full, or that is gone, misses this one: states come again,
            # and nobody waits for an answer of a rank that is gone.
            with suppress(zmq.Again, zmq.ZMQError):
                self._socket.send_multipart([receiver, data] if receiver else [data], zmq.NOBLOCK)


def _absent(peers: list[Peer], call: str) -> CommunicationError:
    words: dict[str, Callable[[Peer], str]] = {
        "left": lambda p: f"rank {p.rank} has left this world",
        "lost": lambda p: f"rank {p.rank} died: its connection closed without a goodbye",
        "silent": lambda p: (
            f"rank {p.rank} has been silent for {p.age_s:.0f} s: stopped, or its GIL is held"
        ),
        "up": lambda p: f"rank {p.rank} did not come",
    }
    error = CommunicationError(f"{call}: " + "; ".join(words[p.link](p) for p in peers[:8]))
    error.ranks = tuple(peer.rank for peer in peers)
    return error
