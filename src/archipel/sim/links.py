"""Messages on their way: in what order they arrive, how they share a link, and which of them are
lost.

What belongs here: transfers between nodes, and which of them are void because a node or a link is
gone. What does not: seconds and bytes of one message (`network.py`), who is gone (`outages.py`),
and the heap: the functions here return events, and their callers put them on the heap.

Every event of the heap has a number, and numbers rise. When a node is lost, everything on its way
from it or to it becomes void: exactly its events with a lower number than the next event will have.
So one number for each node says which events are void, and nobody has to search the heap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from archipel.actor import NodeId
from archipel.sim.events import Deliver, Drain, Event, Finish
from archipel.sim.network import FairLink, Network

Direction = tuple[str, str]
"""From one region to another."""
Departure = tuple[Deliver, float, float]
"""A message, when it has left, and when it arrives if nothing disturbs it."""


@dataclass
class Transfer:
    """A message on its way over a shared link.

    Attributes:
        start_s: when its first byte left its sender.
        latency_s: seconds from the moment when its last byte leaves to its arrival.
        followers: later messages between the same two nodes whose last byte left earlier, because
            they are smaller. They must not arrive before this one.
    """

    deliver: Deliver
    start_s: float
    latency_s: float
    followers: list[Transfer] = field(default_factory=list)


@dataclass
class SharedLink:
    """One direction of a link between regions, and the transfers on it by their numbers.

    `version` tells which `Drain` on the heap still holds. Each start and each end of a transfer
    changes the others' speed, and so the time of the next end; a `Drain` that was planned before
    has an older version and is ignored.
    """

    link: FairLink
    transfers: dict[int, Transfer] = field(default_factory=dict)
    version: int = 0


@dataclass
class Links:
    """All messages between nodes.

    Attributes:
        network: what a message costs.
        last: for each pair of nodes, the latest planned arrival in seconds, and the number of its
            event.
        forget_above: when `last` has more entries than this, those in the past are dropped.
        shared: the directions whose transfers share their bandwidth.
        void_nodes: for each node that was ever lost, the lowest number of an event that is not
            void.
        void_links: the same number for each link that was ever lost, in both directions.
        void_events: numbers of single events that are void.
        anything_is_void: something has been lost in this run.
    """

    network: Network
    last: dict[tuple[NodeId, NodeId], tuple[float, int]] = field(default_factory=dict)
    forget_above: int = 1000
    shared: dict[Direction, SharedLink] = field(default_factory=dict)
    void_nodes: dict[NodeId, int] = field(default_factory=dict)
    void_links: dict[Direction, int] = field(default_factory=dict)
    void_events: set[int] = field(default_factory=set)
    anything_is_void: bool = False

    # On its way

    def shares(self, deliver: Deliver) -> bool:
        """Whether the message takes a link whose transfers share its bandwidth."""
        return (
            self.network.topology.sharing == "fair" and deliver.sender.region != deliver.to.region
        )

    def arrival_s(self, deliver: Deliver, end_s: float, now: float, number: int) -> float:
        """When a message arrives that could arrive at `end_s`; `number` will be that of its event.

        Messages of one sender to one receiver keep their order, whatever their sizes and the
        jitter.
        """
        pair = deliver.sender, deliver.to
        if pair in self.last:
            before_s, before = self.last[pair]
            # A message that was planned and then lost holds back nobody.
            if before_s > end_s and not self._is_void(before, *pair):
                end_s = before_s
        self.last[pair] = end_s, number
        if len(self.last) > self.forget_above:
            # Nothing that leaves from now on can overtake what has arrived.
            self.last = {pair: planned for pair, planned in self.last.items() if planned[0] > now}
            # The bound doubles with what is left, so that this search is rare in large networks.
            self.forget_above = 1000 + 2 * len(self.last)
        return end_s

    # Shared links

    def join(self, deliver: Deliver, now: float, number: int) -> tuple[float, Drain]:
        """A message starts on a shared link. Returns when the next transfer ends there, and the
        event of that end.
        """
        direction = deliver.sender.region, deliver.to.region
        if direction not in self.shared:
            bandwidth = self.network.link(*direction).bandwidth_bytes_per_s
            self.shared[direction] = SharedLink(FairLink(bandwidth))
        shared = self.shared[direction]
        shared.link.advance(now)
        shared.link.remaining[number] = deliver.size_bytes
        latency_s = self.network.latency_s(deliver.sender, deliver.to)
        shared.transfers[number] = Transfer(deliver, now, latency_s)
        # Everybody on the link is slower now, so the end that was planned before is void.
        return self._next_end(direction, shared)

    def drain(self, event: Drain, now: float) -> tuple[list[Departure], tuple[float, Drain] | None]:
        """A transfer has ended. Returns the messages whose arrival can be planned now, and the
        link's next event.
        """
        shared = self.shared[event.direction]
        if event.version != shared.version:
            return [], None  # a transfer started or ended since: another `Drain` has been planned
        _, ended = shared.link.next_end()
        shared.link.advance(now)
        del shared.link.remaining[ended]
        transfer = shared.transfers.pop(ended)
        departures: list[Departure] = []
        pair = transfer.deliver.sender, transfer.deliver.to
        # Transfers share the link equally, so a small message ends before a large one that was sent
        # earlier. If both go to the same node, the small one waits, as over TCP: for the last one
        # before it, and not the first, for those between the two must arrive earlier too.
        for number, other in reversed(shared.transfers.items()):
            if number < ended and (other.deliver.sender, other.deliver.to) == pair:
                other.followers += [transfer, *transfer.followers]
                break
        else:
            departures = [
                (one.deliver, one.start_s, now + one.latency_s)
                for one in (transfer, *transfer.followers)
            ]
        return departures, self._next_end(event.direction, shared) if shared.transfers else None

    def _next_end(self, direction: Direction, shared: SharedLink) -> tuple[float, Drain]:
        shared.version += 1
        return shared.link.next_end()[0], Drain(direction, shared.version)

    # What is lost

    def lose_node(self, node: NodeId, now: float, next_number: int) -> list[tuple[float, Drain]]:
        """Everything on its way from `node` or to it is lost. Returns the new next ends of
        transfers on shared links.
        """
        self.void_nodes[node] = next_number
        return self._clear(now)

    def lose_link(self, link: Direction, now: float, next_number: int) -> list[tuple[float, Drain]]:
        """The same for everything on its way over a link, in both directions."""
        self.void_links[link] = self.void_links[link[::-1]] = next_number
        return self._clear(now)

    def is_void(self, number: int, event: Event) -> bool:
        """Whether an event is about something that was lost after the event had been planned."""
        # Only messages and inner steps can be lost. All other events look for themselves whether
        # they still hold when they are due.
        match event:
            case Deliver(to=to, sender=sender):
                return number in self.void_events or self._is_void(number, sender, to)
            case Finish(worker=worker):
                return number < self.void_nodes.get(worker, 0)
        return False

    def _is_void(self, number: int, sender: NodeId, to: NodeId) -> bool:
        return (
            number < self.void_nodes.get(to, 0)
            or number < self.void_nodes.get(sender, 0)
            or number < self.void_links.get((sender.region, to.region), 0)
        )

    def _clear(self, now: float) -> list[tuple[float, Drain]]:
        """Take transfers that are void off the shared links."""
        self.anything_is_void = True  # before the first loss the clock need not ask `is_void`
        next_ends = []
        for direction, shared in self.shared.items():
            shared.link.advance(now)
            for number, transfer in list(shared.transfers.items()):
                if self._is_void(number, transfer.deliver.sender, transfer.deliver.to):
                    del shared.transfers[number], shared.link.remaining[number]
            # What is left has more of the link, so the next end is another one, or there is none.
            shared.version += 1
            if shared.transfers:
                next_ends.append(self._next_end(direction, shared))
        return next_ends


def under_way(heap: list[tuple[float, int, Event]], links: Links) -> Iterator[Deliver]:
    """Messages between nodes that have left and not arrived, except those on shared links."""
    for _, number, event in heap:
        if (
            isinstance(event, Deliver)
            and event.sender != event.to
            and not links.is_void(number, event)
        ):
            yield event
