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
from archipel.live.host import Host
from archipel.live.mail import Envelope
from archipel.live.protocol import HostSetup, Membership, News
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
    """All hosts, what is on its way between them, and the news that each has not been given yet."""

    rng: random.Random
    hosts: dict[NodeId, Host] = field(default_factory=dict)
    saves: dict[NodeId, bytes] = field(default_factory=dict)
    mail: dict[tuple[NodeId, NodeId], deque[bytes]] = field(default_factory=dict)
    news: dict[NodeId, deque[News]] = field(default_factory=dict)
    lives: dict[NodeId, int] = field(default_factory=dict)
    gone: list[NodeId] = field(default_factory=list)
    losses: int = 0

    def start(self, node: NodeId, **setup: Any) -> None:
        shard = Shard(WORKERS.index(node), 4, 0, 1, 0) if node in WORKERS else None
        told = HostSetup(self.saves[node], 0, NoTask(), Run(100, 4, 0), shard, (), 0.0, 1, **setup)
        host = Host(told, lambda to, envelope: self.post(node, to, envelope))
        host.compute.thread = Later()  # type: ignore[assignment]
        self.hosts[node], self.news[node] = host, deque()

    def post(self, sender: NodeId, to: NodeId, envelope: Envelope) -> None:
        self.mail.setdefault((sender, to), deque()).append(pickle.dumps(envelope))

    def kill(self, node: NodeId) -> None:
        del self.hosts[node], self.news[node]
        for pair in [
            pair for pair in self.mail if pair[0] == node
        ]:  # what is on its way to it may reach its next life
            del self.mail[pair]
        self.gone.append(node)
        self.losses += 1
        for news in self.news.values():
            news.append(News(node))

    def revive(self, node: NodeId) -> None:
        life = self.lives[node] = self.lives.get(node, 0) + 1
        self.gone.remove(node)
        lives = {other: number for other, number in self.lives.items() if other != node}
        membership = Membership(life, lives, tuple(self.gone), self.losses)
        self.start(node, begins="restart", membership=membership)
        for other, news in self.news.items():
            if other != node:
                news.append(News(node, life))
        self.hosts[node].begin()

    def happen(self) -> bool:
        """One of the things that can happen next, if there is any."""
        possible: list[tuple[str, Any]] = [
            ("mail", pair)
            for pair, waiting in self.mail.items()
            if waiting and pair[1] in self.hosts
        ]
        for node, host in self.hosts.items():
            possible += [("job", node)] * bool(host.compute.thread.jobs)  # type: ignore[attr-defined]
            possible += [("news", node)] * bool(self.news[node])
            possible += [("handle", node)] * (not host.mailbox.empty())
        if not possible:
            return False
        what, where = self.rng.choice(possible)
        match what:
            case "mail":
                self.hosts[where[1]].deliver(pickle.loads(self.mail[where].popleft()))
            case "job":
                self.hosts[where].compute.thread.jobs.popleft()()  # type: ignore[attr-defined]
            case "news":
                self.hosts[where].tell(self.news[where].popleft())
            case "handle":
                item = self.hosts[where].mailbox.get()
                assert item is not None
                self.hosts[where].handle(item)
        return True

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
def test_whoever_is_killed_and_started_again_all_go_on(method: str, seed: int) -> None:
    town = town_of(method, seed)
    rng = town.rng
    for _ in range(rng.randint(1, 8)):
        for _ in range(rng.randint(0, 150)):
            town.happen()
            if town.hosts and rng.random() < 0.02:
                node = rng.choice(list(town.hosts))
                if not town.hosts[node].node.busy:
                    town.save(node)
        if town.gone and rng.random() < 0.6:
            town.revive(rng.choice(town.gone))
        elif town.hosts:
            town.kill(rng.choice(list(town.hosts)))
    for node in list(town.gone):
        town.revive(node)
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
