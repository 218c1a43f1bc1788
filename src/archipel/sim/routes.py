"""In which order a collective visits the regions.

What belongs here: the order whose slowest link is the fastest. What does not: how long the
collective takes (`network.py`), and who passes on what (`live/all_reduce.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from archipel.actor import Group
from archipel.sim.topology import Topology

EXACT_REGIONS = 8
"""Up to so many regions all orders are tried; above, each region goes on to its nearest unvisited
one.
"""

CHUNKS = 32
"""Parts of a vector that follow each other along a chain."""
SMALLEST_BYTES = 1 << 16
"""A vector so small that its parts would be smaller has fewer of them."""


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
