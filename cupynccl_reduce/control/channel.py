"""The side channel between ranks, apart from MPI and NCCL: a star whose centre is rank 0.

Authenticated and encrypted by CurveZMQ: rank 0 lets in who has the key of its invitation, and the
others talk to nobody but rank 0. One thread in each process owns the sockets (`service`).
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, cast

from cupynccl_reduce.errors import CommunicationError
from cupynccl_reduce.peers import Peer

from .frames import Invitation, Kind, check_length
from .pulse import BEAT_S
from .rendezvous import Rendezvous
from .service import Service
from .sockets import Server, host_on_the_way, own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from cupynccl_reduce.protocols import Control

__all__ = ["Channel"]

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
        self._turn = 0
        self._ending = False
        self._service = Service(rank, world_size, source)
        self._rendezvous = Rendezvous(rank, host_on_the_way(source))
        try:
            everyone = self.all_gather(self._rendezvous.invitation.encode())
            self._invitations = [cast("Invitation", Invitation.decode(one)) for one in everyone]
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
            CommunicationError: a rank left, died, was silent for too long, or aborted.
            LayoutError: over 64 MiB.
        """
        check_length(Kind.GATHER, payload)
        service = self._service
        with service.changed:
            self._check()
            turn = self._turn = self._turn + 1
            service.send(Kind.GATHER, payload, turn)
            began = service.clock()
            stuck_since: float | None = None
            while turn not in service.gathered:
                self._check()
                late = self._late(turn)
                gone = [peer for peer in late if peer.link in ("left", "lost")]
                if gone:
                    raise _absent(gone, "all_gather")
                # A rank that answers may still load its data; one that is silent may not.
                silent = not late or any(peer.link == "silent" for peer in late)
                now = service.clock()
                stuck_since = (stuck_since or now) if silent else None
                patience_s = now - began - PATIENCE * self._timeout_s
                if patience_s > 0 or now - (stuck_since or now) > self._timeout_s:
                    raise _absent(late or [Peer(0, link="silent")], "all_gather")
                service.changed.wait(BEAT_S)
            return service.gathered.pop(turn)

    def publish(self, state: bytes) -> None:
        """Set what the others see of this rank: at most 256 bytes, sent with the next beat."""
        check_length(Kind.BEAT, state)
        with self._service.changed:
            self._service.node.state = state

    def peers(self) -> list[Peer]:
        """Return all ranks as last heard of. Does not block the host."""
        with self._service.changed:
            return self._service.node.peers()

    def tell(self, notice: bytes) -> None:
        """Send a notice of at most 64 KiB to every other rank. Does not block the host."""
        check_length(Kind.NOTICE, notice)
        self._service.send(Kind.NOTICE, notice)

    def notices(self) -> list[tuple[int, bytes]]:
        """Return the notices that have come since the last call. Does not block the host."""
        with self._service.changed:
            taken = list(self._service.notices)
            self._service.notices.clear()
        return taken

    def regroup(self, blamed: Container[int], limit_s: float) -> tuple[list[int], Channel]:
        """Return the ranks that survived, and a side channel between them; see peers.Beats."""
        ranks, source = self._rendezvous.meet(
            *(self._invitations, lambda: [peer.link for peer in self.peers()], blamed, limit_s)
        )
        place = ranks.index(self._rank), len(ranks)
        return ranks, Channel(*place, source, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Say goodbye and end. Idempotent.

        Blocks for about a second at most. Rank 0 stays until the ranks that answer have all that
        all_gather gave, for a minute at most.
        """
        if not self._ending:
            self._ending = True
            self._rendezvous.close()
            self._service.close()

    def abort(self) -> None:
        """Free all ranks that wait in all_gather, now and later; all else goes on. Idempotent."""
        with self._service.changed:
            if self._service.node.aborted is None:
                self._service.node.aborted = self._rank
                self._service.send(Kind.ABORT)
                self._service.changed.notify_all()

    def _check(self) -> None:
        failure, aborted = self._service.failure, self._service.node.aborted
        if failure is not None:
            msg = f"rank {self._rank}: the channel failed: {failure}"
            raise CommunicationError(msg) from failure
        if self._ending or aborted is not None:
            left = self._rank if self._ending or aborted is None else aborted
            error = CommunicationError(f"rank {left} left this world after a failure")
            error.ranks = (left,)
            raise error

    def _late(self, turn: int) -> list[Peer]:
        """Return the ranks that have not come to `turn`, as far as is known here."""
        turns, peers = self._service.node.turns(), self._service.node.peers()
        if peers[0].link != "up":
            turns[0] = -1  # it came, perhaps, but it does not answer
        return [p for p in peers if turns[p.rank] < turn and p.rank != self._rank]


def _absent(peers: list[Peer], call: str) -> CommunicationError:
    words: dict[str, Callable[[Peer], str]] = {
        "left": lambda p: f"rank {p.rank} has left this world",
        "lost": lambda p: (
            f"rank {p.rank} died, or is cut off: its connection closed without a goodbye"
        ),
        "silent": lambda p: (
            f"rank {p.rank} has been silent for {p.age_s:.0f} s: stopped, or its GIL is held"
        ),
        "up": lambda p: f"rank {p.rank} did not come",
    }
    error = CommunicationError(f"{call}: " + "; ".join(words[p.link](p) for p in peers[:8]))
    error.ranks = tuple(peer.rank for peer in peers)
    return error
