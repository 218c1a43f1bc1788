"""Watching a run, beyond what is recorded of every run.

What belongs here: the moments that an engine tells observers of. What does not: what observers do
then (`invariants.py`). An engine does the same whether anybody watches or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from archipel.actor import Actor, Message, NodeId


@dataclass(frozen=True)
class Look:
    """A look at the whole run between two events.

    Attributes:
        now: seconds on the engine's clock.
        sent_bytes: bytes that all nodes have sent so far.
        in_flight_bytes: bytes of messages that have left and not arrived.
        workers: the workers that are there.
        excused: workers that may have to wait for a lost server, or for a link.
        quiet_since_s: the time since which nothing has gone wrong, and every node knows how things
            stand.
        lag_s: how far slow workers may have fallen behind while links were down.
    """

    now: float
    sent_bytes: float
    in_flight_bytes: float
    workers: Sequence[NodeId]
    excused: Set[NodeId]
    quiet_since_s: float
    lag_s: float


class Observer:
    """Is told what happens. Every method here does nothing; a subclass overrides those it needs."""

    def happens(self, before_s: float, now_s: float) -> None:
        """The clock moves from `before_s` to the next event at `now_s`."""

    def begins(self, worker: NodeId, now: float, usual_s: float) -> None:
        """A worker begins inner steps that take `usual_s` if nothing slows it down."""

    def finishes(self, worker: NodeId, steps: int) -> None:
        """A worker has finished inner steps, and is told so now."""

    def sends(self, sender: NodeId, to: NodeId, message: Message) -> None:
        """A node has sent a message to another one that it can reach."""

    def departs(
        self, sender: NodeId, to: NodeId, message: Message, size_bytes: float, usual_s: float
    ) -> None:
        """Its bytes are on their way, and take `usual_s` if nothing disturbs them."""

    def delivers(self, sender: NodeId, to: NodeId, message: Message) -> None:
        """It has arrived."""

    def loses(self, lost: Callable[[NodeId, NodeId], bool]) -> None:
        """All is lost that is on its way between a sender and a receiver for whom `lost` is
        true.
        """

    def wastes(self, size_bytes: float) -> None:
        """Bytes that were sent to nobody, or sent again."""

    def reduces(
        self, sent_bytes: float, usual_s: float, between: Mapping[tuple[str, str], float]
    ) -> None:
        """A collective has started. `between`: bytes from one region to another, as far as it is
        known which way they go.
        """

    def handles(self, actor: Actor) -> None:
        """An actor has reacted to something."""

    def returns(self, actor: Actor) -> None:
        """A node is there again, with the state of its last save."""

    def progresses(self, trained: int) -> None:
        """The model to take home has changed: its holders count `trained` inner steps."""

    def evaluates(self, trained: Mapping[NodeId, int]) -> None:
        """The model is evaluated; `trained`: the inner steps that each of its holders counts."""

    def inspects(self, look: Look) -> None:
        """Something has gone wrong on purpose, or the run has ended."""

    def stuck(self, look: Look, text: str) -> None:
        """Nothing can happen any more; `text` says who waits for what."""
