"""The shaped network itself does what its topology says, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import network
import pytest
from network import Network

from archipel.sim.topology import Topology, parse_topology

REASON = network.why_not()
pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

MEASURE = """
import json, socket, sys, time
if sys.argv[1] == "serve":
    server = socket.create_server(("", 7000))
    print("ready", flush=True)
    connected, _ = server.accept()
    for _ in range(10):
        connected.sendall(connected.recv(1))
    size = 0
    while data := connected.recv(2**16):
        size, last_s = size + len(data), time.monotonic()
    print(json.dumps([size, last_s]), flush=True)
else:
    connected = socket.create_connection((sys.argv[2], 7000))
    trips_s = []
    for _ in range(10):
        started_s = time.monotonic()
        connected.sendall(b"?")
        connected.recv(1)
        trips_s.append(time.monotonic() - started_s)
    started_s = time.monotonic()
    connected.sendall(bytes(int(sys.argv[3])))
    print(json.dumps([min(trips_s), started_s]))
"""

REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7000), timeout=1)
except ConnectionRefusedError:
    sys.exit(0)
except OSError:
    sys.exit(1)
"""


def topology(mbit_s: float, latency_ms: float) -> Topology:
    return parse_topology(
        {
            "regions": {"east": [1.0], "west": [1.0]},
            "default": {"bandwidth_gbit_s": mbit_s / 1e3, "latency_ms": latency_ms},
        }
    )


@pytest.mark.parametrize("latency_ms", [0, 20])
def test_a_link_has_its_rate_and_its_latency(latency_ms: float) -> None:
    size = 4_000_000
    with Network(topology(20, latency_ms)) as net:
        pipes = {"stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", MEASURE]
        server = net.popen("west", [*command, "serve"], **pipes)
        assert server.stdout.readline() == "ready\n"
        client = net.popen("east", [*command, "send", net.address("west"), str(size)], **pipes)
        trip_s, started_s = json.loads(client.communicate()[0])
        received, last_s = json.loads(server.communicate()[0])
        assert received == size
        assert 0.85 < 8e-6 * size / (last_s - started_s) / 20 < 0.98
        assert 2 * latency_ms <= 1e3 * trip_s < 2 * latency_ms + 20
        assert size < net.crossed_bytes("east", "west") < 1.1 * size


def test_what_a_killed_owner_has_left_is_removed() -> None:
    """Its namespaces, and what runs in them; its forwarders end by themselves."""
    code = f"""
        import subprocess, sys, time
        sys.path.insert(0, {os.path.dirname(network.__file__)!r})
        from network import Network
        from archipel.sim.topology import parse_topology
        topology = parse_topology({{
            "regions": {{"east": [1.0], "west": [1.0]}},
            "default": {{"bandwidth_gbit_s": 0.02, "latency_ms": 5}},
        }})
        with Network(topology) as net:
            # Else it would keep this process's output open.
            sleeper = net.popen("east", ["sleep", "1000"], stdout=subprocess.DEVNULL)
            print(sleeper.pid, net.carriers[0].pid, net.namespace("east"), flush=True)
            time.sleep(1000)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    sleeper, carrier, namespace = owner.stdout.readline().split()
    assert namespace in network.namespaces()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    with Network(topology(20, 0)):
        assert namespace not in network.namespaces()
    end_s = time.monotonic() + 10
    while alive(sleeper) or alive(carrier):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def alive(pid: str) -> bool:
    """Whether a process runs; one that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_link_can_be_cut_and_mended() -> None:
    with Network(topology(20, 5)) as net:
        reach = [sys.executable, "-c", REACH, net.address("west")]
        assert net.popen("east", reach).wait() == 0
        net.set_up("east", "west", up=False)
        assert net.popen("east", reach).wait() == 1
        net.set_up("east", "west", up=True)
        assert net.popen("east", reach).wait() == 0
