"""A host's line to the other hosts of its run.

What belongs here: where each of them is reached, envelopes as bytes and back, and what is said of
messages that take long. What does not: how bytes travel (`transport/`), in which order envelopes
are let in (`mail.py`), and who is lost (`watch.py`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from archipel.actor import NodeId
from archipel.errors import TrainingError
from archipel.live.mail import Envelope, pack, unpack
from archipel.live.protocol import UnderWay
from archipel.live.reach import Beat, CutOff
from archipel.transport.frames import Address
from archipel.transport.keys import Keys
from archipel.transport.transport import Transport

SHOWN_BYTES = 1_000_000
"""Smaller messages on their way are not shown."""

BEATS = 12
"""Peers are hailed so often in the time after which one that has taken nothing is cut off."""


@dataclass(frozen=True)
class LineSetup:
    """What a host needs to be reached by the others.

    Attributes:
        keys: those of the run.
        machine: the address of the host's machine.
        ports: the host listens on one of these; empty: on any that is free.
        deadline_s: a peer to which no byte gets for so long is cut off.
    """

    keys: Keys
    machine: str
    ports: Sequence[int]
    deadline_s: float


class Line:
    """One host's end.

    Args:
        me: the host's node.
        setup: how it is reached.
        deliver: takes each envelope that comes; called in a thread of the transport.
        tell: takes what the host is to know: that a peer is cut off, and when to hail all peers.

    Attributes:
        peers: where each other node is reached; None: it is lost, and nothing is sent to it.
        off: nodes that cannot be reached on purpose.

    Raises:
        UserError: none of the ports is free.
    """

    def __init__(
        self,
        me: NodeId,
        setup: LineSetup,
        deliver: Callable[[Envelope], None],
        tell: Callable[[CutOff | Beat], None],
    ) -> None:
        self.me, self.to_host, self.deadline_s = me, tell, setup.deadline_s
        self.peers: dict[NodeId, Address | None] = {}
        self.off: frozenset[NodeId] = frozenset()
        self.transport = Transport(
            setup.keys,
            setup.machine,
            deliver=lambda _, parts: deliver(unpack(parts)),
            failed=self._failed,
            ports=setup.ports,
            deadline_s=setup.deadline_s,
        )

    def know(self, peers: Mapping[NodeId, Address | None]) -> None:
        """Where the peers were a moment ago. What `tell` has said of one of them is newer."""
        self.peers = {**peers, **self.peers}
        self.cut(self.off)

    def begin_beat(self) -> None:
        """From now on the host is told when to hail its peers."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        while not self.transport.closed.wait(self.deadline_s / BEATS):
            self.to_host(Beat())

    def tell(self, node: NodeId, address: Address | None) -> None:
        """A node is there again, at `address`; or it is lost, and what is on its way to it too."""
        before, self.peers[node] = self.peers.get(node), address
        if before is not None:
            self.transport.forget(before)
        self.cut(self.off)

    def cut(self, off: frozenset[NodeId]) -> None:
        """From now on these nodes cannot be reached, on purpose, and all others can."""
        self.off = off
        addresses = (self.peers.get(node) for node in off)
        self.transport.block(frozenset(address for address in addresses if address is not None))

    def post(self, to: NodeId, envelope: Envelope) -> None:
        """Send an envelope. Its vectors must not change any more.

        Raises:
            TrainingError: `to` is no peer of this host's actor.
        """
        if to not in self.peers:
            raise TrainingError(
                f"{self.me} sent {envelope.kind.__name__} to {to}, which is none of its peers"
            )
        if (address := self.peers[to]) is not None:
            self.transport.send(address, pack(envelope))

    def forget(self, to: NodeId) -> None:
        """Give up what is on its way to a node."""
        if (address := self.peers.get(to)) is not None:
            self.transport.forget(address)

    def under_way(self) -> tuple[bool, UnderWay | None]:
        """Whether anything from here moves; and the message that takes longest, if one is large."""
        transfers = self.transport.transfers()
        nodes = {address: node for node, address in self.peers.items()}
        large = [
            UnderWay(nodes[one.to], one.done_bytes / one.total_bytes, one.bytes_per_s, one.left_s)
            for one in transfers
            if one.to in nodes and one.total_bytes > SHOWN_BYTES
        ]
        slowest = max(large, key=_left_s, default=None)
        return any(one.bytes_per_s for one in transfers), slowest

    def _failed(self, address: Address, why: str) -> None:
        """Nothing gets through to a host any more. If that is not lost, the link to it is."""
        for node, current in list(self.peers.items()):
            if current == address:
                self.to_host(CutOff(node))


def _left_s(one: UnderWay) -> float:
    return math.inf if one.left_s is None else one.left_s
