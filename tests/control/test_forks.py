"""Forked children: inert themselves, and they neither hide a death nor touch what is not theirs."""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
import warnings
from typing import TYPE_CHECKING

import pytest

from cupynccl_reduce import CommunicationError
from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.sockets import Server

if TYPE_CHECKING:
    from collections.abc import Callable

WALL_S = 60.0  # for what hangs


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child, which never comes back here; return its exit code, 0 if well.

    A child that hangs is ended by SIGALRM.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded", from Python 3.12 on
        child = os.fork()
    if not child:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WALL_S))
            work()
            code = 0
        except BaseException:  # noqa: BLE001  # it must not go on as a second pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def use_all(channel: Channel) -> None:
    """Call everything; only all_gather has to say that there is no channel."""
    channel.publish(b"x")
    channel.tell(b"x")
    assert [peer.link for peer in channel.peers()] == ["up"]
    assert channel.notices() == []
    with pytest.raises(CommunicationError, match="forked child"):
        channel.all_gather(b"")
    channel.abort()
    channel.close()
    with pytest.raises(CommunicationError, match="forked child"):
        channel.all_gather(b"")


def test_a_forked_child_has_no_channel() -> None:
    channel = Channel(0, 1, Server("127.0.0.1"))
    assert in_child(lambda: use_all(channel)) == 0
    assert channel.all_gather(b"x") == [b"x"]
    channel.close()


def test_what_a_forked_child_calls_never_waits_for_a_lock_that_nobody_holds_there() -> None:
    channel = Channel(0, 1, Server("127.0.0.1"))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:  # as the channel's own thread does, again and again
        with channel._service.changed:
            held.set()
            assert done.wait(WALL_S)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held.wait(WALL_S)
    code = in_child(lambda: use_all(channel))
    done.set()
    holder.join()
    assert code == 0
    assert channel.all_gather(b"x") == [b"x"]
    channel.close()


def ports() -> set[tuple[str, int]]:
    """Return the addresses at either end of this process's connections."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        try:
            end = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with end:
            found.add(end.getsockname())
    return found


def test_a_forked_child_closes_the_channel_s_connections_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server("127.0.0.1")
    address = server.invitation.host, server.invitation.port
    channel = Channel(0, 1, server)
    other = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(other.getsockname())
    one, two = socket.socketpair()
    mine = {other.getsockname(), client.getsockname()}
    assert mine | {address} <= ports()
    socket.setdefaulttimeout(5.0)  # which makes new socket objects non-blocking

    def look() -> None:
        assert socket.getdefaulttimeout() == 5.0
        socket.setdefaulttimeout(None)
        assert mine <= ports()
        assert address not in ports()
        one.sendall(b"x")

    try:
        assert in_child(look) == 0
    finally:
        socket.setdefaulttimeout(None)
    assert two.recv(1) == b"x"
    assert all(os.get_blocking(end.fileno()) for end in (other, client, one, two))
    for end in (other, client, one, two):
        end.close()
    channel.close()


def test_after_close_a_forked_child_closes_nothing() -> None:
    server = Server("127.0.0.1")
    address = server.invitation.host, server.invitation.port
    channel = Channel(0, 1, server)
    channel.close()
    with socket.create_server(address):  # another's, by now

        def look() -> None:
            assert address in ports()

        assert in_child(look) == 0
    assert [peer.link for peer in channel.peers()] == ["left"]
