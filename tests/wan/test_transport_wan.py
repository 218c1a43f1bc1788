"""The transport on shaped links: how much of the rate gets through, and what survives a cut."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import network
import pytest
from network import Network

from archipel.sim.topology import parse_topology
from archipel.transport.keys import Keys

REASON = network.why_not()
pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

HOST = Path(__file__).with_name("transport_host.py")
PORT = 7000


class Hosts:
    """A transport in each of two regions."""

    def __init__(self, mbit_s: float, latency_ms: float, loss: float = 0.0) -> None:
        topology = parse_topology(
            {
                "regions": {"east": [1.0], "west": [1.0]},
                "default": {"bandwidth_gbit_s": mbit_s / 1e3, "latency_ms": latency_ms},
            }
        )
        self.mbit_s = mbit_s
        self.network = Network(topology, loss=loss)

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            stack.enter_context(self.network)
            keys = Keys.make()
            self.processes = {}
            for region in ("east", "west"):
                self.processes[region] = self.network.popen(
                    region,
                    [sys.executable, str(HOST), self.network.address(region), str(PORT)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                stack.callback(self.processes[region].communicate)
                stack.callback(self.processes[region].kill)
                self.tell(region, keys.certificate.decode(), keys.private_key.decode())
            for region in self.processes:
                assert self.hear(region) == "ready"
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def tell(self, region: str, *what: Any) -> None:
        self.processes[region].stdin.write(json.dumps(what) + "\n")
        self.processes[region].stdin.flush()

    def hear(self, region: str) -> Any:
        return json.loads(self.processes[region].stdout.readline())

    def send(self, source: str, target: str, size: int) -> None:
        self.tell(source, "send", self.network.address(target), size)

    def ask(self, region: str) -> dict[str, Any]:
        """How a host's messages and transfers stand."""
        self.tell(region, "how", "", 0)
        answer: dict[str, Any] = self.hear(region)
        return answer

    def wait_for(self, region: str, messages: int, within_s: float) -> dict[str, Any]:
        end_s = time.monotonic() + within_s
        while len((how := self.ask(region))["came_s"]) < messages:
            assert time.monotonic() < end_s, how
            time.sleep(0.05)
        return how


def goodput(hosts: Hosts, size: int, ways: list[tuple[str, str]]) -> float:
    """The part of the link's rate that arrives as payload; the lower one of several ways."""
    for source, target in ways:
        hosts.send(source, target, 10**6)  # opens connections
    for _, target in ways:
        hosts.wait_for(target, 1, within_s=20)
    started_s = time.monotonic()
    for source, target in ways:
        hosts.send(source, target, size)
    ended_s = max(hosts.wait_for(target, 2, within_s=60)["came_s"][1] for _, target in ways)
    return 8e-6 * size / (ended_s - started_s) / hosts.mbit_s


THERE, BACK = ("east", "west"), ("west", "east")


# A frame has 1,514 bytes, and 1,448 of payload: no more than 0.956 is there to have. The aims are
# those of a quiet machine less 0.05; what was measured on one is in docs/decisions.md.
@pytest.mark.parametrize(
    ("latency_ms", "loss", "ways", "aim"),
    [
        (0, 0.0, [THERE], 0.95),
        (25, 0.0, [THERE], 0.90),
        (25, 0.0, [THERE, BACK], 0.90),
        (100, 0.001, [THERE], 0.85),
    ],
)
def test_a_vector_gets_most_of_the_links_rate(
    latency_ms: float, loss: float, ways: list[tuple[str, str]], aim: float
) -> None:
    with Hosts(20, latency_ms, loss) as hosts:
        assert goodput(hosts, 10**7, ways) > aim - 0.05


def test_a_transfer_survives_a_cut_and_nothing_crosses_twice() -> None:
    size = 6 * 10**6
    with Hosts(20, 10) as hosts:
        hosts.send("east", "west", size)
        while True:
            [(done, total, _)] = hosts.ask("east")["transfers"]
            if done > size / 3:
                break
            time.sleep(0.02)
        hosts.network.set_up("east", "west", up=False)
        time.sleep(3.0)
        hosts.network.set_up("east", "west", up=True)
        hosts.wait_for("west", 1, within_s=40)
        crossed = hosts.network.crossed_bytes("east", "west")
        assert total < crossed < 1.25 * total
        assert abs(hosts.ask("east")["wire_bytes"] / crossed - 1) < 0.1
