"""Messages from host to host, over links that may be slow, far, and cut now and then.

What belongs here: who is let in, connections, deadlines, and the thread that all of it runs in.
What does not: what the messages mean, and who sends them; the two ends of a stream (`sending.py`,
`receiving.py`); what is said on it (`frames.py`); keys (`keys.py`); what the kernel is told of a
connection (`sockets.py`).

A message arrives whole, once, and in the order of sending to that receiver. One that breaks off
goes on where it stopped. If nothing at all arrives for `deadline_s`, everything that was on its way
to that receiver is given up as a whole, and `failed` is told (whether the last messages have been
delivered is then unknown, as it always is). A transfer that moves is never given up.

Between machines everything is TLS with the run's keys, on one port a host. Within a machine, a Unix
socket in the kernel's abstract namespace, which belongs to a network namespace as ports do, carries
the same frames unencrypted between processes of one user. Only Linux has those; elsewhere TLS goes
over loopback.

    keys = Keys.make()  # once a run
    transport = Transport(keys, "10.0.0.1", deliver=take)
    transport.send(Address("10.0.0.2", 7000), [head, vector])
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from archipel.transport import sockets
from archipel.transport.frames import Address, Hello, Payload
from archipel.transport.keys import NAME, Keys
from archipel.transport.receiving import Deliver, Inlet, ReceivingStream
from archipel.transport.sending import Lane, SendingStream

STREAMS = 8
"""To one receiver on another machine. Each makes up for what a loss costs another."""

CONNECT_S = 10.0
"""Whoever has not shown the keys by then is dropped, and so is a connection that is not there."""

MOST_STRANGERS = 256
"""Connections that have not shown the keys yet; one more, and the oldest is dropped."""

Failed = Callable[[Address, str], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Transfer:
    """A message on its way.

    Attributes:
        to: whom it goes to.
        done_bytes, total_bytes: of it are there, and it has.
        bytes_per_s: of all that goes there, over the last seconds.
        left_s: until it is there, at that rate, behind those before it; None: nothing moves.
    """

    to: Address
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    left_s: float | None


@dataclass(frozen=True)
class Traffic:
    """What has crossed so far.

    Attributes:
        sent_bytes: of messages, which the receivers have.
        received_messages, received_bytes: delivered.
        wire_bytes: that this host has put on links between machines, with TLS, headers of packets,
            acknowledgements, and all that was sent again; 0 where the kernel does not say.
        refused: connections of strangers.
    """

    sent_bytes: int
    received_messages: int
    received_bytes: int
    wire_bytes: int
    refused: int


class Transport:
    """One host's end.

    Args:
        keys: the run's.
        host: where other hosts reach this one: a name or an address of this machine.
        deliver: takes each message that comes: the sender's address, and the parts, read-only. It
            is called in the transport's thread, and must be quick.
        failed: told that all that was on its way to a host has been given up, and why.
        ports: one of them is listened on; empty: any that is free.
        streams: to each receiver on another machine.
        deadline_s: longest time without anything that arrives.
        congestion: TCP's congestion control to far hosts, where the kernel has it and lets its
            users choose it; else the machine's own. Why BBR: see docs/decisions.md.

    Attributes:
        address: where others reach this host.
        closed: `close` has been called.

    Raises:
        UserError: none of the ports is free, or the host's name is not this machine's.
    """

    def __init__(
        self,
        keys: Keys,
        host: str,
        *,
        deliver: Deliver,
        failed: Failed = lambda address, reason: None,
        ports: Sequence[int] = (),
        streams: int = STREAMS,
        deadline_s: float = 60.0,
        congestion: str = "bbr",
    ) -> None:
        self.deliver, self.failed = deliver, failed
        self.streams, self.deadline_s, self.congestion = streams, deadline_s, congestion
        self.run = hashlib.sha256(keys.certificate).hexdigest()
        self.for_strangers, self.for_peers = keys.context(server=True), keys.context(server=False)
        self.lanes: dict[Address, Lane] = {}
        self.blocked: frozenset[Address] = frozenset()
        self.inlets: dict[bytes, Inlet] = {}
        self.strangers: dict[asyncio.Task[bool], None] = {}  # the oldest first
        self.open: dict[asyncio.Transport, int] = {}  # and what each had sent at the last look
        self.refused = self.closed_wire_bytes = 0
        self.closed = threading.Event()
        listener = sockets.listen(host, ports, MOST_STRANGERS)
        self.address = Address(host, listener.getsockname()[1])
        self.listeners = [listener, *sockets.listen_locally(self._local_name(self.address))]
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self.thread.start()
        try:
            self._ask(self._begin())
        except BaseException:
            self.close()
            raise

    # What other threads ask

    def send(self, to: Address, parts: Sequence[bytes | memoryview | np.ndarray]) -> None:
        """Put a message on its way. Nothing may write to its parts until it has arrived.

        Args:
            to: the receiver's `address`.
            parts: they come out as they are; contiguous arrays are not copied.
        """
        if self.closed.is_set():
            raise RuntimeError(f"the transport of {self.address} is closed")
        payload = Payload(parts)
        self.loop.call_soon_threadsafe(self._send, to, payload)

    def forget(self, to: Address) -> None:
        """Give up all that is on its way to a host that is lost; `failed` is not told."""
        self.loop.call_soon_threadsafe(self._forget, to)

    def block(self, addresses: frozenset[Address]) -> None:
        """From now on nothing gets to these hosts, on purpose. What is on its way waits."""
        self.loop.call_soon_threadsafe(self._block, addresses)

    def transfers(self) -> list[Transfer]:
        """The messages on their way, those to each receiver in the order of sending."""
        return self._ask(self._transfers())

    def traffic(self) -> Traffic:
        """What has crossed so far."""
        return self._ask(self._traffic())

    def close(self, wait_s: float = 0.0) -> None:
        """End all; first wait at most so long for what is on its way. Again: nothing happens."""
        if self.closed.is_set():
            return
        if wait_s:
            self._ask(self._drain(wait_s))
        self.closed.set()
        with contextlib.suppress(RuntimeError):  # it did not begin
            self._ask(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        for listener in self.listeners:
            listener.close()

    def _ask(self, question: Coroutine[Any, Any, Result]) -> Result:
        assert threading.current_thread() is not self.thread, "deliver and failed must not wait"
        return asyncio.run_coroutine_threadsafe(question, self.loop).result()

    # In the loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    async def _begin(self) -> None:
        for listener in self.listeners:
            self._listen(listener)
        self.looking = self.loop.create_task(self._look())  # kept: asyncio keeps no task

    async def _end(self) -> None:
        for listener in self.listeners:
            self.loop.remove_reader(listener)
        for lane in self.lanes.values():
            lane.close()
        for transport in list(self.open):
            transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # those connections are closed
        while self.open:  # those that have been aborted say so
            await asyncio.sleep(0)

    async def _drain(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while any(lane.messages for lane in self.lanes.values()):
                    await asyncio.sleep(0.01)

    def _send(self, to: Address, payload: Payload) -> None:
        lane = self.lanes.get(to)
        if lane is None:
            local = sockets.listens_locally(self._local_name(to))
            streams = 1 if local else self.streams
            lane = Lane(to, self.address, self._connect, streams, self.loop, local=local)
            self.lanes[to] = lane
        lane.send(payload)

    def _forget(self, to: Address) -> None:
        if lane := self.lanes.get(to):
            lane.give_up()

    def _block(self, addresses: frozenset[Address]) -> None:
        self.blocked = addresses
        for address in addresses:
            if lane := self.lanes.get(address):
                lane.cut()

    async def _look(self) -> None:
        """Give up what has not moved for too long, at both ends."""
        period_s, looked_s = min(1.0, self.deadline_s / 8), self.loop.time()
        while True:
            await asyncio.sleep(period_s)
            now_s = self.loop.time()
            asleep_s, looked_s = now_s - looked_s - period_s, now_s
            for lane in self.lanes.values():
                if asleep_s > period_s:  # this process stood still, which says nothing of others
                    lane.moved_s = min(now_s, lane.moved_s + asleep_s)
                still_s = now_s - lane.moved_s
                if lane.messages and still_s > self.deadline_s:
                    lost = lane.give_up()
                    self.failed(
                        lane.address,
                        f"{lane.address} has taken nothing for {still_s:.0f} s (deadline_s = "
                        f"{self.deadline_s:g}), and {lost} messages to it are given up; "
                        f"the last trouble: {lane.trouble}",
                    )
            self._count()
            for inlet in self.inlets.values():
                # The sender has given up before: it began to wait when its last answer came.
                if inlet.quiet_s is not None and now_s - inlet.quiet_s > 2 * self.deadline_s:
                    inlet.forget()

    async def _transfers(self) -> list[Transfer]:
        return _transfers(self.lanes.values(), self.loop.time())

    async def _traffic(self) -> Traffic:
        self._count()
        inlets = self.inlets.values()
        return Traffic(
            sent_bytes=sum(lane.rate.total for lane in self.lanes.values()),
            received_messages=sum(inlet.messages for inlet in inlets),
            received_bytes=sum(inlet.received_bytes for inlet in inlets),
            wire_bytes=self.closed_wire_bytes + sum(self.open.values()),
            refused=self.refused,
        )

    def _local_name(self, address: Address) -> str:
        """Of the Unix socket on which a host of this run listens."""
        return f"\0archipel/{self.run[:32]}/{address}"

    # Streams that this host opens

    async def _connect(self, lane: Lane) -> SendingStream:
        """Open a stream.

        Raises:
            OSError: it cannot be opened.
        """
        if lane.address in self.blocked:
            raise ConnectionError("the link is cut on purpose")
        begin = partial(SendingStream, lane, self._gone)
        async with asyncio.timeout(CONNECT_S):
            if lane.local:
                connected = sockets.connect_locally(self._local_name(lane.address))
                _, stream = await self.loop.create_unix_connection(begin, sock=connected)
            else:
                _, stream = await self.loop.create_connection(
                    begin, *lane.address, ssl=self.for_peers, server_hostname=NAME
                )
        self._prepare(stream.transport)
        return stream

    def _prepare(self, transport: asyncio.Transport) -> None:
        """A connection is there."""
        self.open[transport] = 0
        sockets.prepare(transport.get_extra_info("socket"), self.congestion)

    def _gone(self, transport: asyncio.Transport) -> None:
        """A connection is no more. What it has sent since the last look is not counted."""
        self.closed_wire_bytes += self.open.pop(transport, 0)

    def _count(self) -> None:
        """Look at what all connections have sent."""
        for transport in self.open:
            if known := sockets.info(transport.get_extra_info("socket")):
                self.open[transport] = known.wire_bytes

    # Streams that others open

    # Not by `sock_accept` or a server of asyncio's: both lose a connection, and leave it open, if
    # they are ended just when it has been accepted.

    def _listen(self, listener: socket.socket) -> None:
        self.loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        except OSError:  # too many open files, for example
            self.loop.remove_reader(listener)
            self.loop.call_later(1.0, self._listen, listener)
            return
        connected.setblocking(False)
        if len(self.strangers) >= MOST_STRANGERS:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.cancel()
        task = self.loop.create_task(self._admit(connected))
        self.strangers[task] = None
        task.add_done_callback(partial(self._decided, connected))

    def _decided(self, connected: socket.socket, task: asyncio.Task[bool]) -> None:
        """A stranger has been let in, or not."""
        self.strangers.pop(task, None)
        if task.cancelled() or not task.result():
            connected.close()
            self.refused += 1

    async def _admit(self, connected: socket.socket) -> bool:
        """Let in whoever has the keys, or is a process of this user on this machine; whether it
        is so.
        """
        if sockets.is_local(connected):
            if not sockets.is_same_user(connected):
                return False
            await self.loop.connect_accepted_socket(self._receiving_stream, connected)
            return True
        try:
            await self.loop.connect_accepted_socket(
                self._receiving_stream,
                connected,
                ssl=self.for_strangers,
                ssl_handshake_timeout=CONNECT_S,
            )
        except OSError:  # TLS's errors and time-outs are some, too
            return False
        return True

    def _receiving_stream(self) -> ReceivingStream:
        return ReceivingStream(self._inlet, self._prepare, self._gone)

    def _inlet(self, hello: Hello) -> Inlet:
        return self.inlets.setdefault(hello.life, Inlet(hello, self.deliver))


def _transfers(lanes: Iterable[Lane], now_s: float) -> list[Transfer]:
    """All messages on their way."""
    found = []
    for lane in lanes:
        rate, before = lane.rate.bytes_per_s(now_s), 0
        for message in lane.messages.values():
            total, done = message.payload.size, message.arrived_bytes
            before += total - done
            left_s = before / rate if rate else None
            found.append(Transfer(lane.address, done, total, rate, left_s))
    return found
