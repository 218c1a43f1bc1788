"""A schedule of faults on a topology: when each one happens, and what it does to times.

What belongs here: the schedule that an engine follows, how random faults are drawn, and what faults
do to times, as pure functions. What does not: what a recipe may say (`faults.py`), who is told of a
fault (`trouble.py`), and what must hold all the same (`run/invariants.py`).

The transport is reliable and keeps the order between two nodes, as TCP does. A lost message is sent
again after a timeout, a duplicate is dropped by its number, a link that is down holds messages
back. All that costs bytes and time, and a method sees nothing of it. What a method sees is
`Lost(node)` and `Joined(node)`, see `actor.py`: a node that crashed or left, or cannot be reached
for longer than the deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from archipel.actor import NodeId
from archipel.errors import UserError, nearest
from archipel.sim.events import Fail, Mend, Return, Save, Sever, Trouble
from archipel.sim.faults import (
    Crash,
    Delay,
    Duplicate,
    Fault,
    FaultsConfig,
    Join,
    Leave,
    LinkDown,
    Loss,
    Partition,
    RandomFaults,
    Slow,
)
from archipel.sim.topology import Topology


class Window(NamedTuple):
    """From `start_s` to `end_s` a node or a link works at `rate` times its usual speed; at rate 0
    it stands still.
    """

    start_s: float
    end_s: float
    rate: float


def end_s(start_s: float, work_s: float, windows: Sequence[Window]) -> float:
    """When something ends that began at `start_s` and takes `work_s` at its usual speed. Windows
    that overlap multiply.
    """
    now, left = start_s, work_s
    for edge in sorted({edge for window in windows for edge in window[:2] if edge > start_s}):
        rate = 1.0
        for window in windows:
            if window.start_s <= now < window.end_s:
                rate *= window.rate
        if rate and now + left / rate <= edge:
            return now + left / rate
        left -= (edge - now) * rate
        now = edge
    return now + left


@dataclass(frozen=True)
class Faults:
    """A schedule on a topology, drawn and checked.

    Attributes:
        faults: all faults, as in a recipe.
        nodes: all nodes of the run, in the engine's order.
        regions: all regions.
        seed: seed of the random numbers that are drawn for each message.
    """

    faults: tuple[Fault, ...]
    nodes: tuple[NodeId, ...]
    regions: tuple[str, ...]
    save_every_s: float = 600.0
    deadline_s: float = 30.0
    retransmit_s: float = 1.0
    seed: int = 0

    def of(self, *kinds: type) -> list[Any]:
        return [fault for fault in self.faults if isinstance(fault, kinds)]

    @cached_property
    def absent(self) -> dict[NodeId, None]:
        """Those that are not there at the start."""
        return dict.fromkeys(node_of(fault.node) for fault in self.of(Join))

    @cached_property
    def down(self) -> dict[tuple[str, str], list[Window]]:
        """When each link between regions is down; windows of one link do not overlap. Both
        directions have the same ones.
        """
        spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for a, b in itertools.combinations(self.regions, 2):
            for fault in self.of(LinkDown, Partition):
                cuts = (
                    (a in fault.regions) != (b in fault.regions)
                    if isinstance(fault, Partition)
                    else {*fault.between} == {a, b}
                )
                if cuts:
                    spans.setdefault((a, b), []).append((fault.at_s, fault.at_s + fault.for_s))
        windows = {
            link: [Window(start_s, end, 0.0) for start_s, end in _merged(found)]
            for link, found in spans.items()
        }
        return windows | {(b, a): found for (a, b), found in windows.items()}

    def events(self) -> Iterator[tuple[float, Trouble]]:
        """All that will happen, by the kind of event; an engine orders it by time."""
        for fault in self.of(Crash):
            if fault.restart_after_s is not None:
                # Of all saves before this crash the last one counts.
                yield fault.at_s // self.save_every_s * self.save_every_s, Save(node_of(fault.node))
        for fault in self.of(Crash, Leave):
            yield fault.at_s, Fail(node_of(fault.node), isinstance(fault, Leave))
        for fault in self.of(Crash):
            if fault.restart_after_s is not None:
                yield fault.at_s + fault.restart_after_s, Return(node_of(fault.node))
        for fault in self.of(Join):
            yield fault.at_s, Return(node_of(fault.node))
        for (a, b), windows in self.down.items():
            for window in windows if a < b else ():
                if window.end_s - window.start_s > self.deadline_s:
                    yield window.start_s + self.deadline_s, Sever((a, b))
                    yield window.end_s, Mend((a, b))

    def compute_s(self, node: NodeId, start_s: float, seconds: float) -> float:
        """Seconds of inner steps that take `seconds` on a node that nothing slows down."""
        slow = self._slow.get(node)
        return end_s(start_s, seconds, slow) - start_s if slow else seconds

    @cached_property
    def _slow(self) -> dict[NodeId, list[Window]]:
        windows: dict[NodeId, list[Window]] = {}
        for fault in self.of(Slow):
            windows.setdefault(node_of(fault.node), []).append(
                Window(fault.at_s, fault.at_s + fault.for_s, 1 / fault.factor)
            )
        return windows

    @cached_property
    def disturb_messages(self) -> bool:
        """Whether any message of the run may arrive later, or be sent more often, than it would."""
        return bool(self.down or self._on_links)

    def arrival(
        self,
        rng: np.random.Generator,
        sender: NodeId,
        to: NodeId,
        start_s: float,
        arrival_s: float,
        sent_s: float,
    ) -> tuple[float, int]:
        """When a message arrives that would arrive at `arrival_s` if nothing disturbed it, and how
        often it is sent.

        Args:
            rng: drawn from where messages are lost or doubled.
            start_s: when it left its sender.
            sent_s: seconds of one transmission.
        """
        link, copies = (sender.region, to.region), 1
        down = self.down.get(link, ())
        if down:
            arrival_s = end_s(start_s, arrival_s - start_s, down)
        for fault in self._on_links:
            if fault.at_s <= start_s < fault.at_s + fault.for_s and fault.on(*link):
                match fault:
                    case Duplicate():
                        copies += int(rng.random() < fault.probability)
                    case Delay():
                        arrival_s += fault.extra_s
                    case Loss():
                        while (
                            arrival_s < fault.at_s + fault.for_s
                            and rng.random() < fault.probability
                        ):
                            copies += 1
                            arrival_s = end_s(arrival_s + self.retransmit_s, sent_s, down)
        return arrival_s, copies

    def collective_end_s(self, group: Sequence[NodeId], start_s: float, seconds: float) -> float:
        """When an all-reduce of `group` ends: it stands still while any link between two of its
        regions is down.
        """
        links = itertools.combinations(sorted({node.region for node in group}), 2)
        windows = [window for link in links for window in self.down.get(link, ())]
        return end_s(start_s, seconds, windows) if windows else start_s + seconds

    @cached_property
    def _on_links(self) -> list[Any]:
        return self.of(Loss, Delay, Duplicate)

    def quiet_since_s(self, now: float) -> float:
        """Since when nothing has gone wrong, and everybody knows; `now` while something does."""
        edges = [-self.deadline_s]
        for fault in self.faults:
            match fault:
                case Crash(restart_after_s=float(after_s)):
                    edges += [fault.at_s, fault.at_s + after_s]
                case Crash() | Leave() | Join():
                    edges.append(fault.at_s)
                case _:
                    late_s = fault.extra_s if isinstance(fault, Delay) else self.retransmit_s
                    edges += (
                        [min(fault.at_s + fault.for_s + late_s, now)] if fault.at_s < now else []
                    )
        return max(edge for edge in edges if edge <= now) + self.deadline_s

    @cached_property
    def apart_s(self) -> float:
        """How long links are down, all together."""
        return (
            sum(
                window.end_s - window.start_s
                for windows in self.down.values()
                for window in windows
            )
            / 2
        )


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, in order."""
    merged: list[tuple[float, float]] = []
    for start_s, stop_s in sorted(spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop_s)
        else:
            merged.append((start_s, stop_s))
    return merged


def node_of(text: str) -> NodeId:
    """The node written `region/name`."""
    region, _, name = text.partition("/")
    return NodeId(region, name)


def make_faults(
    config: FaultsConfig, topology: Topology, nodes: Sequence[NodeId], seed: int
) -> Faults:
    """The recipe's faults on its topology, with those to be drawn.

    Raises:
        UserError: one of them speaks of a node or a region that is not there, or all workers are
            absent at the start.
    """
    workers = [worker.id for worker in topology.workers]
    regions = tuple(dict.fromkeys([*topology.regions, *(node.region for node in nodes)]))
    for i, fault in enumerate(config.schedule):
        place = f"faults.schedule.{i}"
        match fault:
            case Slow() | Leave() | Join():
                _check(f"{place}.node", fault.node, map(str, workers))
            case Crash():
                _check(f"{place}.node", fault.node, map(str, nodes))
            case Partition():
                for region in fault.regions:
                    _check(f"{place}.regions", region, regions)
                if {*fault.regions} == {*regions}:
                    raise UserError(
                        f"{place}.regions = {fault.regions}: these are all regions, so that no "
                        "link is down; name those on one side"
                    )
            case LinkDown():
                for region in fault.between:
                    _check(f"{place}.between", region, regions)
                if len({*fault.between}) == 1:
                    raise UserError(
                        f"{place}.between = {list(fault.between)}: give two regions; the links in "
                        "one are never down"
                    )
            case _:
                for region in fault.between or ():
                    _check(f"{place}.between", region, regions)
    drawn = draw(config.random, nodes, workers, regions) if config.random else []
    faults = Faults(
        (*config.schedule, *drawn),
        tuple(nodes),
        regions,
        config.save_every_s,
        config.deadline_s,
        config.retransmit_s,
        seed,
    )
    if all(worker in faults.absent for worker in workers):
        raise UserError(
            "faults.schedule: every worker joins later, so that nobody is there at the start; "
            "leave one out"
        )
    return faults


def _check(place: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        raise UserError(f"{place} = {name!r}: allowed are {shown}{nearest(name, names)}")


def draw(
    config: RandomFaults, nodes: Sequence[NodeId], workers: Sequence[NodeId], regions: Sequence[str]
) -> list[Fault]:
    """Faults at the rates of `config`. With one region there are no links to cut."""
    rng = np.random.default_rng((config.seed, 0xFA17))
    drawn: list[Fault] = []

    def times(per_hour: float) -> list[tuple[float, float]]:
        count = rng.poisson(per_hour * config.until_s / 3600)
        return [
            (float(rng.uniform(0, config.until_s)), float(rng.exponential(config.mean_s)) + 1e-3)
            for _ in range(count)
        ]

    def one(among: Sequence[Any]) -> Any:
        return among[int(rng.integers(len(among)))]

    def link() -> tuple[str, str]:
        a, b = rng.choice(len(regions), size=2, replace=False)
        return regions[int(a)], regions[int(b)]

    for at_s, for_s in times(config.slow_per_hour):
        drawn.append(
            Slow(node=str(one(workers)), at_s=at_s, for_s=for_s, factor=float(rng.uniform(1.5, 10)))
        )
    for at_s, for_s in times(config.crashes_per_hour):
        drawn.append(Crash(node=str(one(nodes)), at_s=at_s, restart_after_s=for_s))
    for at_s, for_s in times(config.losses_per_hour):
        drawn.append(Loss(at_s=at_s, for_s=for_s, probability=float(rng.uniform(0.05, 0.9))))
    for at_s, for_s in times(config.delays_per_hour):
        drawn.append(
            Delay(at_s=at_s, for_s=for_s, extra_s=float(rng.exponential(config.mean_s / 10)) + 1e-3)
        )
    for at_s, for_s in times(config.duplicates_per_hour):
        drawn.append(Duplicate(at_s=at_s, for_s=for_s, probability=float(rng.uniform(0.05, 1))))
    if len(regions) > 1:
        for at_s, for_s in times(config.links_down_per_hour):
            drawn.append(LinkDown(between=link(), at_s=at_s, for_s=for_s))
        for at_s, for_s in times(config.partitions_per_hour):
            side = [region for region in regions if rng.random() < 0.5] or [regions[0]]
            drawn.append(Partition(regions=side, at_s=at_s, for_s=for_s))
    return drawn
