"""What the kernel is told and asked about a connection of `transport.py`.

What belongs here: options of sockets, and what Linux says of them. Elsewhere less is known, and
nothing breaks. What does not: what is sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from asyncio.trsock import TransportSocket
from collections.abc import Sequence
from typing import NamedTuple

from archipel.errors import UserError

SILENCE_S = 15
"""A connection on which TCP gets no answer for so long is broken: another one is tried."""

UNSENT_BYTES = 32 * 1024
"""What the kernel takes beyond what it can send now: little, so that chunks wait in the queue."""

HEADERS_BYTES = 52
"""Of each packet: IP's, and TCP's with time stamps."""

FAR_S = 0.01
"""A round trip from which on a receiver is far. For near ones the machine's own congestion
control is better than BBR, which through short queues leaves some of the rate unused.
"""


HAS_LOCAL = sys.platform == "linux"
"""Whether Unix sockets have an abstract namespace here."""


class Info(NamedTuple):
    """What TCP knows of a connection.

    Attributes:
        round_trip_s: the shortest so far.
        wire_bytes: sent, with headers, acknowledgements, and all that was sent again.
    """

    round_trip_s: float
    wire_bytes: int


def listen(host: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """A socket that listens on one of the ports; on any, if there are none.

    Raises:
        UserError: it cannot.
    """
    trouble = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports or [0]:
        try:
            listener = socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as error:
            trouble = error.strerror or str(error)
            continue
        listener.setblocking(False)
        return listener
    where = f"ports {ports[0]} to {ports[-1]}" if ports else "a free port"
    raise UserError(f"cannot listen on {where} of {host or 'any interface'}: {trouble}")


def listen_locally(name: str) -> list[socket.socket]:
    """A Unix socket that listens under a name of Linux's abstract namespace; elsewhere none."""
    if not HAS_LOCAL:
        return []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    listener.setblocking(False)
    return [listener]


def listens_locally(name: str) -> bool:
    """Whether somebody listens under that name on this machine."""
    if not HAS_LOCAL:
        return False
    with socket.socket(socket.AF_UNIX) as tried:
        tried.setblocking(False)
        return tried.connect_ex(name) in (0, errno.EAGAIN)  # EAGAIN: it has much to accept


def connect_locally(name: str) -> socket.socket:
    """A connection to whoever listens under that name.

    Raises:
        OSError: there is none, or it is another user's.
    """
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.setblocking(False)
        connected.connect(name)
        if not is_same_user(connected):
            raise PermissionError(f"another user listens as {name.rpartition('/')[2]} here")
    except OSError:
        connected.close()
        raise
    return connected


def prepare(connected: TransportSocket, congestion: str) -> None:
    """Set a connection's options.

    Args:
        connected: over TCP; others have none.
        congestion: TCP's congestion control if the other end is far and the kernel has it.
    """
    if is_local(connected):
        return
    for level, option, value in _OPTIONS:
        connected.setsockopt(level, option, value)
    known = info(connected)
    if known is not None and known.round_trip_s >= FAR_S:
        with contextlib.suppress(OSError):  # the kernel has none of that name
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def is_local(connected: socket.socket | TransportSocket) -> bool:
    """Whether it is a Unix socket."""
    return HAS_LOCAL and connected.family == socket.AF_UNIX


def is_same_user(connected: socket.socket | TransportSocket) -> bool:
    """Whether the process at the other end of a Unix socket is one of this user's."""
    given = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(given)[1] == os.getuid())


def info(connected: TransportSocket | None) -> Info | None:
    """What TCP knows of a connection; None: it is closed, or the kernel does not say."""
    if sys.platform != "linux" or connected is None or is_local(connected):
        return None
    try:
        told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return None
    if len(told) < _INFO.size:  # an old kernel
        return None
    packets, shortest_us, sent_bytes = _INFO.unpack(told)
    return Info(1e-6 * shortest_us, sent_bytes + HEADERS_BYTES * packets)


_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_INFO = struct.Struct("=136xI8xI48xQ")  # of tcp_info: tcpi_segs_out, tcpi_min_rtt, tcpi_bytes_sent

_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in {
            "TCP_KEEPIDLE": SILENCE_S,
            "TCP_KEEPINTVL": 5,
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": 1000 * SILENCE_S,
            "TCP_NOTSENT_LOWAT": UNSENT_BYTES,
        }.items()
        if hasattr(socket, name)
    ),
]
