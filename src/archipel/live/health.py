"""How the hosts of a live run are doing, by what they reported last.

What belongs here: the last report of each host, and what its silence means. What does not: asking
hosts (`watch.py`), and what is done about silent ones (`restarts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from archipel.actor import NodeId
from archipel.live.protocol import Status
from archipel.run.census import Plan

SHOWN = 8
"""Most hosts that a message lists."""

LATE_S = 5.0
"""A host that has done nothing for so long is shown."""


@dataclass(frozen=True)
class Now:
    """How a live run stands, for whoever shows it.

    Attributes:
        inner_steps: of the run so far.
        planned: inner steps of the whole run.
        time_s: since the start.
        loss: mean of the workers' last training losses; None before the first.
        tokens_per_s: since the start; None where nothing is trained.
        idle: the part of its time in which each worker has not computed.
        late: a host that is lost, or else one that cannot reach another one, or else the one that
            has been silent longest, and what it was doing; None: all have done something just now.
        under_way: the message that takes longest, between whom, and how far it is; None: none takes
            long.
    """

    inner_steps: int
    planned: int
    time_s: float
    loss: float | None
    tokens_per_s: float | None
    idle: dict[NodeId, float]
    late: str | None
    under_way: str | None


@dataclass
class Health:
    """What hosts have reported.

    Attributes:
        deadline_s: longest time without an answer, and without anything that happens.
        cut_s: the same for what happens, while nodes cannot reach each other.
        statuses: the last report of each host that runs.
        answered_s: when each host last answered, or was started.
        lost_s: when a host was last lost.
    """

    deadline_s: float
    statuses: dict[NodeId, Status] = field(default_factory=dict)
    answered_s: dict[NodeId, float] = field(default_factory=dict)
    lost_s: float = 0.0
    cut_s: float = 3600.0

    def hear(self, node: NodeId, status: Status, now_s: float) -> None:
        """A host has answered."""
        self.statuses[node] = status
        self.answered_s[node] = now_s

    def begin(self, node: NodeId, now_s: float) -> None:
        """A host is being started, or begins to run, and has said nothing yet."""
        self.answered_s[node] = now_s

    def lose(self, node: NodeId, now_s: float) -> None:
        """A host is lost."""
        self.statuses.pop(node, None)
        self.lost_s = now_s

    def silence_s(self, node: NodeId, now_s: float) -> float:
        """How long ago a host has answered."""
        return now_s - self.answered_s[node]

    def last_words(self, node: NodeId) -> str:
        """What a host has said last, for the message of its death."""
        status = self.statuses.get(node)
        if status is None:
            return "it had not said anything yet"
        return (
            f"last words, at {status.time_s:.1f} s: {status.doing}, {status.events:,} events so far"
        )

    def death(self, node: NodeId, who: str, now_s: float, error: Exception | None) -> str:
        """A host has died of `error`, or, without one, fallen silent: `who` it is, its last words,
        and the reason.
        """
        words = self.last_words(node)
        if error is not None:
            return f"{who} died; {words}; Ray says: {error}"
        silence_s = self.silence_s(node, now_s)
        return (
            f"{who} has not answered for {silence_s:.0f} s (live.deadline_s = "
            f"{self.deadline_s:g}); {words}"
        )

    def trained(self, nodes: Iterable[NodeId]) -> int:
        """Inner steps that some hosts have counted together."""
        return sum(self.statuses[node].trained for node in nodes)

    def standstill(self, now_s: float, without_machine: Sequence[NodeId]) -> str | None:
        """Who waits for what, if nothing has happened anywhere for too long; else None.

        Args:
            without_machine: lost hosts that wait for a machine of their region.
        """
        quiet_s = [status.quiet_s for status in self.statuses.values()]
        limit_s, name = self.deadline_s, "live.deadline_s"
        if self.cut_off(now_s):
            limit_s, name = max(limit_s, self.cut_s), "live.cut_s"
        if min(quiet_s, default=now_s - self.lost_s) <= limit_s:
            return None
        doing = [f"{node} is lost, and {_no_machine(node)}" for node in without_machine]
        doing += [f"{node} {status.doing}" for node, status in sorted(self.statuses.items())]
        more = f" and {len(doing) - SHOWN} more" if len(doing) > SHOWN else ""
        return f"nothing has happened for {limit_s:g} s ({name}): {'; '.join(doing[:SHOWN])}{more}"

    def cut_off(self, now_s: float) -> list[tuple[NodeId, NodeId]]:
        """Who cannot reach whom, though both answer the command. One that has been silent for a
        while may be dead, and that is no cut.
        """
        return [
            (node, peer)
            for node, status in self.statuses.items()
            for peer in status.cut_off
            if peer in self.statuses and self.silence_s(peer, now_s) < self.deadline_s / 2
        ]

    def report(
        self,
        inner_steps: int,
        plan: Plan,
        now_s: float,
        workers: Sequence[NodeId],
        *,
        starting: Iterable[NodeId],
        without_machine: Iterable[NodeId],
    ) -> Now:
        """How the run stands, which has come to `inner_steps`; see `Now`."""
        assert plan.steps is not None
        there = {node: self.statuses[node] for node in workers if node in self.statuses}
        losses = [status.loss for status in there.values() if status.loss is not None]
        per_step = plan.tokens_per_step
        return Now(
            inner_steps,
            plan.steps,
            now_s,
            loss=float(np.mean(losses)) if losses else None,
            tokens_per_s=None if per_step is None else inner_steps * per_step / now_s,
            idle={
                node: max(0.0, 1 - status.compute_s / status.time_s)
                for node, status in there.items()
            },
            late=self._late(now_s, starting, without_machine),
            under_way=self._under_way(),
        )

    def _under_way(self) -> str | None:
        slow = [
            (math.inf if one.left_s is None else one.left_s, node, one)
            for node, status in self.statuses.items()
            if (one := status.under_way) is not None
        ]
        if not slow:
            return None
        left_s, node, one = max(slow, key=lambda found: found[0])
        rate = "nothing moves"
        if one.left_s is not None:
            rate = f"{8 * one.bytes_per_s / 1e6:.3g} Mbit/s, {left_s:.0f} s to go"
        return f"{node} → {one.to} {one.fraction:.0%}, {rate}"

    def _late(
        self, now_s: float, starting: Iterable[NodeId], without_machine: Iterable[NodeId]
    ) -> str | None:
        for node in without_machine:
            return f"{node}, and {_no_machine(node)}"
        for node in starting:
            return f"{node} is being started again"
        if cut := self.cut_off(now_s):
            node, _ = max(cut, key=lambda pair: self.statuses[pair[0]].quiet_s)
            return f"{node} {self.statuses[node].doing}"
        if not self.statuses:
            return None
        quiet_s, node = max((status.quiet_s, node) for node, status in self.statuses.items())
        return f"{node} {self.statuses[node].doing}" if quiet_s >= LATE_S else None


def _no_machine(node: NodeId) -> str:
    return f"no machine of region {node.region!r} is there"
