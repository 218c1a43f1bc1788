"""What must hold in every run, whatever goes wrong in it: notes that are taken beside a run, and
the checks on them.

What belongs here: each invariant in one place, with its name. What does not: what goes wrong
(`sim/faults.py`), and what is done about it (`sim/trouble.py`).

- `update`: a message is handled at most once, and those between two nodes in the order of sending;
  so no update is applied twice.
- `tokens`: the model has absorbed no more inner steps than workers have finished.
- `bytes`: bytes sent are bytes delivered, lost, or in flight.
- `clock`: time never goes back.
- `progress`: no actor's counts of outer steps and updates fall, nor does a server's count of inner
  steps. The only exception is a restart, which goes back to what was saved before a crash.
- `liveness`: every worker that is there takes inner steps, or waits for a server that is not there
  or cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from archipel.actor import Actor, Message, NodeId
from archipel.errors import TrainingError
from archipel.run.observer import Look, Observer

NAMES = ("update", "tokens", "bytes", "clock", "progress", "liveness")


class Violation(TrainingError):
    """An invariant does not hold; `invariant` is its name."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"invariant {invariant}: {message}")
        self.invariant = invariant


Counts = tuple[int, int, int]
"""An actor's outer steps, local updates, and inner steps."""


def counts(actor: Actor) -> Counts:
    return actor.outer_steps, actor.local_updates, actor.trained


@dataclass
class Ledger(Observer):
    """Notes taken beside one run, against which its events are checked.

    Attributes:
        workers: all workers; the other nodes are servers.
        finished: inner steps that workers have finished and been told of.
        delivered_bytes, lost_bytes: bytes of messages so far. Those of a collective count as
            delivered when it starts.
        under_way: messages between each two nodes, in the order of sending, each with the bytes
            that have left with it.
        seen: what each actor had counted when it was last seen.
        began_s: when each worker last began inner steps.
        restarted: workers that have come back. Their counts may fall once more, to those of whoever
            they take the model from.
        longest_job_s, longest_message_s: the longest times of inner steps and of a message so far,
            as if nothing disturbed them. A collective counts as a message.
        checks: how often each invariant has been checked.
    """

    workers: frozenset[NodeId] = frozenset()
    finished: int = 0
    delivered_bytes: float = 0.0
    lost_bytes: float = 0.0
    under_way: dict[tuple[NodeId, NodeId], list[tuple[Message, float]]] = field(
        default_factory=dict
    )
    seen: dict[NodeId, Counts] = field(default_factory=dict)
    began_s: dict[NodeId, float] = field(default_factory=dict)
    restarted: dict[NodeId, None] = field(default_factory=dict)
    longest_job_s: float = 0.0
    longest_message_s: float = 0.0
    checks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))

    def happens(self, before_s: float, now_s: float) -> None:
        self.checks["clock"] += 1
        if now_s < before_s:
            raise Violation("clock", f"an event of {now_s!r} s comes after {before_s!r} s")

    def begins(self, worker: NodeId, now: float, usual_s: float) -> None:
        self.began_s[worker] = now
        self.longest_job_s = max(self.longest_job_s, usual_s)

    def finishes(self, worker: NodeId, steps: int) -> None:
        self.finished += steps

    def sends(self, sender: NodeId, to: NodeId, message: Message) -> None:
        self.under_way.setdefault((sender, to), []).append((message, 0.0))

    def departs(
        self, sender: NodeId, to: NodeId, message: Message, size_bytes: float, usual_s: float
    ) -> None:
        self.longest_message_s = max(self.longest_message_s, usual_s)
        self.under_way[sender, to] = [
            (other, size_bytes if other is message else gone)
            for other, gone in self.under_way.get((sender, to), [])
        ]

    def delivers(self, sender: NodeId, to: NodeId, message: Message) -> None:
        self.checks["update"] += 1
        waiting = self.under_way.get((sender, to), [])
        if not waiting or waiting[0][0] is not message:
            what = (
                "a second time, or was never sent"
                if all(other is not message for other, _ in waiting)
                else "before its turn"
            )
            raise Violation("update", f"{type(message).__name__} from {sender} reaches {to} {what}")
        self.delivered_bytes += waiting.pop(0)[1]

    def loses(self, lost: Callable[[NodeId, NodeId], bool]) -> None:
        for pair, messages in self.under_way.items():
            if lost(*pair):
                self.lost_bytes += sum(size_bytes for _, size_bytes in messages)
                messages.clear()

    def wastes(self, size_bytes: float) -> None:
        self.lost_bytes += size_bytes

    def reduces(
        self, sent_bytes: float, usual_s: float, between: Mapping[tuple[str, str], float]
    ) -> None:
        self.delivered_bytes += sent_bytes
        self.longest_message_s = max(self.longest_message_s, usual_s)

    def progresses(self, trained: int) -> None:
        self.checks["tokens"] += 1
        if trained > self.finished:
            raise Violation(
                "tokens",
                f"the model has absorbed {trained:,} inner steps, and {self.finished:,} have been "
                "taken",
            )

    def handles(self, actor: Actor) -> None:
        """A worker that no longer holds the model may count 0 inner steps again."""
        self.checks["progress"] += 1
        before, after = self.seen.get(actor.me, (0, 0, 0)), counts(actor)
        self.seen[actor.me] = after
        server = actor.me not in self.workers
        names = "outer steps", "local updates", "absorbed inner steps"
        for name, was, now in zip(names, before, after, strict=True):
            if now < was and (server or name != "absorbed inner steps"):
                if not server and actor.me in self.restarted:
                    del self.restarted[actor.me]
                    return
                raise Violation(
                    "progress", f"the {name} of {actor.me} fall from {was:,} to {now:,}"
                )

    def returns(self, actor: Actor) -> None:
        self.restarted[actor.me] = None
        self.seen[actor.me] = counts(actor)

    def inspects(self, look: Look) -> None:
        self.bytes(look.sent_bytes, look.in_flight_bytes)
        self.alive(look)

    def stuck(self, look: Look, text: str) -> None:
        if set(look.workers) - set(look.excused):
            raise Violation("liveness", text)

    def bytes(self, sent_bytes: float, in_flight_bytes: float) -> None:
        self.checks["bytes"] += 1
        accounted = self.delivered_bytes + self.lost_bytes + in_flight_bytes
        if abs(sent_bytes - accounted) > 1e-6 * max(sent_bytes, 1.0):
            raise Violation(
                "bytes",
                f"{sent_bytes:,.0f} are sent; {self.delivered_bytes:,.0f} delivered, "
                f"{self.lost_bytes:,.0f} lost and "
                f"{in_flight_bytes:,.0f} in flight make {accounted:,.0f}",
            )

    def alive(self, look: Look) -> None:
        """All workers but those excused must have begun inner steps lately.

        In NoLoCo a worker waits for one that waits for another, and so on: at most for one job and
        exchange of each of them. Where workers could not reach each other the fast ones may be
        ahead by what the slow ones do in `lag_s`.
        """
        self.checks["liveness"] += 1
        chain = len(look.workers) + 4
        patience_s = chain * (self.longest_job_s + 2 * self.longest_message_s) + look.lag_s
        for worker in look.workers:
            waiting_s = look.now - max(self.began_s.get(worker, 0.0), look.quiet_since_s)
            if worker not in look.excused and waiting_s > patience_s:
                raise Violation(
                    "liveness",
                    f"{worker} has begun no inner step for {waiting_s:.6g} s; at most "
                    f"{patience_s:.6g} s "
                    "can be explained",
                )
