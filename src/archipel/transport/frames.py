"""What is said on a stream of `transport.py`, byte by byte.

What belongs here: the layout of frames and of a message's bytes. What does not: sockets, and when
something is sent.

A sender opens streams to a receiver and says `Hello` once on each; then it sends chunks, each a
`Chunk` and as many bytes as that says. The receiver answers with an `Ack` for each chunk, and for a
part of one if it takes long. Any chunk of a message may come on any stream, in any order. There is
nothing else.

The bytes of a message are a table of its parts' sizes and then the parts, each at a multiple of
`ALIGNMENT`, so that a vector can be used where it has arrived.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MAGIC = b"archipl1"
ALIGNMENT = 64
LONGEST_CHUNK = 2**20
MOST_PARTS = 2**16

_HELLO = struct.Struct("!8s16sQ255pH")
_CHUNK = struct.Struct("!QQQI")
_ACK = struct.Struct("!QQI")
HELLO_BYTES, CHUNK_BYTES, ACK_BYTES = _HELLO.size, _CHUNK.size, _ACK.size


class FrameError(Exception):
    """What has come is no frame."""


class Address(NamedTuple):
    """Where a host is reached."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Hello:
    """Who opens a stream.

    Attributes:
        life: random, another one for each sender and each address that it sends to.
        lane: how many times it has given up all messages to there.
        address: where the sender is reached itself.
    """

    life: bytes
    lane: int
    address: Address

    def pack(self) -> bytes:
        host = self.address.host.encode()
        return _HELLO.pack(MAGIC, self.life, self.lane, host, self.address.port)

    @staticmethod
    def unpack(data: bytes | memoryview) -> Hello:
        magic, life, lane, host, port = _HELLO.unpack(data)
        if magic != MAGIC:
            raise FrameError(f"a stream begins with {magic!r}, not with {MAGIC!r}")
        return Hello(life, lane, Address(host.decode(), port))


class Chunk(NamedTuple):
    """A part of a message, which follows.

    Attributes:
        number: which message.
        total: bytes of the whole message.
        offset, length: which of them follow.
    """

    number: int
    total: int
    offset: int
    length: int

    def pack(self) -> bytes:
        return _CHUNK.pack(*self)

    @staticmethod
    def unpack(data: bytes | memoryview) -> Chunk:
        chunk = Chunk._make(_CHUNK.unpack(data))
        if not 0 < chunk.length <= LONGEST_CHUNK or chunk.offset + chunk.length > chunk.total:
            raise FrameError(f"{chunk} is none: at most {LONGEST_CHUNK} bytes, inside its message")
        return chunk


class Ack(NamedTuple):
    """So many bytes of the chunk have come."""

    number: int
    offset: int
    received: int

    def pack(self) -> bytes:
        return _ACK.pack(*self)

    @staticmethod
    def unpack(data: bytes | memoryview) -> Ack:
        return Ack._make(_ACK.unpack(data))


class Payload:
    """The bytes of a message, without a copy of its parts.

    Args:
        parts: anything that has a contiguous buffer: bytes, NumPy arrays.
    """

    def __init__(self, parts: Sequence[bytes | memoryview | np.ndarray]) -> None:
        if len(parts) > MOST_PARTS:
            raise ValueError(f"a message of {len(parts)} parts; at most {MOST_PARTS} are allowed")
        views = [_view(part) for part in parts]
        table = struct.pack(f"!I{len(views)}Q", len(views), *(view.nbytes for view in views))
        self.starts: list[int] = []
        self.pieces: list[memoryview] = []
        self.size = 0
        self._add(memoryview(table))
        for view in views:
            if view.nbytes:  # else there is nothing to cast
                self._add(view.cast("B"))

    def _add(self, piece: memoryview) -> None:
        self.starts.append(self.size)
        self.pieces.append(piece)
        self.size += piece.nbytes
        if gap := -self.size % ALIGNMENT:
            self.starts.append(self.size)
            self.pieces.append(memoryview(bytes(gap)))
            self.size += gap

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """Bytes `start` to `stop`, in pieces."""
        cut, index = [], bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            piece, offset = self.pieces[index], start - self.starts[index]
            cut.append(piece[offset : offset + stop - start])
            start, index = self.starts[index] + piece.nbytes, index + 1
        return cut


def _view(part: bytes | memoryview | np.ndarray) -> memoryview:
    return part.data if isinstance(part, np.ndarray) else memoryview(part)


def space(size: int) -> memoryview:
    """Memory for a message of so many bytes, where its parts are aligned."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory.data[start : start + size]


def parts_of(data: memoryview) -> list[memoryview]:
    """The parts of a message that has come, where they lie.

    Raises:
        FrameError: its table is none.
    """
    try:
        (count,) = struct.unpack_from("!I", data)
        sizes = struct.unpack_from(f"!{min(count, MOST_PARTS + 1)}Q", data, 4)
    except struct.error as error:
        raise FrameError(f"a message whose table of parts is cut off: {error}") from None
    position, parts = 4 + 8 * count, []
    for size in sizes:
        position += -position % ALIGNMENT if size else 0
        parts.append(data[position : position + size])
        position += size
    if position + -position % ALIGNMENT != len(data):
        raise FrameError(f"a message of {len(data)} bytes whose parts have {position}")
    return parts
