"""What goes wrong on purpose in a live run: the schedule of its recipe's section `faults`.

What belongs here: when a process is killed, and when a link is cut and mended, on the run's clock.
What does not: what a recipe may say (`sim/faults.py`), how faults are drawn (`sim/schedule.py`),
and what is done about a host that is lost: nobody here tells the watch that it was on purpose, but
for how long the host stays away.

A killed process is really killed, and a cut is one in the transports of the hosts on both sides.
Kinds of faults that the virtual clock alone can act out are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from archipel.actor import NodeId
from archipel.errors import UserError
from archipel.live.fleet import Fleet
from archipel.recipe import Recipe
from archipel.sim.faults import KINDS, Crash, Leave, LinkDown, Partition
from archipel.sim.schedule import Faults, make_faults, node_of

LIVE = (Crash, Leave, LinkDown, Partition)
"""The kinds of faults that a live run can make."""


@dataclass(frozen=True)
class Kill:
    """A host's process is killed, and not started again before `back_s`. `leaves`: all are told at
    once.
    """

    node: NodeId
    back_s: float
    leaves: bool = False


@dataclass(frozen=True)
class Cut:
    """No byte crosses a link any more; or, if `mended`, from now on again."""

    link: tuple[str, str]
    mended: bool = False


def deeds_of(faults: Faults, since_s: float) -> list[tuple[float, Kill | Cut]]:
    """What is done and when, in the order of time. Who was killed before `since_s`, when a stopped
    run goes on, is started with all others, unless it left for good.
    """
    deeds: list[tuple[float, Kill | Cut]] = []
    for crash in faults.of(Crash):
        after_s = math.inf if crash.restart_after_s is None else crash.restart_after_s
        deeds.append((crash.at_s, Kill(node_of(crash.node), crash.at_s + after_s)))
    deeds += [
        (leave.at_s, Kill(node_of(leave.node), math.inf, leaves=True)) for leave in faults.of(Leave)
    ]
    for link, windows in faults.down.items():
        for window in windows if link[0] < link[1] else ():
            deeds += [(window.start_s, Cut(link)), (window.end_s, Cut(link, mended=True))]
    return [
        (at_s, deed)
        for at_s, deed in sorted(deeds, key=lambda deed: deed[0])
        if isinstance(deed, Cut) or deed.back_s == math.inf or at_s >= since_s
    ]


def faults_of(recipe: Recipe, nodes: Sequence[NodeId]) -> Faults | None:
    """The faults of a recipe, drawn and checked; None: it has none.

    Raises:
        UserError: one of them cannot be made live, or has a wrong name.
    """
    if recipe.faults is None:
        return None
    faults = make_faults(recipe.faults, recipe.topology, nodes, recipe.run.seed)
    names = {kind: name for name, kind in KINDS.items()}
    for fault in faults.faults:
        if not isinstance(fault, LIVE):
            raise UserError(
                f"faults: `archipel launch` cannot make {names[type(fault)]!r}, `archipel run` "
                f"can; live there are {', '.join(names[kind] for kind in LIVE)}"
            )
    return faults


@dataclass
class OnPurpose:
    """The deeds of one run.

    Attributes:
        fleet: the hosts.
        deeds: those that are still to come.
        away: killed nodes, and when they may be started again.
        down: links that are cut.
    """

    fleet: Fleet
    deeds: list[tuple[float, Kill | Cut]]
    away: dict[NodeId, float] = field(default_factory=dict)
    down: set[frozenset[str]] = field(default_factory=set)

    def act(self, now_s: float) -> list[NodeId]:
        """Do what is due; who leaves by it."""
        leave: list[NodeId] = []
        while self.deeds and self.deeds[0][0] <= now_s:
            _, deed = self.deeds.pop(0)
            match deed:
                case Kill(node=node, back_s=back_s, leaves=leaves):
                    self.away[node] = max(back_s, self.away.get(node, 0.0))
                    if node in self.fleet:
                        self.fleet.hosts[node].die.remote()
                        leave += [node] * leaves
                case Cut(link=link, mended=mended):
                    (self.down.discard if mended else self.down.add)(frozenset(link))
                    for node in self.fleet.addresses:
                        self.tell(node)
        return leave

    def tell(self, node: NodeId) -> None:
        """A host is told which of its peers it cannot reach now."""
        all_nodes = self.fleet.places  # those too that are being started again
        off = [other for other in all_nodes if {node.region, other.region} in self.down]
        self.fleet.hosts[node].cut.remote(frozenset(off))

    def is_away(self, node: NodeId, now_s: float) -> bool:
        """A node is not to be started again yet."""
        return self.away.get(node, 0.0) > now_s

    def returns(self, node: NodeId) -> bool:
        """A node that was killed on purpose is to come back, or was not killed."""
        return self.away.get(node, 0.0) < math.inf

    def waits(self, now_s: float) -> bool:
        """Some node is to come back, and is not there yet."""
        return any(now_s < back_s < math.inf for back_s in self.away.values())
