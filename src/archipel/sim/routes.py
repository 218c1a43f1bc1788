"""In which order a collective visits the regions, and in which parts.

What belongs here: the order whose slowest link is the fastest, how a vector is cut, and which way
each part goes. What does not: how long the collective takes (`network.py`), and who passes on what
(`live/all_reduce.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from archipel.actor import Group
from archipel.run.codec import BLOCK
from archipel.run.wire import BYTES_PER_ENTRY
from archipel.sim.topology import Topology

EXACT_REGIONS = 8
"""Up to so many regions all orders are tried; above, each region goes on to its nearest unvisited
one.
"""

CHUNKS = 32
"""Parts of a vector that follow each other along a chain."""
SMALLEST_BYTES = 1 << 16
"""A vector so small that its parts would be smaller has fewer of them."""
SMALLEST = SMALLEST_BYTES // BYTES_PER_ENTRY
"""Entries of the smallest part."""
BOTH_WAYS = 8
"""A vector of so many parts has its sums go up the chain and down it, half of them each."""


def best_order(
    topology: Topology, regions: Sequence[str], size_bytes: float, *, closed: bool
) -> tuple[str, ...]:
    """The regions, the first of them first, in the order whose slowest link passes `size_bytes`
    soonest. `closed`: the last one has a link back to the first, as in a ring.
    """
    first, *rest = regions
    if not topology.links or not rest:  # all links between regions are alike
        return tuple(regions)

    def seconds(a: str, b: str) -> float:
        link = topology.link(a, b)
        assert link is not None
        return link.latency_s + size_bytes / link.bandwidth_bytes_per_s

    if len(regions) <= EXACT_REGIONS:
        orders = ((first, *order) for order in itertools.permutations(rest))
        return min(
            orders, key=lambda order: max(seconds(a, b) for a, b in edges(order, closed=closed))
        )
    order, unvisited = [first], dict.fromkeys(rest)
    while unvisited:
        following = min(unvisited, key=lambda region: seconds(order[-1], region))
        order.append(following)
        del unvisited[following]
    return tuple(order)


def edges(order: Sequence[str], *, closed: bool) -> tuple[tuple[str, str], ...]:
    """The links between regions that such an order takes."""
    if len(order) == 1:
        return ()
    return tuple(itertools.pairwise((*order, order[0]) if closed else order))


def chain(topology: Topology, group: Group, size_bytes: float) -> Group:
    """The members of a collective as a chain that enters each region once: its first member first,
    then those of its region, then region by region.
    """
    regions = tuple(dict.fromkeys(node.region for node in group))
    order = best_order(topology, regions, size_bytes, closed=False)
    return tuple(node for region in order for node in group if node.region == region)


def chunk_size(numel: int) -> int:
    """Entries of all parts of a vector but the last one: whole blocks of a codec."""
    size = max(SMALLEST, -(-numel // CHUNKS))
    return size + -size % min(SMALLEST, BLOCK)


def line(chain: Group, number: int, chunks: int) -> Group:
    """The members in the order in which the sum of one of a vector's `chunks` passes them: up the
    chain, or, of every second one, down it.

    Links are full duplex. If all sums went up, a link's way down would be busy only with means that
    come as fast as sums leave. TCP is bad at that: its window does not grow while there is little
    to send, and its acknowledgements wait behind the sums. So both ways have sums from the start.
    """
    return chain[::-1] if goes_down(number, chunks) else chain


def goes_down(number: int, chunks: int) -> bool:
    """The sum of that part begins at the chain's last member."""
    return chunks >= BOTH_WAYS and number % 2 == 1
