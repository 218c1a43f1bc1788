"""Hosts of which some are killed and started again, in one thread: whatever may happen next happens
in a random order.

The other side of `test_faults.py`: there the simulator tells methods who is lost, here the live
runtime's hosts do.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel import methods
from archipel.actor import NodeId, World
from archipel.live.compute import JobFailed
from archipel.live.host import Host
from archipel.live.mail import Envelope
from archipel.live.protocol import HostSetup, Membership, News
from archipel.live.restarts import Restarts
from archipel.sim.topology import parse_topology
from archipel.train.data import Shard
from archipel.train.replica import Run
from archipel.train.task import NoTask

TOPOLOGY = parse_topology(
    {"regions": {"east": [1.0, 1.0], "west": [1.0, 0.5]}, "default": {"bandwidth_gbit_s": 1.0}}
)
WORKERS = [worker.id for worker in TOPOLOGY.workers]


@dataclass
class Later:
    """In the place of a host's thread for inner steps: they are taken when the test says so."""

    jobs: deque[Callable[[], None]] = field(default_factory=deque)

    def submit(self, job: Any, *arguments: Any) -> None:
        self.jobs.append(lambda: job(*arguments))


@dataclass
class Town:
    """All hosts, what is on its way between them, and what each has not been told yet.

    `bad_losses` is how likely inner steps are to end with a loss that is not finite.
    """

    rng: random.Random
    hosts: dict[NodeId, Host] = field(default_factory=dict)
    saves: dict[NodeId, bytes] = field(default_factory=dict)
    mail: dict[tuple[NodeId, NodeId], deque[bytes]] = field(default_factory=dict)
    news: dict[NodeId, deque[News | Membership]] = field(default_factory=dict)
    restarts: Restarts = field(default_factory=lambda: Restarts(10**9))
    bad_losses: float = 0.0

    def start(self, node: NodeId, **setup: Any) -> None:
        shard = Shard(WORKERS.index(node), 4, 0, 1, 0) if node in WORKERS else None
        usual: dict[str, Any] = {"task": NoTask(), "run": Run(100, 4, 0), "marks": ()}
        told = HostSetup(
            actor=self.saves[node],
            seed_rank=0,
            shard=shard,
            step_time_s=0.0,
            epoch=1,
            **{**usual, **setup},
        )
        host = Host(told, lambda to, envelope: self.post(node, to, envelope))
        host.compute.thread = Later()  # type: ignore[assignment]
        self.hosts[node], self.news[node] = host, deque()

    def post(self, sender: NodeId, to: NodeId, envelope: Envelope) -> None:
        self.mail.setdefault((sender, to), deque()).append(pickle.dumps(envelope))

    # What the watch does

    def tell_others(self, node: NodeId, news: News | None) -> None:
        for other, waiting in self.news.items():
            if other != node and news is not None:
                waiting.append(news)

    def kill(self, node: NodeId) -> None:
        del self.hosts[node], self.news[node]
        for pair in [
            pair for pair in self.mail if pair[0] == node
        ]:  # what is on its way to it may reach its next life
            del self.mail[pair]
        self.tell_others(node, self.restarts.lose(node, process=True))

    @property
    def dead(self) -> list[NodeId]:
        return list(self.restarts.without_process)

    def revive(self, node: NodeId) -> None:
        self.start(node, begins="restart", membership=self.restarts.begin_life(node))
        self.tell_others(node, self.restarts.join(node))
        self.hosts[node].begin()

    def look(self, node: NodeId) -> None:
        """A loss of a host was not finite: it is told to begin again, behind all earlier news."""
        if not self.hosts[node].events.empty():
            self.hosts[node].events.get()
            self.tell_others(node, self.restarts.lose(node, process=False))
            self.news[node].append(self.restarts.begin_life(node))

    def tell(self, node: NodeId) -> None:
        match self.news[node].popleft():
            case Membership() as membership:
                self.hosts[node].begin_again(membership)
                self.tell_others(node, self.restarts.join(node))
            case news:
                self.hosts[node].tell(news)

    # What may happen next

    def happen(self) -> bool:
        """One of the things that can happen next, if there is any."""
        possible: list[tuple[str, Any]] = [
            ("mail", pair)
            for pair, waiting in self.mail.items()
            if waiting and pair[1] in self.hosts
        ]
        for node, host in self.hosts.items():
            possible += [("job", node)] * bool(self.jobs(node))
            possible += [("news", node)] * bool(self.news[node])
            possible += [("look", node)] * (not host.events.empty())
            possible += [("handle", node)] * (not host.mailbox.empty())
        if not possible:
            return False
        self.do(*self.rng.choice(possible))
        return True

    def jobs(self, node: NodeId) -> deque[Callable[[], None]]:
        return self.hosts[node].compute.thread.jobs  # type: ignore[attr-defined, no-any-return]

    def do(self, what: str, where: Any) -> None:
        match what:
            case "mail":
                self.hosts[where[1]].deliver(pickle.loads(self.mail[where].popleft()))
            case "job":
                job = self.jobs(where).popleft()
                if self.rng.random() < self.bad_losses:
                    self.hosts[where].mailbox.put(JobFailed("not finite"))
                else:
                    job()
            case "news":
                self.tell(where)
            case "look":
                self.look(where)
            case "handle":
                item = self.hosts[where].mailbox.get()
                assert item is not None
                self.hosts[where].handle(item)

    def save(self, node: NodeId) -> None:
        self.saves[node] = pickle.dumps(self.hosts[node].actor)

    @property
    def absorbed(self) -> int:
        return sum(
            host.actor.absorbed for host in self.hosts.values() if host.actor.model() is not None
        )

    def until(self, holds: Callable[[], bool], at_most: int = 30_000) -> None:
        for _ in range(at_most):
            if holds():
                return
            if not self.happen():
                break
        raise AssertionError({node: host.status().doing for node, host in self.hosts.items()})


def town_of(method: str, seed: int) -> Town:
    module = methods.load(method)
    known = module.Config.model_fields
    config = module.Config(
        **{key: value for key, value in {"inner_steps": 2, "accumulate": 2}.items() if key in known}
    )
    town = Town(random.Random(seed))
    actors = module.build(config, World(TOPOLOGY.workers, 0, 0), torch.empty(0))
    for actor in actors:
        town.saves[actor.me] = pickle.dumps(actor)
        town.start(actor.me)
    for host in town.hosts.values():
        host.begin()
    return town


@pytest.mark.parametrize("method", methods.names())
@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whoever_is_killed_or_has_a_bad_loss_all_go_on(method: str, seed: int) -> None:
    town = town_of(method, seed)
    rng = town.rng
    town.bad_losses = rng.choice([0.0, 0.05])
    for _ in range(rng.randint(1, 8)):
        for _ in range(rng.randint(0, 150)):
            town.happen()
            if town.hosts and rng.random() < 0.02:
                node = rng.choice(list(town.hosts))
                if not town.hosts[node].node.busy:
                    town.save(node)
        if town.dead and rng.random() < 0.6:
            town.revive(rng.choice(town.dead))
        elif town.hosts:
            town.kill(rng.choice(list(town.hosts)))
    for node in town.dead:
        town.revive(node)
    town.bad_losses = 0.0
    town.until(lambda: all(not news for news in town.news.values()))
    before, taken = town.absorbed, {node: town.hosts[node].compute.batch for node in WORKERS}
    town.until(
        lambda: (
            town.absorbed > before + 100
            and all(town.hosts[node].compute.batch > taken[node] + 8 for node in WORKERS)
        )
    )


@pytest.mark.parametrize("method", ["sync_sgd", "diloco", "noloco", "async_local_sgd", "halos"])
def test_all_may_be_killed_at_once(method: str) -> None:
    """And a whole run goes on like that: every host is started again."""
    town = town_of(method, 0)
    town.until(lambda: town.absorbed > 50)
    for node, host in list(town.hosts.items()):
        if not host.node.busy:
            town.save(node)
    nodes = list(town.hosts)
    for node in nodes:
        town.kill(node)
    town.mail.clear()
    for node in nodes:
        town.revive(node)
    before = town.absorbed
    town.until(lambda: town.absorbed > before + 100)


@pytest.mark.parametrize("method", ["sync_sgd", "diloco", "noloco"])
def test_workers_of_collectives_and_of_pairs_go_on_without_one_that_stays_away(method: str) -> None:
    town = town_of(method, 1)
    town.until(lambda: town.absorbed > 50)
    town.kill(WORKERS[0])
    town.until(lambda: all(not news for news in town.news.values()))
    before = town.absorbed
    town.until(lambda: town.absorbed > before + 100)
