"""The receiving half of `transport.py`: chunks from one sender become whole messages.

What belongs here: what has come of each message, and which are delivered. What does not: who is
let in (`transport.py`), and what the other end does (`sending.py`). All of it runs in the loop's
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from archipel.transport.frames import (
    CHUNK_BYTES,
    HELLO_BYTES,
    LONGEST_CHUNK,
    Ack,
    Address,
    Chunk,
    FrameError,
    Hello,
    parts_of,
    space,
)

ANSWER_S = 0.5
"""A chunk that takes longer is acknowledged in part, so that the sender sees that it moves."""

Deliver = Callable[[Address, list[memoryview]], None]


@dataclass(eq=False, slots=True)
class Coming:
    """A message of which something has come.

    Attributes:
        memory: for all of it.
        done: offsets of the chunks that are there.
        writers: who writes to a chunk just now, by its offset.
    """

    memory: memoryview
    left_bytes: int
    done: set[int] = field(default_factory=set)
    writers: dict[int, ReceivingStream] = field(default_factory=dict)


@dataclass(eq=False)
class Inlet:
    """All that comes from one sender, to one of the names of this host.

    Attributes:
        hello: what it has said last.
        deliver: takes the parts of each message, once and in order.
        streams: its connections.
        coming: messages of which something has come, by number.
        early: whole ones that wait for those before them, by number.
        expected: the first number that has not been delivered.
        received_bytes, messages: delivered so far.
        quiet_s: since when it has had no connection; None: it has one.
    """

    hello: Hello
    deliver: Deliver
    streams: set[ReceivingStream] = field(default_factory=set)
    coming: dict[int, Coming] = field(default_factory=dict)
    early: dict[int, list[memoryview]] = field(default_factory=dict)
    expected: int = 0
    received_bytes: int = 0
    messages: int = 0
    quiet_s: float | None = None

    def admit(self, stream: ReceivingStream, hello: Hello) -> None:
        """Another stream has been opened.

        Raises:
            FrameError: by what the sender has given up.
        """
        if hello.lane < self.hello.lane:
            raise FrameError(f"a stream of lane {hello.lane}, which has been given up")
        if hello.lane > self.hello.lane:
            self.forget()
            self.hello, self.expected = hello, 0
        self.streams.add(stream)
        self.quiet_s = None

    def forget(self) -> None:
        """Whatever is not whole will not become so."""
        for stream in list(self.streams):
            stream.transport.abort()
        self.streams.clear()
        self.coming.clear()
        self.early.clear()

    def begin(self, chunk: Chunk, stream: ReceivingStream) -> memoryview | None:
        """Where a chunk's bytes belong; None: they are there already."""
        if chunk.number < self.expected or chunk.number in self.early:
            return None
        coming = self.coming.get(chunk.number)
        if coming is None:
            coming = self.coming[chunk.number] = Coming(space(chunk.total), chunk.total)
        if chunk.total != len(coming.memory):
            raise FrameError(f"{chunk} of a message that has {len(coming.memory)} bytes")
        if chunk.offset in coming.done:
            return None
        earlier = coming.writers.get(chunk.offset)
        if earlier is not None:  # the sender knows already that that connection is lost
            earlier.transport.abort()
        coming.writers[chunk.offset] = stream
        return coming.memory[chunk.offset : chunk.offset + chunk.length]

    def end(self, chunk: Chunk, stream: ReceivingStream) -> None:
        """A chunk is there; deliver what is whole now."""
        coming = self.coming.get(chunk.number)
        if coming is None or coming.writers.get(chunk.offset) is not stream:
            return
        del coming.writers[chunk.offset]
        coming.done.add(chunk.offset)
        coming.left_bytes -= chunk.length
        if coming.left_bytes:
            return
        parts = parts_of(coming.memory.toreadonly())
        del self.coming[chunk.number]
        self.early[chunk.number] = parts
        while (number := self.expected) in self.early:
            self.expected += 1
            self._deliver(self.early.pop(number))

    def _deliver(self, parts: list[memoryview]) -> None:
        self.received_bytes += sum(part.nbytes for part in parts)
        self.messages += 1
        try:
            self.deliver(self.hello.address, parts)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"a message from {self.hello.address}", "exception": error}
            )

    def lose(self, stream: ReceivingStream, now_s: float) -> None:
        """A connection is gone, and the chunk that it was in has to come again."""
        self.streams.discard(stream)
        for coming in self.coming.values():
            for offset in [at for at, writer in coming.writers.items() if writer is stream]:
                del coming.writers[offset]
        if not self.streams:
            self.quiet_s = now_s


class ReceivingStream(asyncio.BufferedProtocol):
    """One connection from a sender that has been let in. Bytes of a chunk are received where they
    belong.

    Args:
        find: the inlet of whoever says hello.
        begun: told when it is there.
        gone: told when it is no more.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        find: Callable[[Hello], Inlet],
        begun: Callable[[asyncio.Transport], None],
        gone: Callable[[asyncio.Transport], None],
    ) -> None:
        self.find, self.begun, self.gone = find, begun, gone
        self.inlet: Inlet | None = None
        self.chunk: Chunk | None = None
        self.head = memoryview(bytearray(max(HELLO_BYTES, CHUNK_BYTES)))
        self.waste = memoryview(b"")  # for what is there already
        self.now = asyncio.get_running_loop().time
        self.answered_s = 0.0
        self._expect(self.head[:HELLO_BYTES])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.begun(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.target[self.filled :]

    def buffer_updated(self, size: int) -> None:
        self.filled += size
        if self.transport.is_closing():
            return
        try:
            if self.filled == len(self.target):
                self._take()
            elif self.chunk is not None and self.now() - self.answered_s >= ANSWER_S:
                self._answer(self.chunk)
        except FrameError:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self.inlet is not None:
            self.inlet.lose(self, self.now())
        self.gone(self.transport)

    def _expect(self, target: memoryview) -> None:
        self.target, self.filled = target, 0

    def _take(self) -> None:
        """What was expected is there."""
        if self.inlet is None:
            hello = Hello.unpack(self.target)
            inlet = self.find(hello)
            inlet.admit(self, hello)
            self.inlet = inlet
        elif self.chunk is None:
            chunk = Chunk.unpack(self.target)
            target = self.inlet.begin(chunk, self)
            if target is None:
                if not self.waste:
                    self.waste = memoryview(bytearray(LONGEST_CHUNK))
                target = self.waste[: chunk.length]
            self.chunk, self.answered_s = chunk, self.now()
            self._expect(target)
            return
        else:
            chunk, self.chunk = self.chunk, None
            self._answer(chunk)
            self.inlet.end(chunk, self)
        self._expect(self.head[:CHUNK_BYTES])

    def _answer(self, chunk: Chunk) -> None:
        self.answered_s = self.now()
        ack = Ack(chunk.number, chunk.offset, self.filled)
        self.transport.write(ack.pack())
