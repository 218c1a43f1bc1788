"""Hosts of which some are killed and started again, or cannot reach each other for a while, in one
thread: whatever may happen next happens in a random order.

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
from archipel.live.reach import Beat, CutOff, Hail
from archipel.live.restarts import Restarts
from archipel.recipe import Recipe, parse_recipe
from archipel.sim import routes
from archipel.sim.topology import parse_topology
from archipel.simulation import make_simulator
from archipel.train.configs import NoTask
from archipel.train.data import Shard
from archipel.train.pool import Pool
from archipel.train.replica import Replica, Run
from archipel.train.task import make_task

TOPOLOGY = parse_topology(
    {"regions": {"east": [1.0, 1.0], "west": [1.0, 0.5]}, "default": {"bandwidth_gbit_s": 1.0}}
)
WORKERS = [worker.id for worker in TOPOLOGY.workers]


@pytest.fixture(autouse=True, scope="module")
def sums_go_both_ways() -> Iterator[None]:
    """As those of vectors that are much larger do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "SMALLEST", 1024)
        patch.setattr(routes, "BOTH_WAYS", 2)
        yield


@dataclass
class Later:
    """In the place of a host's thread for inner steps: they are taken when the test says so."""

    jobs: deque[partial[None]] = field(default_factory=deque)

    def submit(self, job: Any, *arguments: Any) -> None:
        self.jobs.append(partial(job, *arguments))


@dataclass
class Town:
    """All hosts, what is on its way between them, and what each has not been told yet.

    `bad_losses` is how likely inner steps are to end with a loss that is not finite. Mail from one
    node to another waits while the pair is `blocked`, and hosts hail each other if there are
    `beats`. `opened` is what each host has handled of each sender.
    """

    rng: random.Random
    hosts: dict[NodeId, Host] = field(default_factory=dict)
    saves: dict[NodeId, bytes] = field(default_factory=dict)
    mail: dict[tuple[NodeId, NodeId], deque[bytes]] = field(default_factory=dict)
    news: dict[NodeId, deque[News | Membership]] = field(default_factory=dict)
    restarts: Restarts = field(default_factory=lambda: Restarts(10**9))
    bad_losses: float = 0.0
    blocked: set[tuple[NodeId, NodeId]] = field(default_factory=set)
    beats: bool = False
    opened: dict[tuple[NodeId, NodeId], list[Envelope]] = field(default_factory=dict)

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
        host = Host(
            told,
            lambda to, envelope: self.post(node, to, envelope),
            lambda to: self.drop((node, to)),
        )
        host.compute.thread = Later()  # type: ignore[assignment]
        handle, opened = host._open, self.opened

        def note(envelope: Envelope, time_s: float) -> None:
            opened.setdefault((node, envelope.sender), []).append(envelope)
            handle(envelope, time_s)

        host._open = note  # type: ignore[method-assign]
        for pair in [pair for pair in opened if pair[0] == node]:
            del opened[pair]
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
            if waiting and pair[1] in self.hosts and pair not in self.blocked
        ]
        for node, host in self.hosts.items():
            possible += [("job", node)] * bool(self.jobs(node))
            possible += [("news", node)] * bool(self.news[node])
            possible += [("look", node)] * (not host.events.empty())
            possible += [("handle", node)] * (not host.mailbox.empty())
        if self.beats and self.hosts and (not possible or self.rng.random() < 0.02):
            self.hosts[self.rng.choice(list(self.hosts))].mailbox.put(Beat())
            return True
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

    def drop(self, pair: tuple[NodeId, NodeId]) -> None:
        """What is on the way is given up, but for what has come without the sender knowing."""
        mail = self.mail.get(pair, deque())
        for _ in range(self.rng.randint(min(1, len(mail)), len(mail))):
            mail.pop()

    def give_up(self, sender: NodeId, to: NodeId) -> None:
        """The transport of `sender` has got nothing through for the deadline."""
        self.drop((sender, to))
        self.hosts[sender].mailbox.put(CutOff(to))

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


# Cuts


def check_mail(town: Town) -> None:
    """Of each life of a pair, what was sent first is handled first, once, and without gaps; and
    nothing of an earlier one comes after something of a later one.
    """
    for (node, sender), envelopes in town.opened.items():
        before, number = (0, 0, 0), 0
        for envelope in envelopes:
            lives = (*envelope.lives, envelope.cuts)
            number = number if lives == before else 0
            assert lives >= before, (node, sender)
            assert envelope.number == number, (node, sender)
            before, number = lives, number + 1


def cut_at_random(town: Town) -> None:
    """One or both directions between two nodes, or between two regions, are blocked or free again;
    or the transport of one end gives up, which it may also do just when the link is up again.
    """
    rng, nodes = town.rng, list(town.hosts)
    match rng.choice(["block", "block regions", "free", "give up", "give up", "give up"]):
        case "block" if len(nodes) > 1:
            a, b = rng.sample(nodes, 2)
            town.blocked |= {(a, b), (b, a)} if rng.random() < 0.5 else {(a, b)}
        case "block regions":
            town.blocked |= {(a, b) for a in nodes for b in nodes if a.region != b.region}
        case "free":
            town.blocked.clear()
        case "give up":
            waiting = [pair for pair, mail in town.mail.items() if mail and pair[0] in town.hosts]
            if town.blocked and rng.random() < 0.8:
                waiting = [pair for pair in waiting if pair in town.blocked]
            if waiting:
                town.give_up(*rng.choice(waiting))


def agree(town: Town) -> bool:
    """Nobody is cut off, and both ends of all pairs count the same cuts."""
    return not any(host.ctx.cut_off for host in town.hosts.values()) and all(
        host.ctx.inbox.reach.cuts.get(peer, 0) == town.hosts[peer].ctx.inbox.reach.cuts.get(node, 0)
        for node, host in town.hosts.items()
        for peer in host.actor.peers()
        if peer != node
    )


@pytest.mark.parametrize("method", methods.names())
@given(st.integers(0, 2**32))
@example(6)  # who asked the leader to begin again could not reach it
@example(32)  # one that was given its mean did not give it to the one below
@example(51)
@example(284)
@settings(max_examples=40, deadline=None)
def test_whoever_cannot_be_reached_all_go_on_when_they_can(method: str, seed: int) -> None:
    town = town_of(method, seed)
    rng, town.beats = town.rng, True
    kills, town.bad_losses = rng.choice([0.0, 0.3]), rng.choice([0.0, 0.0, 0.02])
    for _ in range(rng.randint(1, 25)):
        for _ in range(rng.randint(0, 60)):
            town.happen()
        cut_at_random(town)
        if rng.random() < kills:
            if town.dead and rng.random() < 0.6:
                town.revive(rng.choice(town.dead))
            elif town.hosts:
                town.kill(rng.choice(list(town.hosts)))
        check_mail(town)
    for node in town.dead:
        town.revive(node)
    town.bad_losses = 0.0
    town.blocked.clear()
    town.until(lambda: agree(town) and all(not news for news in town.news.values()))
    before, taken = town.absorbed, {node: town.hosts[node].compute.batch for node in WORKERS}
    town.until(
        lambda: (
            town.absorbed > before + 100
            and all(town.hosts[node].compute.batch > taken[node] + 8 for node in WORKERS)
        )
    )
    check_mail(town)


@pytest.mark.parametrize("method", methods.names())
def test_both_sides_of_a_cut_do_what_they_do_on_the_virtual_clock(method: str) -> None:
    """HALoS and NoLoCo go on at both sides, Async-Local-SGD where the server is, and collectives
    wait; when the cut is over, all train again.
    """
    town = town_of(method, 3)
    town.beats = True
    town.until(lambda: town.absorbed > 50)
    across = [(a, b) for a in town.hosts for b in town.hosts if a.region != b.region]
    town.blocked |= set(across)

    def trains() -> set[str]:
        """Regions whose workers train in the next thousand things that happen."""
        before = {node: town.hosts[node].compute.batch for node in WORKERS}
        for _ in range(1000):
            town.happen()
            for pair in across:
                if town.mail.get(pair):
                    town.give_up(*pair)
        return {
            node.region for node in WORKERS if town.hosts[node].compute.batch > before[node] + 8
        }

    trains()
    assert all(len(host.ctx.cut_off) > 0 for host in town.hosts.values() if across_of(host))
    expected = {"noloco": {"east", "west"}, "halos": {"east", "west"}, "async_local_sgd": {"east"}}
    assert trains() == expected.get(method, set())
    town.blocked.clear()
    town.until(lambda: agree(town))
    before = {node: town.hosts[node].compute.batch for node in WORKERS}
    town.until(lambda: all(town.hosts[node].compute.batch > before[node] + 8 for node in WORKERS))
    check_mail(town)


def across_of(host: Host) -> bool:
    """It has peers in another region."""
    return any(peer.region != host.me.region for peer in host.actor.peers())


def test_a_cut_that_one_end_alone_has_seen_is_one_to_the_other_when_it_is_hailed() -> None:
    town = town_of("halos", 0)
    server, top = NodeId("west", "server0"), NodeId("east", "global")
    heard: dict[NodeId, list[str]] = {server: [], top: []}
    for node, said in heard.items():
        handle = town.hosts[node]._handle
        town.hosts[node]._handle = lambda message, sender, said=said, handle=handle: (  # type: ignore[method-assign,misc]
            said.append(type(message).__name__),
            handle(message, sender),
        )
    town.mail.setdefault((server, top), deque())
    town.give_up(server, top)
    for _ in range(2000):
        town.happen()
    assert [what for what in heard[server] if what in ("Lost", "Joined")] == ["Lost", "Joined"]
    assert [what for what in heard[top] if what in ("Lost", "Joined")] == ["Lost", "Joined"]
    assert not any(envelope.kind is Hail for mail in town.opened.values() for envelope in mail)
    assert agree(town)


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
