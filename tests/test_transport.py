"""The transport on loopback: what arrives, what is refused, what is given up."""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
import queue
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel.errors import UserError
from archipel.transport import frames, sending, sockets, transport
from archipel.transport.frames import Address, Chunk, FrameError, Hello, Payload
from archipel.transport.keys import Keys
from archipel.transport.transport import Transport

KEYS = Keys.make()
WAIT_S = 20.0
LARGE = np.arange(1_000_000, dtype=np.float32)  # 4 MB


class Host:
    """A transport, and what has come to it."""

    def __init__(self, keys: Keys = KEYS, **options: Any) -> None:
        self.came: queue.Queue[tuple[Address, list[memoryview]]] = queue.Queue()
        self.failures: queue.Queue[tuple[Address, str]] = queue.Queue()
        self.transport = Transport(
            keys,
            "127.0.0.1",
            deliver=lambda *mail: self.came.put(mail),
            failed=lambda *failure: self.failures.put(failure),
            **options,
        )
        self.address, self.send = self.transport.address, self.transport.send

    def next(self) -> list[memoryview]:
        return self.came.get(timeout=WAIT_S)[1]


class Proxy:
    """A way to a port. It breaks each connection in turn after so many bytes as `cuts` says, and
    carries at most so many bytes a second.
    """

    def __init__(self, to: Address, cuts: Iterator[int] | None = None, rate: float = 0.0) -> None:
        self.to, self.cuts, self.rate = to, cuts or itertools.repeat(2**60), rate
        self.connections = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        start = asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.server = asyncio.run_coroutine_threadsafe(start, self.loop).result()
        self.address = Address(*self.server.sockets[0].getsockname())

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        left = next(self.cuts, 2**60)
        there, back = await asyncio.open_connection(*self.to)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal left
            while left > 0 and (data := await source.read(min(left, 16384))):
                left -= len(data)
                target.write(data)
                await target.drain()
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)

        pumps = [asyncio.ensure_future(pump(*ends)) for ends in ((reader, back), (there, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass  # the proxy is closed
        finally:
            for one in pumps:
                one.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, back):
                end.transport.abort()

    def close(self) -> None:
        async def end() -> None:
            self.server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes hosts and proxies that are closed after the test."""
    with ExitStack() as stack:

        def one(kind: type, *arguments: Any, **options: Any) -> Any:
            made = kind(*arguments, **options)
            stack.callback(made.transport.close if kind is Host else made.close)
            return made

        yield one


def until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


# What arrives


@pytest.mark.parametrize("local", [True, False])
def test_parts_come_out_as_they_went_in(make: Make, local: bool) -> None:
    """Of any size, also none, where they can be used without a copy; over a Unix socket and TLS."""
    first, second = make(Host), make(Host)
    to = second.address if local else make(Proxy, second.address).address
    vectors = [LARGE, np.zeros(0, np.float32), torch.ones(3, dtype=torch.float64).numpy()]
    for parts in ([], [b""], [b"head", *vectors, np.float32(2.5).reshape(())], [b"x" * 100_000]):
        first.send(to, parts)
        sender, came = second.came.get(timeout=WAIT_S)
        assert sender == first.address
        assert [bytes(part) for part in came] == [memoryview(part).tobytes() for part in parts]
        for part in came:
            array = np.frombuffer(part, np.uint8)
            assert not array.flags.writeable
            assert not array.size or array.ctypes.data % frames.ALIGNMENT == 0


def test_messages_of_a_pair_arrive_in_order(make: Make) -> None:
    first, second = make(Host), make(Host)
    proxy = make(Proxy, second.address, rate=1e6)
    first.send(proxy.address, [b"0"])
    assert bytes(second.next()[0]) == b"0"
    first.send(proxy.address, [LARGE])
    first.send(proxy.address, [b"behind the vector"])
    came = [bytes(second.next()[0][:20]) for _ in range(2)]
    assert came == [LARGE.tobytes()[:20], b"behind the vector"]


def test_both_directions_at_once(make: Make) -> None:
    first, second = make(Host), make(Host)
    for _ in range(3):
        first.send(second.address, [LARGE])
        second.send(first.address, [LARGE])
    for host in (first, second):
        for _ in range(3):
            assert np.array_equal(np.frombuffer(host.next()[0], np.float32), LARGE)


def test_a_transfer_goes_on_where_it_stopped(make: Make) -> None:
    """No connection carries a fifth of it; one that began anew would never get through."""
    first, second = make(Host, streams=2), make(Host)
    proxy = make(Proxy, second.address, itertools.repeat(700_000))
    first.send(proxy.address, [LARGE])
    assert np.array_equal(np.frombuffer(second.next()[0], np.float32), LARGE)
    assert proxy.connections >= 6


messages = st.lists(st.integers(0, 300_000), min_size=1, max_size=12)
cuts = st.lists(st.integers(0, 400_000), max_size=10)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages, cuts, st.integers(1, 4))
def test_whatever_breaks_all_messages_arrive_once_and_in_order(
    sizes: list[int], cuts: list[int], streams: int
) -> None:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "LONGEST_WAIT_S", 0.05)
        first, second = Host(streams=streams), Host()
        proxy = Proxy(second.address, iter(cuts))
        for close in (proxy.close, second.transport.close, first.transport.close):
            stack.callback(close)
        for number, size in enumerate(sizes):
            first.send(proxy.address, [bytes([number]), bytes([number + 100]) * size])
        first.transport.close(wait_s=WAIT_S)  # all have been acknowledged
        came = [second.next() for _ in sizes]
        assert second.came.empty()
        for head, body in came:
            assert bytes(body) == bytes([head[0] + 100]) * sizes[head[0]]
        assert [head[0] for head, _ in came] == list(range(len(sizes)))


def test_a_host_that_is_started_again_is_another_sender(make: Make) -> None:
    second = make(Host)
    for _ in range(2):
        first = make(Host)
        first.send(second.address, [b"hello"])
        assert bytes(second.next()[0]) == b"hello"
        first.transport.close()


def test_no_copy_of_a_vector_is_made_but_the_one_that_arrives(make: Make) -> None:
    first, second = make(Host), make(Host)
    vector = np.ones(5_000_000, np.float32)
    for to in (second.address, make(Proxy, second.address).address):
        first.send(to, [b"warm"])
        second.next()
        gc.collect()
        tracemalloc.start()
        first.send(to, [vector])
        second.next()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < vector.nbytes + 12e6  # the rest is what connections buffer


def test_a_deliver_that_raises_stops_nothing(make: Make) -> None:
    first, second = make(Host), make(Host)
    seen: list[Any] = []
    second.transport.loop.call_soon_threadsafe(
        second.transport.loop.set_exception_handler, lambda loop, context: seen.append(context)
    )
    take, second.transport.deliver = second.transport.deliver, lambda *mail: 1 / 0
    first.send(second.address, [b"bad"])
    until(lambda: seen)
    assert seen[0]["message"] == f"a message from {first.address}"
    [inlet] = second.transport.inlets.values()
    inlet.deliver = take
    first.send(second.address, [b"good"])
    assert bytes(second.next()[0]) == b"good"


# Progress, and what is given up


def test_progress_is_visible_and_what_moves_is_never_given_up(make: Make) -> None:
    first, second = make(Host, deadline_s=0.4, streams=2), make(Host, deadline_s=0.4)
    proxy = make(Proxy, second.address, rate=1.5e6)
    started_s = time.monotonic()
    first.send(proxy.address, [LARGE])
    first.send(proxy.address, [b"x" * 100_000])

    def first_transfer() -> transport.Transfer:
        return first.transport.transfers()[0]

    until(lambda: 0 < first_transfer().done_bytes < LARGE.nbytes)
    until(lambda: first_transfer().bytes_per_s > 0)
    vector, behind = first.transport.transfers()
    assert vector.to == behind.to == proxy.address
    assert LARGE.nbytes <= vector.total_bytes <= LARGE.nbytes + 128
    assert vector.left_s is not None
    assert behind.left_s is not None
    assert vector.left_s < behind.left_s < 60
    second.next()
    second.next()
    assert time.monotonic() - started_s > 2 * first.transport.deadline_s
    until(lambda: not first.transport.transfers())
    assert first.failures.empty()


def test_what_does_not_move_is_given_up_as_a_whole_and_later_ones_get_through(make: Make) -> None:
    first = make(Host, deadline_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    for _ in range(3):
        first.send(Address("127.0.0.1", port), [LARGE])
    to, reason = first.failures.get(timeout=WAIT_S)
    assert to == ("127.0.0.1", port)
    assert f"127.0.0.1:{port} has taken nothing for 0 s (deadline_s = 0.3), and 3 mess" in reason
    assert "Connect call failed" in reason
    assert first.transport.transfers() == []
    second = make(Host, ports=[port])
    first.send(second.address, [b"later"])
    assert bytes(second.next()[0]) == b"later"
    assert first.failures.empty()


@pytest.mark.parametrize("deadline_s", [60.0, 0.5])
def test_a_link_that_is_cut_on_purpose_carries_nothing_until_it_is_mended(
    make: Make, deadline_s: float
) -> None:
    """What was on its way comes then, unless the deadline has passed."""
    first, second = make(Host, deadline_s=deadline_s), make(Host)
    first.send(second.address, [b"before"])
    assert second.came.get(timeout=WAIT_S)[1] == [b"before"]
    first.transport.block(frozenset([second.address]))
    first.send(second.address, [b"while it is cut"])
    if deadline_s < 60:
        address, why = first.failures.get(timeout=WAIT_S)
        assert address == second.address
        assert why.endswith("the last trouble: the link is cut on purpose")
        first.send(second.address, [b"after"])
    else:
        with pytest.raises(queue.Empty):
            second.came.get(timeout=0.3)
    first.transport.block(frozenset())
    expected = b"while it is cut" if deadline_s == 60 else b"after"
    assert second.came.get(timeout=WAIT_S)[1] == [expected]


def test_what_a_sender_has_given_up_does_not_come_half(make: Make) -> None:
    """The receiver has a part of it, forgets that, and takes what the sender sends next."""
    first, second = make(Host, deadline_s=0.5, streams=1), make(Host)
    proxy = make(Proxy, second.address, itertools.chain([1_000_000], itertools.repeat(0)))
    first.send(proxy.address, [LARGE])
    first.failures.get(timeout=WAIT_S)
    [inlet] = second.transport.inlets.values()
    assert inlet.coming
    proxy.cuts = itertools.repeat(2**60)
    first.send(proxy.address, [b"next"])
    assert bytes(second.next()[0]) == b"next"
    assert not inlet.coming
    assert second.came.empty()


# Strangers


def test_keys_can_be_handed_out_and_do_not_show(make: Make) -> None:
    first, second = make(Host), make(Host, pickle.loads(pickle.dumps(KEYS)))
    first.send(second.address, [b"same run"])
    assert bytes(second.next()[0]) == b"same run"
    assert "PRIVATE" not in repr(KEYS)


def test_wrong_keys_are_refused(make: Make) -> None:
    host, stranger = make(Host), make(Host, Keys.make(), deadline_s=0.4)
    stranger.send(host.address, [b"let me in"])
    _, reason = stranger.failures.get(timeout=WAIT_S)
    assert "certificate verify failed" in reason
    until(lambda: host.transport.traffic().refused > 0)
    assert host.came.empty()


def no_keys() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_no_keys_are_refused(make: Make) -> None:
    host = make(Host)
    with socket.create_connection(host.address) as plain:
        plain.settimeout(WAIT_S)
        # In TLS 1.3 a client hears of the refusal when it reads: an alert, or just the end.
        with no_keys().wrap_socket(plain) as stranger, suppress(OSError):
            assert stranger.recv(1) == b""
    until(lambda: host.transport.traffic().refused == 1)


def test_garbage_is_refused(make: Make) -> None:
    host = make(Host)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\x16\x03\x01" + b"\xff" * 500):
        with socket.create_connection(host.address) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.sendall(garbage)
            while stranger.recv(1000):
                pass
    until(lambda: host.transport.traffic().refused == 3)


def test_whoever_is_slow_is_dropped_and_hurts_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CONNECT_S", 1.0)
    first, second = make(Host), make(Host)
    proxy = make(Proxy, second.address)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(second.address)) for _ in range(50)]
        for stranger in slow:
            stranger.sendall(b"\x16")
        first.send(proxy.address, [LARGE])
        second.next()
        for stranger in slow:
            stranger.settimeout(WAIT_S)
            assert stranger.recv(1) == b""
    until(lambda: second.transport.traffic().refused == 50)


def test_many_strangers_push_each_other_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(Host, streams=2), make(Host)
    monkeypatch.setattr(transport, "MOST_STRANGERS", 5)
    proxy = make(Proxy, second.address)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(second.address))
        until(lambda: second.transport.traffic().refused == 15)
        first.send(proxy.address, [LARGE])
        second.next()


def test_another_user_of_the_machine_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(Host, deadline_s=0.4), make(Host)
    monkeypatch.setattr(sockets.os, "getuid", lambda: 12345)
    first.send(second.address, [b"from another user"])
    assert f"another user listens as {second.address} here" in first.failures.get(timeout=WAIT_S)[1]
    assert second.came.empty()
    with closing(socket.socket(socket.AF_UNIX)) as stranger:  # one that asks nobody
        stranger.settimeout(WAIT_S)
        stranger.connect(second.transport._local_name(second.address))
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert second.transport.traffic().refused > 0


# Ports, and the end


def test_a_port_of_the_range_is_taken(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [busy.getsockname()[1], free.getsockname()[1]]
        free.close()
        assert make(Host, ports=ports).address.port == ports[1]
        with pytest.raises(
            UserError,
            match=f"cannot listen on ports {ports[0]} to {ports[0]} of 127.0.0.1: .*in use",
        ):
            make(Host, ports=ports[:1])


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(UserError, match=r"cannot listen on a free port of 203\.0\.113\.1: Cannot"):
        Transport(KEYS, "203.0.113.1", deliver=lambda *_: None)


def test_a_transport_ends_whatever_is_under_way(make: Make) -> None:
    first, second = make(Host), make(Host)
    first.send(second.address, [LARGE])
    for host in (first, second):
        host.transport.close()
        host.transport.close()
    assert not first.transport.thread.is_alive()
    assert not second.transport.thread.is_alive()
    with pytest.raises(RuntimeError, match=f"the transport of {first.address} is closed"):
        first.send(second.address, [b""])


def test_what_crosses_is_counted(make: Make) -> None:
    first, second = make(Host), make(Host)
    first.send(second.address, [LARGE])
    second.next()
    until(lambda: first.transport.traffic().sent_bytes >= LARGE.nbytes)
    assert first.transport.traffic().wire_bytes == 0  # it has not left the machine
    first.send(make(Proxy, second.address).address, [LARGE])
    second.next()
    traffic = second.transport.traffic()
    assert (traffic.received_messages, traffic.received_bytes) == (2, 2 * LARGE.nbytes)
    assert LARGE.nbytes < first.transport.traffic().wire_bytes < 1.1 * LARGE.nbytes


# Frames


def test_frames_are_what_they_were() -> None:
    hello = Hello(b"l" * 16, 3, Address("host.example", 7000))
    assert Hello.unpack(hello.pack()) == hello
    chunk = Chunk(2**40, 2**41, 2**30, 2**20)
    assert Chunk.unpack(chunk.pack()) == chunk


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(FrameError, match="a stream begins with b'archipl2', not with b'archipl1'"):
        Hello.unpack(Hello(bytes(16), 0, Address("a", 1)).pack().replace(b"archipl1", b"archipl2"))
    for offset, length in ((0, 0), (90, 11), (0, 2**20 + 1)):
        with pytest.raises(FrameError, match="at most 1048576 bytes, inside its message"):
            Chunk.unpack(Chunk(0, 100, offset, length).pack())
    with pytest.raises(FrameError, match="a message whose table of parts is cut off"):
        frames.parts_of(memoryview(b"\xff" * 64))
    with pytest.raises(FrameError, match="a message of 128 bytes whose parts have 4"):
        frames.parts_of(memoryview(bytes(128)))
    with pytest.raises(ValueError, match="a message of 65537 parts; at most 65536 are allowed"):
        Payload([b""] * 65537)


@given(st.lists(st.binary(max_size=200), max_size=6), st.integers(1, 300))
def test_any_cut_of_a_message_has_all_its_bytes(parts: list[bytes], step: int) -> None:
    payload = Payload(parts)
    memory = frames.space(payload.size)
    for start in range(0, payload.size, step):
        stop = min(start + step, payload.size)
        memory[start:stop] = b"".join(payload.cut(start, stop))
    assert [bytes(part) for part in frames.parts_of(memory)] == parts


def test_a_stranger_who_speaks_to_the_local_socket_without_a_hello_is_dropped(make: Make) -> None:
    host = make(Host)
    with closing(socket.socket(socket.AF_UNIX)) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(host.transport._local_name(host.address))
        stranger.sendall(bytes(1000))
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
