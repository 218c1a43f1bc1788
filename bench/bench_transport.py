"""How fast vectors get through a slow link, by transport: `python bench/bench_transport.py`, as
root.

1. On links of several rates, delays (one-way) and losses between two network namespaces
   (`tests/wan/`): goodput ÷ the link's rate; with both directions at once (`both`) the lower one of
   the two. A message has so many bytes as the link carries in 3.2 s (40 MB at 100 Mbit/s); what has
   not come after 15 s does not count. Connections are open and have carried 1 MB before. Frames,
   of 1,514 bytes with 1,448 of payload, leave 0.956 at best; 0.935 where acknowledgements of the
   other direction's share the link.
2. On this machine, without a shaped link: MB/s of messages of 40 MB, each acknowledged before the
   next one, and CPU seconds of both ends per GB.

3. With `--ray 5`: the second, of `archipel`, ÷ the same between two plain Ray actors with NumPy, in
   turns.

Transports whose packages are not installed are left out: pyarrow (Flight), grpcio, pyzmq. What live
runs have is `archipel`; `archipel-cubic`: without BBR; `archipel-tls`: as to another machine. All
are encrypted and authenticated but Ray, and `archipel` within a machine, which the kernel keeps to
one user.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "wan")]

CHUNK = 256 * 1024
WARM_BYTES = 10**6
LIMIT_S = 15.0
SECONDS = 3.2  # that a message takes at the link's rate
LINKS = [  # Mbit/s, one-way ms, loss, directions at once
    (20, 0, 0.0, 1),
    (20, 100, 0.001, 1),
    (100, 0, 0.0, 1),
    (100, 25, 0.0, 1),
    (100, 25, 0.0, 2),
    (100, 25, 0.001, 1),
    (100, 100, 0.001, 1),
    (100, 50, 0.001, 1),
    (100, 100, 0.01, 1),
]


class Chunks:
    """Chunks of one message, for several threads that each take the next one."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.offset, self.lock = data, 0, threading.Lock()

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        with self.lock:
            start = self.offset
            self.offset += CHUNK
        if start >= len(self.data):
            raise StopIteration
        return self.data[start : start + CHUNK]


Count = Callable[[int], None]


class Flight:
    """Arrow Flight: gRPC with TLS and a token; a chunk is a record batch of one column."""

    package = "pyarrow"

    def serve(self, keys: Any, port: int, count: Count) -> None:
        from pyarrow import flight

        class Server(flight.FlightServerBase):  # type: ignore[misc]
            def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
                for chunk in reader:
                    count(chunk.data.column(0).buffers()[1].size)

        class Token(flight.ServerMiddlewareFactory):  # type: ignore[misc]
            def start_call(self, info: Any, headers: Any) -> None:
                if headers.get("authorization") != ["Bearer secret"]:
                    raise flight.FlightUnauthenticatedError("no token")

        self.server = Server(
            f"grpc+tls://0.0.0.0:{port}",
            tls_certificates=[(keys.certificate, keys.private_key)],
            middleware={"token": Token()},
        )

    def connect(self, keys: Any, address: str, port: int) -> Callable[[Chunks], None]:
        import pyarrow
        from pyarrow import flight

        client = flight.FlightClient(
            f"grpc+tls://{address}:{port}", disable_server_verification=True
        )
        options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer secret")])
        schema = pyarrow.schema([("bytes", pyarrow.uint8())])

        def send(chunks: Chunks) -> None:
            writer, _ = client.do_put(flight.FlightDescriptor.for_path("x"), schema, options)
            for chunk in chunks:
                array = pyarrow.Array.from_buffers(
                    pyarrow.uint8(), len(chunk), [None, pyarrow.py_buffer(chunk)]
                )
                writer.write_batch(pyarrow.record_batch([array], schema=schema))
            writer.close()

        return send


class Grpc:
    """A gRPC stream of chunks, mutual TLS."""

    package = "grpcio"

    def serve(self, keys: Any, port: int, count: Count) -> None:
        import grpc

        def put(requests: Iterator[bytes], context: Any) -> bytes:
            for request in requests:
                count(len(request))
            return b""

        self.server = grpc.server(futures.ThreadPoolExecutor(20))
        self.server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "t", {"put": grpc.stream_unary_rpc_method_handler(put)}
                )
            ]
        )
        credentials = grpc.ssl_server_credentials(
            [(keys.private_key, keys.certificate)], keys.certificate, require_client_auth=True
        )
        self.server.add_secure_port(f"0.0.0.0:{port}", credentials)
        self.server.start()

    def connect(self, keys: Any, address: str, port: int) -> Callable[[Chunks], None]:
        import grpc

        credentials = grpc.ssl_channel_credentials(
            keys.certificate, keys.private_key, keys.certificate
        )
        options = [
            ("grpc.ssl_target_name_override", "archipel"),
            ("grpc.use_local_subchannel_pool", 1),  # else all channels share one connection
        ]
        channel = grpc.secure_channel(f"{address}:{port}", credentials, options)
        put = channel.stream_unary("/t/put")
        return lambda chunks: put(bytes(chunk) for chunk in chunks)


class Zmq:
    """ZeroMQ with CURVE; the answer says that all has come."""

    package = "pyzmq"

    def serve(self, keys: Any, port: int, count: Count) -> None:
        import zmq
        from zmq.auth.thread import ThreadAuthenticator

        context = zmq.Context()
        public, secret = zmq_keys()
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=OnlyKey(public))
        self.socket = context.socket(zmq.ROUTER)
        self.socket.curve_server, self.socket.curve_secretkey = True, secret
        self.socket.curve_publickey = public
        self.socket.setsockopt(zmq.RCVHWM, 8)
        self.socket.bind(f"tcp://0.0.0.0:{port}")

        def run() -> None:
            while True:
                who, chunk = self.socket.recv_multipart(copy=False)
                if len(chunk):
                    count(len(chunk))
                else:
                    self.socket.send_multipart([who, b""])

        threading.Thread(target=run, daemon=True).start()

    def connect(self, keys: Any, address: str, port: int) -> Callable[[Chunks], None]:
        import zmq

        public, secret = zmq_keys()
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.curve_serverkey = socket.curve_publickey = public
        socket.curve_secretkey = secret
        socket.setsockopt(zmq.SNDHWM, 8)
        socket.connect(f"tcp://{address}:{port}")

        def send(chunks: Chunks) -> None:
            for chunk in chunks:
                socket.send(chunk, copy=False)
            socket.send(b"")
            socket.recv()

        return send


class OnlyKey:
    def __init__(self, public: bytes) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


def zmq_keys() -> tuple[bytes, bytes]:
    import zmq
    from zmq.utils import z85

    secret = z85.encode(bytes(range(32)))
    return zmq.curve_public(secret), secret


class Tls:
    """asyncio with Python's own ssl, mutual TLS: what `archipel` is made of, without its rules."""

    package = "archipel"

    def serve(self, keys: Any, port: int, count: Count) -> None:
        class Receiver(asyncio.BufferedProtocol):
            def connection_made(self, transport: Any) -> None:
                self.transport, self.buffer = transport, memoryview(bytearray(CHUNK))
                self.header, self.left = True, 4

            def get_buffer(self, sizehint: int) -> memoryview:
                return self.buffer[: self.left]

            def buffer_updated(self, size: int) -> None:
                if self.header:
                    assert size == 4
                    self.left = int.from_bytes(self.buffer[:4], "big")
                    self.header = False
                    if not self.left:
                        self.transport.write(b"!")
                else:
                    count(size)
                    self.left -= size
                if not self.left:
                    self.header, self.left = True, 4

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        start = loop.create_server(Receiver, "0.0.0.0", port, ssl=keys.context(server=True))
        asyncio.run_coroutine_threadsafe(start, loop).result()

    def connect(self, keys: Any, address: str, port: int) -> Callable[[Chunks], None]:
        loop = asyncio.new_event_loop()
        context = keys.context(server=False)
        reader, writer = loop.run_until_complete(
            asyncio.open_connection(address, port, ssl=context)
        )

        async def run(chunks: Chunks) -> None:
            for chunk in chunks:
                writer.writelines([len(chunk).to_bytes(4, "big"), chunk])
                await writer.drain()
            writer.write(bytes(4))
            await reader.readexactly(1)

        return lambda chunks: loop.run_until_complete(run(chunks))


class Archipel:
    """What live runs use: `archipel.transport.transport`."""

    package = "archipel"
    congestion = "bbr"

    def serve(self, keys: Any, port: int, count: Count) -> None:
        from archipel.transport.transport import Address, Transport

        def deliver(sender: Address, parts: list[memoryview]) -> None:
            count(parts[0].nbytes)
            self.transport.loop.call_soon(self.transport.send, sender, [b"has come"])

        host = os.environ.get("ARCHIPEL_BENCH_HOST", "127.0.0.1")
        self.transport = Transport(keys, host, deliver=deliver, ports=[port])

    def coming_bytes(self) -> int:
        """Of a message that is not there yet."""
        return sum(
            len(coming.memory) - coming.left_bytes
            for inlet in self.transport.inlets.values()
            for coming in inlet.coming.values()
        )

    def connect(self, keys: Any, address: str, port: int, streams: int) -> Callable[[Chunks], None]:
        from archipel.transport.transport import Address, Transport

        answered = threading.Event()
        host = os.environ.get("ARCHIPEL_BENCH_HOST", "127.0.0.1")
        transport = Transport(
            keys,
            host,
            deliver=lambda sender, parts: answered.set(),
            streams=streams,
            congestion=self.congestion,
        )

        def send(chunks: Chunks) -> None:
            answered.clear()
            transport.send(Address(address, port), [chunks.data])
            answered.wait()

        return send


class ArchipelCubic(Archipel):
    """The same where the kernel has no BBR."""

    congestion = "cubic"


class ArchipelTls(Archipel):
    """The same as if the other end were on another machine."""

    def connect(self, *arguments: Any) -> Callable[[Chunks], None]:
        from archipel.transport import sockets

        sockets.HAS_LOCAL = False  # type: ignore[misc]
        return super().connect(*arguments)


TRANSPORTS = {
    "flight": Flight,
    "grpc": Grpc,
    "zmq": Zmq,
    "tls": Tls,
    "archipel": Archipel,
    "archipel-cubic": ArchipelCubic,
    "archipel-tls": ArchipelTls,
}


def keys_module() -> Any:
    """`archipel.transport.keys` without the rest of the package: to import torch in each end takes
    seconds.
    """
    path = HERE.parent / "src" / "archipel" / "transport" / "keys.py"
    spec = importlib.util.spec_from_file_location("keys", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["keys"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_keys() -> Any:
    return keys_module().Keys.make()


# One end: a process of its own, told by standard input, which answers on standard output


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(name: str, port: int, keys: Any) -> None:
    """Count what comes; to each line that comes say how much, when the last came, and CPU time."""
    total, last_s, lock = 0, 0.0, threading.Lock()

    def count(size: int) -> None:
        nonlocal total, last_s
        with lock:
            total += size
            last_s = time.monotonic()

    end = TRANSPORTS[name]()
    end.serve(keys, port, count)
    print("ready", flush=True)
    for _ in sys.stdin:
        coming = end.coming_bytes() if isinstance(end, Archipel) else 0
        print(json.dumps([total + coming, last_s, cpu_s()]), flush=True)
    os._exit(0)


def send(name: str, port: int, keys: Any, address: str, streams: int) -> None:
    """Send as many bytes as each line says; say when that began and ended, and CPU time."""
    end = TRANSPORTS[name]()
    pool = futures.ThreadPoolExecutor(streams)
    if isinstance(end, Archipel):
        sends = [end.connect(keys, address, port, streams)]
    else:
        sends = [end.connect(keys, address, port) for _ in range(streams)]
    data = memoryview(np.ones(10**8, np.uint8)).toreadonly()
    print("ready", flush=True)
    for line in sys.stdin:
        chunks, started_s = Chunks(data[: int(line)]), time.monotonic()
        print(json.dumps(started_s), flush=True)
        running = [pool.submit(one, chunks) for one in sends]
        for one in running:
            one.result()
        print(json.dumps([time.monotonic(), cpu_s()]), flush=True)
    os._exit(0)


class End:
    """One of those processes."""

    def __init__(self, start: Callable[..., Any], *arguments: object, keys: Any) -> None:
        command = [sys.executable, __file__, *map(str, arguments)]
        self.process = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.tell(keys.certificate.hex() + " " + keys.private_key.hex())
        line = self.process.stdout.readline()
        if line != b"ready\n":
            raise RuntimeError(f"{command} said {line!r}")

    def tell(self, what: object = "") -> None:
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()

    def hear(self) -> Any:
        return json.loads(self.process.stdout.readline())

    def ask(self, what: object = "") -> Any:
        self.tell(what)
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def goodput(
    name: str,
    streams: int,
    mbit_s: float,
    latency_ms: float,
    loss: float,
    directions: int,
    congestion: str,
) -> float:
    """The part of a link's rate that arrives as payload; the lower one, if in both directions."""
    from network import Network

    from archipel.sim.topology import parse_topology

    topology = parse_topology(
        {
            "regions": {"a": [1.0], "b": [1.0]},
            "default": {"bandwidth_gbit_s": mbit_s / 1e3, "latency_ms": latency_ms},
        }
    )
    size, keys = int(SECONDS * mbit_s * 1e6 / 8), make_keys()
    with Network(topology, loss=loss, congestion=congestion) as network:

        def end(region: str, *arguments: object) -> End:
            environment = {**os.environ, "ARCHIPEL_BENCH_HOST": network.address(region)}

            def start(command: list[str], **options: Any) -> Any:
                return network.popen(region, command, env=environment, **options)

            return End(start, *arguments, keys=keys)

        servers = [end(region, "serve", name, 7000) for region in "ba"[:directions]]
        senders = [
            end(region, "send", name, 7000, network.address(other), streams)
            for region, other in ("ab", "ba")[:directions]
        ]
        for sender in senders:
            sender.ask(WARM_BYTES)
        for sender in senders:
            sender.hear()
        before = [server.ask()[0] for server in servers]
        started_s = [sender.ask(size) for sender in senders]
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            time.sleep(0.05)
            come = [server.ask() for server in servers]
            if all(one[0] - first >= size for one, first in zip(come, before, strict=True)):
                break
        rates = [
            8e-6 * (total - first) / ((last_s if total - first >= size else deadline_s) - start_s)
            for (total, last_s, _), first, start_s in zip(come, before, started_s, strict=True)
        ]
        for one in servers + senders:
            one.close()
    return min(rates) / mbit_s


def local(name: str, streams: int, messages: int) -> tuple[float, float]:
    """On this machine: MB/s of messages of 40 MB, and CPU seconds per GB."""
    keys, size = make_keys(), 40 * 10**6
    server = End(subprocess.Popen, "serve", name, 7411, keys=keys)
    sender = End(subprocess.Popen, "send", name, 7411, "127.0.0.1", streams, keys=keys)
    took_s, cpu = 0.0, 0.0
    for number in range(messages + 1):
        started_s = sender.ask(size)
        ended_s, sender_cpu_s = sender.hear()
        if number == 0:  # the first one warms up
            cpu = -sender_cpu_s - server.ask()[2]
        else:
            took_s += ended_s - started_s
    cpu += sender_cpu_s + server.ask()[2]
    for one in (server, sender):
        one.close()
    return 1e-6 * size * messages / took_s, cpu / (1e-9 * size * messages)


def against_ray(name: str, messages: int, rounds: int) -> None:
    """Print MB/s of messages of 40 MB on this machine ÷ between plain Ray actors."""
    from bench_live import ray_mb_per_s

    from archipel.live import cluster
    from bench import paired

    with cluster.session(None):
        ratio, low, high, base = paired(
            rounds, lambda: local(name, 1, messages)[0], lambda: ray_mb_per_s(messages)
        )
    print(f"{name} ÷ plain Ray actors: {ratio:.2f} ({low:.2f} to {high:.2f}; Ray {base:,.0f} MB/s)")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="transports, with commas")
    parser.add_argument("--streams", default="1,8", help="how many, with commas")
    parser.add_argument("--links", default="", help="numbers of links, with commas; none: -")
    parser.add_argument("--messages", type=int, default=25, help="on this machine; 0: none")
    parser.add_argument("--congestion", default="cubic", help="what both machines have")
    parser.add_argument("--ray", type=int, default=0, help="rounds against plain Ray actors")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(TRANSPORTS)
    for name in list(names):
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(TRANSPORTS[name].package)
            print(f"{name}: {TRANSPORTS[name].package} {version}")
            continue
        names.remove(name)
    print(f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} CPUs")
    streams = [int(one) for one in arguments.streams.split(",")]
    chosen = [(name, number) for name in names for number in streams]
    head = "".join(f"{name + ' × ' + str(number):>14}" for name, number in chosen)
    print(f"{'':28}{head}")
    if arguments.messages:
        measured = [local(*one, arguments.messages) for one in chosen]
        print(f"{'MB/s on this machine':28}{''.join(f'{one[0]:14,.0f}' for one in measured)}")
        print(f"{'CPU s per GB':28}{''.join(f'{one[1]:14.2f}' for one in measured)}", flush=True)
    if arguments.ray:
        against_ray("archipel", max(1, arguments.messages), arguments.ray)
    if arguments.links == "-":
        return
    which = (
        [int(one) for one in arguments.links.split(",")] if arguments.links else range(len(LINKS))
    )
    for link in [LINKS[one] for one in which]:
        mbit_s, latency_ms, loss, directions = link
        both = " both" if directions == 2 else ""
        print(f"{f'{mbit_s} Mbit/s {latency_ms} ms {100 * loss:g} %{both}':28}", end="")
        for one in chosen:
            print(f"{goodput(*one, *link, arguments.congestion):14.3f}", end="", flush=True)
        print()


if __name__ == "__main__":
    if sys.argv[1:2] in (["serve"], ["send"]):
        role, name, port, *rest = sys.argv[1:]
        keys = keys_module().Keys(*map(bytes.fromhex, sys.stdin.readline().split()))
        if role == "serve":
            serve(name, int(port), keys)
        else:
            send(name, int(port), keys, rest[0], int(rest[1]))
    else:
        main()
