"""The sending half of `transport.py`: messages to one receiver, in chunks, over several streams.

What belongs here: which chunk goes over which stream, what has arrived, and what is given up. What
does not: how a connection is made (`transport.py`), and what the other end does (`receiving.py`).
All of it runs in the loop's thread.

Messages are cut into chunks, and each stream takes the next one when its connection can carry more:
a stream that has lost packets and is slow for a while takes fewer. A chunk is sent again, over any
stream, if its connection breaks before the receiver has acknowledged it; nothing else is ever sent
twice.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from archipel.transport.frames import ACK_BYTES, Ack, Address, Chunk, Hello, Payload

SMALL_BYTES = 64 * 1024
"""For a message of at most so many bytes, no more than one stream is opened."""

CHUNK_BYTES, FAST_CHUNK_BYTES = 64 * 1024, 256 * 1024
"""Small, so that the last ones do not keep all waiting on a slow stream; on a fast link large
ones cost less computing.
"""

FAST_BYTES_PER_S = 40e6
"""Of a link from which on chunks are large."""

LOCAL_CHUNK_BYTES = 1024 * 1024

IDLE_S = 60.0
"""A stream that has nothing to do for so long is closed."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
"""Between two attempts to connect, the first and the longest."""

RATE_S = 5.0
"""Rates are of the last seconds, so many."""


@dataclass(eq=False, slots=True)
class Outgoing:
    """A message on its way.

    Attributes:
        cut_bytes: of it have been handed to a stream.
        arrived_bytes: the receiver has.
    """

    number: int
    payload: Payload
    cut_bytes: int = 0
    arrived_bytes: int = 0


@dataclass(eq=False, slots=True)
class Sent:
    """A chunk that a stream carries, and how much of it the receiver has."""

    message: Outgoing
    chunk: Chunk
    arrived_bytes: int = 0


@dataclass(eq=False)
class Queue:
    """Chunks that wait for a stream, those of one message after those of another.

    Attributes:
        messages: of which not all chunks have been taken.
        returned: chunks whose connection has broken.
    """

    messages: deque[Outgoing] = field(default_factory=deque)
    returned: deque[tuple[Outgoing, Chunk]] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.messages or self.returned)

    def take(self, limit: int) -> tuple[Outgoing, Chunk] | None:
        """The next chunk, of at most `limit` bytes; None: there is none."""
        if self.returned:
            return self.returned.popleft()
        if not self.messages:
            return None
        message = self.messages[0]
        total, offset = message.payload.size, message.cut_bytes
        chunk = Chunk(message.number, total, offset, min(limit, total - offset))
        message.cut_bytes += chunk.length
        if message.cut_bytes == total:
            self.messages.popleft()
        return message, chunk


class Rate:
    """How many bytes a second have arrived lately."""

    def __init__(self, now_s: float) -> None:
        self.total = 0
        self.samples: deque[tuple[float, int]] = deque([(now_s, 0)])

    def add(self, size: int, now_s: float) -> None:
        self.total += size
        if now_s - self.samples[-1][0] >= RATE_S / 20:
            self.samples.append((now_s, self.total))
            self._forget(now_s)

    def bytes_per_s(self, now_s: float) -> float:
        self._forget(now_s)
        then_s, then = self.samples[0]
        return (self.total - then) / max(now_s - then_s, RATE_S / 20)

    def _forget(self, now_s: float) -> None:
        while len(self.samples) > 1 and self.samples[0][0] < now_s - RATE_S:
            self.samples.popleft()


class SendingStream(asyncio.Protocol):
    """One connection to the receiver.

    Args:
        lane: whose chunks it carries.
        gone: told when the connection is no more.
    """

    transport: asyncio.Transport

    def __init__(self, lane: Lane, gone: Callable[[asyncio.Transport], None]) -> None:
        self.lane, self.gone = lane, gone
        self.unanswered: dict[tuple[int, int], Sent] = {}
        self.answers = b""
        self.stirred = asyncio.Event()  # something may have changed for `carry`
        self.paused = self.lost = self.answered = False
        self.plain: socket.socket | None = None

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        # Chunks wait in the queue, where any stream can take them, not in this one's buffer. With
        # 0, Python's ssl would wait for an answer after each chunk.
        transport.set_write_buffer_limits(high=1, low=0)
        transport.write(self.lane.hello().pack())

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.stirred.set()

    def data_received(self, data: bytes) -> None:
        self.answers += data
        whole = len(self.answers) // ACK_BYTES * ACK_BYTES
        for start in range(0, whole, ACK_BYTES):
            self._hear(Ack.unpack(self.answers[start : start + ACK_BYTES]))
        self.answers = self.answers[whole:]

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.stirred.set()
        self.gone(self.transport)
        self.lane.lose(self, error)

    # Chunks

    async def carry(self) -> None:
        """Carry chunks until the connection is lost, or there have been none for long."""
        self.lane.carriers.add(self)
        if self.lane.local:
            # For chunks, which asyncio's transports would copy once more.
            self.plain = self.transport.get_extra_info("socket").dup()
        try:
            while not self.lost:
                self.stirred.clear()
                if self.paused:
                    await self.stirred.wait()
                elif taken := self.lane.queue.take(self._limit()):
                    await self._send(*taken)
                else:
                    try:
                        async with asyncio.timeout(IDLE_S):
                            await self.stirred.wait()
                    except TimeoutError:
                        if not self.unanswered:
                            return
        finally:
            self.lane.carriers.discard(self)
            self.transport.abort()
            if self.plain is not None:
                self.plain.close()

    def _limit(self) -> int:
        """Most bytes of a chunk."""
        if self.lane.local:
            return LOCAL_CHUNK_BYTES
        fast = self.lane.rate.bytes_per_s(self.lane.now()) >= FAST_BYTES_PER_S
        return FAST_CHUNK_BYTES if fast else CHUNK_BYTES

    async def _send(self, message: Outgoing, chunk: Chunk) -> None:
        self.unanswered[chunk.number, chunk.offset] = Sent(message, chunk)
        pieces = message.payload.cut(chunk.offset, chunk.offset + chunk.length)
        if self.plain is not None:
            for piece in (memoryview(chunk.pack()), *pieces):
                await self.lane.loop.sock_sendall(self.plain, piece)
        else:
            self.transport.writelines([chunk.pack(), *pieces])
            await asyncio.sleep(0)  # other streams have their turn

    def _hear(self, ack: Ack) -> None:
        key = (ack.number, ack.offset)
        sent = self.unanswered.get(key)
        if sent is None:
            return  # of a message that has been given up
        self.answered = True
        news, sent.arrived_bytes = ack.received - sent.arrived_bytes, ack.received
        if sent.arrived_bytes == sent.chunk.length:
            del self.unanswered[key]
        self.lane.arrived(sent.message, news)


Open = Callable[["Lane"], Awaitable[SendingStream]]


class Lane:
    """All that goes to one receiver.

    Args:
        address: the receiver's.
        me: the sender's own.
        open_stream: connects.
        streams: for large messages, at most.
        loop: that all of it runs in.
        local: the receiver is on this machine, and nothing is encrypted.

    Attributes:
        messages: that have not wholly arrived, in the order of sending.
        carriers: streams that carry chunks now.
        workers: tasks; each opens a stream and carries chunks over it.
        number: of the lane; another one whenever all that was on the way has been given up.
        moved_s: when something has arrived last, or there was nothing on the way.
        trouble: what went wrong with a connection last.
    """

    def __init__(
        self,
        address: Address,
        me: Address,
        open_stream: Open,
        streams: int,
        loop: asyncio.AbstractEventLoop,
        *,
        local: bool,
    ) -> None:
        self.address, self.me, self.life = address, me, secrets.token_bytes(16)
        self.local = local
        self.open_stream, self.streams, self.loop = open_stream, streams, loop
        self.now = loop.time
        self.number = 0
        self.sent = 0  # messages, in this lane
        self.messages: dict[int, Outgoing] = {}
        self.queue = Queue()
        self.carriers: set[SendingStream] = set()
        self.workers: set[asyncio.Task[None]] = set()
        self.rate, self.moved_s = Rate(self.now()), self.now()
        self.trouble = "it has not answered"

    def hello(self) -> Hello:
        return Hello(self.life, self.number, self.me)

    def send(self, payload: Payload) -> None:
        """Put a message on its way."""
        if not self.messages:
            self.moved_s = self.now()
        message = self.messages[self.sent] = Outgoing(self.sent, payload)
        self.sent += 1
        self.queue.messages.append(message)
        self._stir(1 if payload.size <= SMALL_BYTES else self.streams)

    def arrived(self, message: Outgoing, size: int) -> None:
        """So much more of a message is there."""
        message.arrived_bytes += size
        self.moved_s = self.now()
        self.rate.add(size, self.moved_s)
        if message.arrived_bytes == message.payload.size:
            self.messages.pop(message.number, None)

    def lose(self, stream: SendingStream, error: Exception | None) -> None:
        """A connection is gone, and what it carried has to go again."""
        if error is not None:
            self.trouble = str(error) or type(error).__name__
        if not stream.unanswered:
            return
        for sent in reversed(stream.unanswered.values()):
            sent.message.arrived_bytes -= sent.arrived_bytes
            self.queue.returned.appendleft((sent.message, sent.chunk))
        stream.unanswered.clear()
        self._stir(1)

    def cut(self) -> None:
        """End all streams at once. What is on its way waits until there are others."""
        for stream in list(self.carriers):
            stream.transport.abort()

    def give_up(self) -> int:
        """Forget all that is on the way, and begin anew; how many messages that were."""
        lost = len(self.messages)
        self.number += 1
        self.sent = 0
        self.messages.clear()
        self.close()
        return lost

    def close(self) -> None:
        """End all streams, and what they carry."""
        self.queue.messages.clear()
        self.queue.returned.clear()
        for stream in self.carriers:
            stream.unanswered.clear()
        for worker in self.workers:
            worker.cancel()
        self.workers.clear()

    def _stir(self, workers: int) -> None:
        """There is something to carry, for so many streams at least."""
        for stream in self.carriers:
            stream.stirred.set()
        while len(self.workers) < workers:
            worker = self.loop.create_task(self._work())
            self.workers.add(worker)
            worker.add_done_callback(self.workers.discard)

    async def _work(self) -> None:
        """Carry what is queued over one stream, and over another one if that breaks."""
        wait_s = FIRST_WAIT_S
        while self.queue:
            try:
                stream = await self.open_stream(self)
                await stream.carry()
            except OSError as error:  # TLS's errors and time-outs are some, too
                self.trouble = str(error) or type(error).__name__
            else:
                # Whoever has been refused is told so only after it has been connected.
                wait_s = FIRST_WAIT_S if stream.answered else wait_s
            if self.queue:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
