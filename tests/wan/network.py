"""A topology's regions as network namespaces of this machine, with its slow links between them.

    with Network(load_topology("my-network.yaml"), loss=0.001) as network:
        process = network.popen("west", [sys.executable, "worker.py", network.address("east")])

What belongs here: namespaces, addresses, and links between each pair of regions that the topology
connects: bandwidth by `tc … tbf`, one filter each way, so that both directions have the full rate;
latency, jitter and loss by `slow_link.py`; a link without any of them is a veth pair. What does
not: what runs in them.

Everything that is made carries the process id and starting time of its owner in its name. What a
killed owner has left is removed when the next `Network` begins. Needs root, iproute2 and
/dev/net/tun.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import combinations, count
from pathlib import Path
from typing import Any

from archipel.sim.topology import Link, Topology

PREFIX = "archipel-wan"
PACKET_BYTES = 1500
BUFFER_S = 0.05
"""A link's queue holds what it carries in that time; what comes on top is lost, as in a router."""
BURST_S = 0.004
"""What a link may send at once after silence: what it carries in that time, or ten packets."""

_numbers = count()


def why_not() -> str | None:
    """Why there can be no namespaces here; None: there can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is not there or closed"
    name = f"{PREFIX}-{_owner(os.getpid())}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces are not permitted here: {tried.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    return None


class Network:
    """Namespaces for all regions of a topology, while it is open as a context.

    Args:
        topology: regions and links.
        loss: the part of all packets between regions that do not arrive, each way.
        congestion: TCP's congestion control in all regions; most machines have cubic.
        seed: of jitter and loss.
    """

    def __init__(
        self, topology: Topology, *, loss: float = 0.0, congestion: str = "cubic", seed: int = 0
    ) -> None:
        self.topology, self.loss, self.congestion = topology, loss, congestion
        self.seed, self.number = seed, next(_numbers)
        self.regions = list(topology.regions)
        self.carriers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        remove_stale()
        try:
            for region in self.regions:
                self._add_region(region)
            for pair in combinations(range(len(self.regions)), 2):
                link = self.topology.link(*(self.regions[i] for i in pair))
                if link is not None:
                    self._add_link(*pair, link)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes in the regions, and remove everything."""
        for region in self.regions:
            _remove(self.namespace(region))
        for carrier in self.carriers:
            carrier.communicate()  # ends its input, and so the process
        self.carriers.clear()

    def namespace(self, region: str) -> str:
        return f"{PREFIX}-{_owner(os.getpid())}-{self.number}-{region}"

    def address(self, region: str) -> str:
        """Where the region is reached from all others."""
        return f"10.99.{self.regions.index(region)}.1"

    def popen(self, region: str, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in a region."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(region), *command], **options
        )

    def crossed_bytes(self, source: str, target: str) -> int:
        """Bytes of all packets that have left `source` for `target` so far, headers included."""
        shown = self._in(source, "ip", "-s", "-j", "link", "show", self._device(source, target))
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def processes(self, region: str) -> list[int]:
        """What runs in a region."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace(region)).split()]

    def set_up(self, a: str, b: str, *, up: bool) -> None:
        """Cut the link between two regions, or mend it."""
        for source, target in ((a, b), (b, a)):
            device = self._device(source, target)
            self._in(source, "ip", "link", "set", device, "up" if up else "down")
            if up:  # the route went with the device
                self._add_route(source, target)

    def _device(self, source: str, target: str) -> str:
        """The name, in `source`, of its end of the link to `target`."""
        return f"to{self.regions.index(target)}"

    def _in(self, region: str, *command: str) -> str:
        return _run("ip", "netns", "exec", self.namespace(region), *command)

    def _add_region(self, region: str) -> None:
        _run("ip", "netns", "add", self.namespace(region))
        self._in(region, "ip", "link", "set", "lo", "up")
        self._in(region, "ip", "address", "add", f"{self.address(region)}/32", "dev", "lo")

    def _add_link(self, a: int, b: int, link: Link) -> None:
        ends = [(self.regions[a], self.regions[b]), (self.regions[b], self.regions[a])]
        # Short, for a device's name has at most 15 characters, and nobody else's.
        names = [f"aw{os.getpid() % 10**6}.{self.number}.{i}" for i in (99 * a + b, 99 * b + a)]
        if link.latency_ms or link.jitter or self.loss:
            self._carry(names, link, seed=self.seed + 1000 * a + b)
        else:
            _run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for (source, target), name in zip(ends, names, strict=True):
            device = self._device(source, target)
            _run("ip", "link", "set", name, "netns", self.namespace(source), "name", device)
            mtu = ("mtu", str(PACKET_BYTES), "txqueuelen", "4000")
            self._in(source, "ip", "link", "set", device, *mtu, "up")
            rate = link.bandwidth_bytes_per_s
            burst = max(10 * PACKET_BYTES, int(BURST_S * rate))
            limit = burst + max(10 * PACKET_BYTES, int(BUFFER_S * rate))
            shape = f"root tbf rate {8 * rate:.0f}bit burst {burst} limit {limit}"
            self._in(source, "tc", "qdisc", "add", "dev", device, *shape.split())
        for source, target in ends:
            self._add_route(source, target)

    def _add_route(self, source: str, target: str) -> None:
        route = f"{self.address(target)}/32 dev {self._device(source, target)}"
        route += f" src {self.address(source)} congctl {self.congestion}"
        self._in(source, "ip", "route", "replace", *route.split())

    def _carry(self, names: list[str], link: Link, seed: int) -> None:
        script = Path(__file__).with_name("slow_link.py")
        numbers = (link.latency_ms / 1e3, link.jitter, self.loss, seed)
        carrier = subprocess.Popen(
            [sys.executable, str(script), *names, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the owner, who ends it
        )
        self.carriers.append(carrier)
        assert carrier.stdout is not None
        if carrier.stdout.readline() != "ready\n":
            raise RuntimeError(f"the link {names} could not be made")


def remove_stale() -> None:
    """Remove the namespaces, and end what runs in them, of owners that are dead."""
    for name in namespaces():
        if name.startswith(f"{PREFIX}-"):
            pid, started = name.removeprefix(f"{PREFIX}-").split("-")[0].split(".")
            if _owner(int(pid)) != f"{pid}.{started}":
                _remove(name)


def namespaces() -> list[str]:
    """The names of all namespaces of this machine."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _remove(namespace: str) -> None:
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _owner(pid: int) -> str:
    """A process, told apart from a later one with the same id by when it was started."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return f"{pid}.gone"
    return f"{pid}.{started}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
