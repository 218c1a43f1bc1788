"""Hosts of which some are killed and started again, in one thread: whatever may happen next happens
in a random order.

The other side of `test_faults.py`: there the simulator tells methods who is lost, here the live
runtime's hosts do.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from archipel import methods
from archipel.actor import NodeId, World
from archipel.live.compute import JobFailed
from archipel.live.host import Host
from archipel.live.mail import Envelope
from archipel.live.protocol import HostSetup, Membership, News
from archipel.live.restarts import Restarts
from archipel.recipe import Recipe, parse_recipe
from archipel.sim.topology import parse_topology
from archipel.simulation import make_simulator
from archipel.train.data import Shard
from archipel.train.pool import Pool
from archipel.train.replica import Replica, Run
from archipel.train.task import NoTask, make_task

TOPOLOGY = parse_topology(
    {"regions": {"east": [1.0, 1.0], "west": [1.0, 0.5]}, "default": {"bandwidth_gbit_s": 1.0}}
)
WORKERS = [worker.id for worker in TOPOLOGY.workers]


@dataclass
class Later:
    """In the place of a host's thread for inner steps: they are taken when the test says so."""

    jobs: deque[partial[None]] = field(default_factory=deque)

    def submit(self, job: Any, *arguments: Any) -> None:
        self.jobs.append(partial(job, *arguments))


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
        usual |= {"seed_rank": 0, "shard": shard}
        told = HostSetup(
            actor=self.saves[node],
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

    def jobs(self, node: NodeId) -> deque[partial[None]]:
        return self.hosts[node].compute.thread.jobs  # type: ignore[attr-defined, no-any-return]

    def takes_time(self, node: NodeId) -> bool:
        """The next job of a host takes time on the virtual clock, where to apply a gradient and to
        evaluate take none.
        """
        job = self.jobs(node)[0]
        what = job.args[0] if job.args else job.func
        return "apply" not in what.__qualname__ if callable(what) else False

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
@example(381)  # with synchronous SGD: two have started a term, and neither has heard of the other
@example(3115)  # whoever starts a term has been in a group before, behind others
@example(5374)  # a sum reaches a node that has not heard of a loss that its leader knows of
@example(5978)  # who was invited by one that was lost is invited again, to the same round
@example(50045)  # one that only the leader has named is lost, and takes a mean with it
@example(1023)  # the first of a group was lost, and has been there again for long
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


# The same as on the virtual clock

BAD_BATCH = """
import torch
from archipel import Task

def make():
    return Task(lambda: torch.nn.Linear(4, 1), loss, batches, sgd, tokens_per_step=1)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def batches(shard, i):
    generator = torch.Generator().manual_seed(1000 * shard.index + i)
    bad = shard.split == "train" and (shard.index, i) == (1, 6)
    return torch.randn(8, 4, generator=generator), torch.tensor(float("nan") if bad else 1.0)

def loss(model, batch):
    x, factor = batch
    return factor * (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
"""


@pytest.mark.parametrize("method", ["sync_sgd", "diloco", "noloco"])
@pytest.mark.filterwarnings("ignore:worker east/w1")
def test_after_a_bad_loss_a_live_run_goes_on_as_a_simulated_one(
    method: str, tmp_path: Path, pools: Callable[[Recipe], Pool | None]
) -> None:
    """The worker with the bad batch is so fast that others are told of its loss, and that it is
    back, before they have ended their own inner steps. So both clocks have one order of events.
    """
    (tmp_path / "bad.py").write_text(BAD_BATCH)
    known = methods.load(method).Config.model_fields
    chosen = parse_recipe(
        {
            "method": {"name": method, **({"inner_steps": 4} if "inner_steps" in known else {})},
            "topology": {
                "regions": {"east": [0.1, 1.0], "west": [0.1]},
                "default": {"bandwidth_gbit_s": 10.0},
            },
            "profile": {"name": "slow", "model_bytes": 20, "step_time_s": 1.0},
            "task": f"{tmp_path}/bad.py:make",
            "run": {"steps": 120, "evaluations": 2},
        }
    )
    simulator = make_simulator(chosen, pools(chosen))
    simulator.run()
    assert simulator.recorder.restarted == {NodeId("east", "w1"): 1}

    workers = [worker.id for worker in chosen.topology.workers]
    task = make_task(chosen.task)
    model = Replica(task, Run(120, 3, 0), torch.device("cpu"))
    world = World(chosen.topology.workers, model.layout.parameters, 0)
    built = methods.load(method).build(chosen.config, world, model.first.clone())
    town = Town(random.Random(0))
    held = {actor.me: actor.trained for actor in simulator.holders()}
    for rank, actor in enumerate(built):
        town.saves[actor.me] = pickle.dumps(actor)
        shard = Shard(rank, 3, 0, 1, 0)
        marks = (held[actor.me],) if actor.me in held else ()
        setup = {"task": chosen.task, "run": Run(120, 3, 0), "shard": shard, "marks": marks}
        town.start(actor.me, seed_rank=rank, **setup)
    for host in town.hosts.values():
        host.begin()
    fast = NodeId("east", "w1")
    while not all(town.hosts[node].marks.complete.is_set() for node in held):
        town.do(*next(quickest_first(town, [fast, *(node for node in workers if node != fast)])))
    assert town.restarts.losses == 1
    for node in held:
        [theirs] = [actor.model() for actor in simulator.holders() if actor.me == node]
        assert theirs is not None
        # A newcomer's gradient is summed up last here, and by rank there.
        torch.testing.assert_close(town.hosts[node].marks.vector(0), theirs, rtol=1e-5, atol=1e-6)


def quickest_first(town: Town, workers: list[NodeId]) -> Iterator[tuple[str, Any]]:
    """What can happen next: whatever takes no time, and then the inner steps of the first
    worker that takes any.
    """
    for node, host in town.hosts.items():
        # That all marks have been reached is nothing that anybody needs to look at here.
        while not host.events.empty() and host.marks.complete.is_set():
            host.events.get()
        if not host.events.empty():
            yield "look", node
        if town.news[node]:
            yield "news", node
        if not host.mailbox.empty():
            yield "handle", node
    for pair, waiting in town.mail.items():
        if waiting:
            yield "mail", pair
    for takes_time in (False, True):
        for worker in workers:
            if town.jobs(worker) and town.takes_time(worker) == takes_time:
                yield "job", worker
