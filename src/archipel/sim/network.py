"""How long messages and collectives take on a topology, and how many bytes they move. Nothing here
knows of actors or clocks.

With latency, jitter and sharing switched off the times are those of the published simulator (HALoS,
arXiv 2506.04531): a message takes `bytes / bandwidth`, a ring all-reduce over n workers `2(n − 1)/n
· bytes` over the bandwidth of its slowest link.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from archipel.actor import Group, NodeId
from archipel.sim import routes
from archipel.sim.topology import Link, Topology


@dataclass(frozen=True)
class Collective:
    """The cost of one all-reduce: seconds, messages, bytes on all links, and bytes on links between
    regions.

    Attributes:
        edges: the links between regions, each with an equal part of their bytes, both ways
            together; a tree does not say which it takes.
    """

    seconds: float
    messages: int
    sent_bytes: float
    slow_link_bytes: float
    edges: tuple[tuple[str, str], ...] = ()

    @property
    def between(self) -> dict[tuple[str, str], float]:
        """Bytes by link between regions, as far as it is known which it takes."""
        return {edge: self.slow_link_bytes / len(self.edges) for edge in self.edges}


@dataclass
class Network:
    """Times on one topology. `rng` is drawn from for links with jitter only."""

    topology: Topology
    rng: np.random.Generator
    orders: dict[tuple[tuple[str, ...], float, bool], tuple[str, ...]] = field(default_factory=dict)

    def latency_s(self, a: NodeId, b: NodeId) -> float:
        """Seconds before the first byte of a message from `a` reaches `b`."""
        return self._latency_s(self.link(a.region, b.region))

    def message_s(self, a: NodeId, b: NodeId, size_bytes: float) -> float:
        """Seconds of a message of `size_bytes` from `a` to `b` that has the link to itself."""
        link = self.link(a.region, b.region)
        return self._latency_s(link) + size_bytes / link.bandwidth_bytes_per_s

    def _latency_s(self, link: Link) -> float:
        if not link.jitter:
            return link.latency_s
        return link.latency_s * math.exp(link.jitter * self.rng.standard_normal())

    def all_reduce(self, group: Group, size_bytes: float) -> Collective:
        """The cost of an all-reduce of `size_bytes` over `group`, by the topology's rule (`ring`,
        `chain` or `tree`).

        A ring takes 2(n − 1) steps, in each of which every member passes on a chunk of `size_bytes
        / n`; a step lasts as long as its slowest link. A chain passes parts of the sum up from
        member to member and the means back down, one behind the other, so that each link is busy in
        both directions: that is what the live runtime does. Both visit the regions in the best of
        all orders (above 8 regions: in a greedy one), a chain from the first member's region on. A
        tree takes 2·ceil(log2 n) levels of whole vectors over the slowest link inside or between
        the regions, each as long as the slower one of a node's two messages.
        """
        members = Counter(node.region for node in group)
        n, regions = len(group), tuple(members)
        if n == 1:
            return Collective(0.0, 0, 0.0, 0.0)
        match self.topology.collective:
            case "ring":
                chunk, steps = size_bytes / n, 2 * (n - 1)
                order = self._order(regions, chunk, closed=True)
                edges = routes.edges(order, closed=True)
                between = [self.link(a, b) for a, b in edges]
                inside = [self.topology.local] * (n - len(between))
                seconds = self.sum_of_slowest_s(between + inside, chunk, steps)
                return Collective(
                    seconds, steps * n, steps * n * chunk, steps * len(between) * chunk, edges
                )
            case "chain":
                order = self._order(regions, size_bytes, closed=False)
                chunk = max(size_bytes / routes.CHUNKS, min(routes.SMALLEST_BYTES, size_bytes))
                chunks = math.ceil(size_bytes / chunk) if chunk else 1
                edges = routes.edges(order, closed=False)
                between = [self.link(a, b) for a, b in edges]
                hops = between + [self.topology.local] * (n - 1 - len(between))
                once_s = sum(self.sum_of_slowest_s([hop], chunk, 2) for hop in hops)
                slowest_s = max(chunk / hop.bandwidth_bytes_per_s for hop in hops)
                return Collective(
                    once_s + (chunks - 1) * slowest_s,
                    2 * (n - 1) * chunks,
                    2 * (n - 1) * size_bytes,
                    2 * len(between) * size_bytes,
                    edges,
                )
            case "tree":
                levels = 2 * math.ceil(math.log2(n))
                links = [self.link(a, b) for a, b in itertools.combinations(regions, 2)]
                links += [self.topology.local] * (max(members.values()) > 1)
                slowest = max(
                    links, key=lambda link: link.latency_s + size_bytes / link.bandwidth_bytes_per_s
                )
                seconds = self.sum_of_slowest_s([slowest] * (2 if n > 2 else 1), size_bytes, levels)
                messages, slow = 2 * (n - 1), 2 * (len(regions) - 1)
                return Collective(
                    seconds,
                    messages,
                    messages * size_bytes,
                    slow * size_bytes,
                )

    def sum_of_slowest_s(self, links: Sequence[Link], size_bytes: float, steps: int) -> float:
        """Seconds of `steps` steps, each of which waits for the slowest of `links` to pass
        `size_bytes`.
        """
        transfer_s = np.array([size_bytes / link.bandwidth_bytes_per_s for link in links])
        latency_s = np.array([link.latency_s for link in links])
        jitter = np.array([link.jitter for link in links])
        if not jitter.any():
            return steps * float((latency_s + transfer_s).max())
        drawn_s = latency_s * np.exp(jitter * self.rng.standard_normal((steps, len(links))))
        return float((drawn_s + transfer_s).max(axis=1).sum())

    def _order(
        self, regions: tuple[str, ...], size_bytes: float, *, closed: bool
    ) -> tuple[str, ...]:
        key = regions, size_bytes, closed
        if key not in self.orders:
            self.orders[key] = routes.best_order(self.topology, regions, size_bytes, closed=closed)
        return self.orders[key]

    def link(self, a: str, b: str) -> Link:
        """The link between two regions, or inside one."""
        link = self.topology.link(a, b)
        assert link is not None, (
            f"no link between {a} and {b}: `Topology.check_reachable` runs before any engine"
        )
        return link


@dataclass
class FairLink:
    """One direction of a link whose transfers share the bandwidth equally (processor sharing).

    Attributes:
        bandwidth_bytes_per_s: what all transfers together get.
        remaining: bytes still to pass, by transfer.
        now: the time for which `remaining` holds, in seconds.
    """

    bandwidth_bytes_per_s: float
    remaining: dict[int, float] = field(default_factory=dict)
    now: float = 0.0

    def advance(self, now: float) -> None:
        """Let all transfers pass what they can until `now`, which must not be later than
        `next_end()`.
        """
        if self.remaining:
            share = (now - self.now) * self.bandwidth_bytes_per_s / len(self.remaining)
            for transfer in self.remaining:
                self.remaining[transfer] -= share
        self.now = now

    def next_end(self) -> tuple[float, int]:
        """When the next transfer ends if no other one starts, and which one: the oldest of those
        that tie.
        """
        transfer = min(self.remaining, key=lambda key: self.remaining[key])
        left = max(self.remaining[transfer], 0.0)
        return self.now + left * len(self.remaining) / self.bandwidth_bytes_per_s, transfer
