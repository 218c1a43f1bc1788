"""`live/host.py` without Ray: hosts in threads of this process, against the simulator; and its
mail, alone.
"""

from __future__ import annotations

import json
import pickle
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from archipel import methods, outer, simulation
from archipel.actor import (
    Actor,
    Context,
    Joined,
    Message,
    NodeId,
    Reduced,
    Refused,
    Start,
    Trained,
    World,
)
from archipel.disk import checkpoint
from archipel.errors import TrainingError, UserError
from archipel.live.compute import JobFailed
from archipel.live.host import Host
from archipel.live.mail import Envelope, Inbox, contents
from archipel.live.protocol import BadLoss, HostSetup, Membership, News, Record, SaveFolder
from archipel.parameter_server import Delta, Model
from archipel.recipe import Recipe, parse_recipe
from archipel.run import wire
from archipel.run.codec import CODECS, Codec
from archipel.run.metrics import Recorder
from archipel.run.screening import ScreeningConfig
from archipel.sim.routes import SMALLEST
from archipel.train.configs import NoTask, TaskConfig, UserTask
from archipel.train.data import Shard
from archipel.train.inner_steps import Solo
from archipel.train.pool import Pool
from archipel.train.replica import Replica, Run
from archipel.train.task import make_task

A, B, C = NodeId("east", "a"), NodeId("east", "b"), NodeId("west", "c")


# Mail


def letter(
    number: int, sender: NodeId = A, epoch: int = 1, lives: tuple[int, int] = (0, 0)
) -> Envelope:
    return Envelope(sender, epoch, lives, number, 0.0, Start, ())


def test_mail_comes_in_the_order_of_sending() -> None:
    inbox = Inbox(epoch=1)
    assert [e.number for e in inbox.accept(letter(0))] == [0]
    assert inbox.accept(letter(2)) == []
    assert [e.number for e in inbox.accept(letter(1))] == [1, 2]


def test_duplicates_are_dropped_whether_handled_or_waiting() -> None:
    inbox = Inbox(epoch=1)
    inbox.accept(letter(0))
    assert inbox.accept(letter(0)) == []
    inbox.accept(letter(2))
    inbox.accept(letter(2))
    assert [e.number for e in inbox.accept(letter(1))] == [1, 2]


def test_strangers_from_another_epoch_are_dropped() -> None:
    inbox = Inbox(epoch=2)
    assert inbox.accept(letter(0, epoch=1)) == []
    assert inbox.accept(letter(0, epoch=3)) == []
    assert [e.epoch for e in inbox.accept(letter(0, epoch=2))] == [2]


def test_senders_do_not_wait_for_each_other() -> None:
    inbox = Inbox(epoch=1)
    assert inbox.accept(letter(1, A)) == []
    assert [e.sender for e in inbox.accept(letter(0, B))] == [B]


@given(st.data())
def test_whatever_the_network_does_each_sender_is_heard_in_order_and_once(
    data: st.DataObject,
) -> None:
    sent = [letter(number, sender) for sender in (A, B, C) for number in range(5)]
    strangers = [letter(number, A, epoch=0) for number in range(5)]
    repeated = data.draw(st.lists(st.sampled_from(sent), max_size=10))
    inbox, heard = Inbox(epoch=1), []
    for envelope in data.draw(st.permutations(sent + strangers + repeated)):
        heard += inbox.accept(envelope)
    for sender in (A, B, C):
        assert [e.number for e in heard if e.sender == sender] == list(range(5))


def test_an_envelope_holds_views_and_opens_to_the_message() -> None:
    vector = torch.arange(4.0)
    envelope = Envelope(A, 1, (0, 0), 0, 0.0, Delta, contents(Delta(vector, 3)))
    assert np.shares_memory(envelope.contents[0], vector.numpy())
    assert envelope.size_bytes == 16
    opened = pickle.loads(pickle.dumps(envelope)).open()
    assert isinstance(opened, Delta)
    assert torch.equal(opened.gradient, vector)
    assert opened.steps == 3


# Hosts in threads


@dataclass
class Fleet:
    """Hosts in this process, each in a thread; mail is pickled on its way, and `mangle` may do
    something to it.
    """

    hosts: dict[NodeId, Host] = field(default_factory=dict)
    delivered: list[tuple[NodeId, Envelope]] = field(default_factory=list)

    def post(self, to: NodeId, envelope: Envelope) -> None:
        copy = pickle.loads(pickle.dumps(envelope))
        self.delivered.append((to, copy))
        self.hosts[to].deliver(copy)

    def add(
        self,
        actor: Actor,
        *,
        marks: tuple[int, ...] = (),
        task: TaskConfig | None = None,
        run: Run | None = None,
        **others: Any,
    ) -> None:
        setup = HostSetup(
            actor=pickle.dumps(actor),
            seed_rank=len(self.hosts),
            task=task or NoTask(),
            run=run or Run(100, 1, 0),
            marks=marks,
            epoch=1,
            **{"shard": None, "step_time_s": 0.0, **others},
        )
        self.hosts[actor.me] = Host(setup, self.post)

    def run(self, until: Any = None, timeout_s: float = 60.0) -> dict[NodeId, Record]:
        """Run all hosts until those with marks have reached them (or `until` says so), then stop
        them.
        """
        with ThreadPoolExecutor(len(self.hosts)) as threads:
            runs = {node: threads.submit(host.run) for node, host in self.hosts.items()}
            deadline = time.monotonic() + timeout_s
            holders = [host for host in self.hosts.values() if host.setup.marks]
            while not (until() if until else all(is_done(host) for host in holders)):
                if any(run.done() for run in runs.values()) or time.monotonic() > deadline:
                    break
            for host in self.hosts.values():
                host.stop()
            try:
                return {node: run.result(timeout=10) for node, run in runs.items()}
            finally:
                for host in (
                    self.hosts.values()
                ):  # the next test's weights are drawn from this process's random numbers too
                    host.compute.thread.shutdown(wait=True, cancel_futures=True)


def is_done(host: Host) -> bool:
    """It has reached all its marks, and computed the losses there."""
    return host.marks.complete.wait(0.01) and not host.marks.evaluating


def recipe(method: str, steps: int = 200, **sections: Any) -> Recipe:
    fields = methods.load(method).Config.model_fields
    settings = {
        key: value for key, value in {"inner_steps": 5, "accumulate": 2}.items() if key in fields
    }
    return parse_recipe(
        {
            "method": {"name": method, **settings},
            "topology": {
                "regions": {"east": [1.0, 1.0], "west": [1.0, 0.5]},
                "default": {"bandwidth_gbit_s": 1.0, "latency_ms": 5},
            },
            "task": {"name": "synthetic", "width": 16, "valid_sequences": 8},
            "run": {"steps": steps, "evaluations": 4},
            **sections,
        }
    )


def fleet_of(chosen: Recipe, marks: list[dict[NodeId, int]]) -> tuple[Fleet, Replica]:
    workers, seed = chosen.topology.workers, chosen.run.seed
    run = Run(chosen.run.steps or 0, len(workers), seed)
    replica = Replica(make_task(chosen.task), run, torch.device("cpu"))
    world = World(workers, replica.layout.parameters, seed)
    fleet = Fleet()
    ranks = {worker.id: i for i, worker in enumerate(workers)}
    regions = list(chosen.topology.regions)
    for actor in methods.load(chosen.method).build(
        chosen.config, world, replica.layout.read(replica.module)
    ):
        rank = ranks.get(actor.me)
        shard = (
            None
            if rank is None
            else Shard(rank, len(workers), regions.index(actor.me.region), len(regions), seed)
        )
        fleet.add(
            actor,
            marks=tuple(mark[actor.me] for mark in marks if actor.me in mark),
            task=chosen.task,
            run=run,
            shard=shard,
            parameters=replica.layout.parameters,
            wire=chosen.wire,
        )
    return fleet, replica


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", ["sync_sgd", "diloco", "noloco"])
def test_synchronous_methods_end_with_the_simulators_weights(
    method: str, codec: Codec, tmp_path: Path, pools: Callable[[Recipe], Pool | None]
) -> None:
    """Bit for bit, at every mark: what these methods compute depends on no clock, and neither does
    what is rounded on the way.
    """
    rehearsal = pytest.importorskip("archipel.live.rehearsal")
    chosen = recipe(method, wire=codec)
    assert chosen.profile
    marks = rehearsal.rehearse(chosen, chosen.profile, 200)
    fleet, replica = fleet_of(chosen, marks)
    fleet.run()
    summary = simulation.simulate(chosen, pools(chosen), tmp_path / "run")
    holders = [host for host in fleet.hosts.values() if host.setup.marks]
    assert sum(host.marks.reached[-1].trained for host in holders) == summary["inner_steps"]
    lines = [
        json.loads(line)
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        if '"eval"' in line
    ]
    own = [np.mean([host.marks.reached[k].loss for host in holders]) for k in range(len(marks))]
    name = "loss" if len(holders) == 1 else "replica_loss"
    assert own == [pytest.approx(line[name], rel=1e-6) for line in lines]
    mean = outer.mean([host.marks.vector(len(marks) - 1) for host in holders])
    assert replica.evaluate(mean) == [pytest.approx(lines[-1]["loss"], rel=1e-6)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", methods.names())
def test_a_message_weighs_the_bytes_that_really_travel(method: str, codec: Codec) -> None:
    """What the simulator counts by, held against the pickled envelopes of real training."""
    rehearsal = pytest.importorskip("archipel.live.rehearsal")
    chosen = recipe(method, steps=100, wire=codec)
    assert chosen.profile
    fleet, replica = fleet_of(chosen, rehearsal.rehearse(chosen, chosen.profile, 100))
    fleet.run()
    assert fleet.delivered
    numel, parameters = replica.layout.numel, replica.layout.parameters
    most = 0.0
    for _, envelope in fleet.delivered:
        models = wire.weight(envelope.open(), numel, codec, parameters)
        size_bytes = models * wire.BYTES_PER_ENTRY * numel
        assert size_bytes == pytest.approx(envelope.size_bytes, rel=1e-12)
        assert size_bytes <= len(pickle.dumps(envelope)) < size_bytes + 2000
        most = max(most, models)
    gradient = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254, "int4": 0.129}[codec]
    value = 1.0 if codec == "fp32" else 0.5
    expected = {"noloco": gradient + value, "halos": value, "async_local_sgd": value}
    assert most == pytest.approx(expected.get(method, gradient), rel=0.01)


@pytest.mark.parametrize("method", methods.names())
def test_every_method_comes_to_its_last_mark(method: str) -> None:
    rehearsal = pytest.importorskip("archipel.live.rehearsal")
    chosen = recipe(method, task="none")
    assert chosen.profile
    marks = rehearsal.rehearse(chosen, chosen.profile, 200)
    workers = chosen.topology.workers
    fleet, ranks = Fleet(), {worker.id: i for i, worker in enumerate(workers)}
    for actor in methods.load(method).build(chosen.config, World(workers, 0, 0), torch.empty(0)):
        shard = Shard(ranks[actor.me], 4, 0, 1, 0) if actor.me in ranks else None
        fleet.add(
            actor, marks=tuple(mark[actor.me] for mark in marks if actor.me in mark), shard=shard
        )
    records = fleet.run()
    holders = [host for host in fleet.hosts.values() if host.setup.marks]
    assert sum(host.marks.reached[-1].trained for host in holders) >= 200
    assert sum(record.recorder.messages for record in records.values()) > 0


@dataclass(kw_only=True)
class Reducer(Actor):
    """Reduces its vector `rounds` times with its group."""

    group: tuple[NodeId, ...]
    vector: Tensor
    rounds: int

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        if not isinstance(message, Start):
            self.vector = message.mean  # type: ignore[attr-defined]
            self.absorbed += 1
        if self.absorbed < self.rounds:
            ctx.all_reduce(self.group, self.vector + self.group.index(self.me))

    def model(self) -> Tensor:
        return self.vector


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [0, 7, 2 * SMALLEST + 3])
def test_an_all_reduce_has_the_bits_of_the_mean_in_rank_order(count: int, numel: int) -> None:
    group = tuple(NodeId("east", f"w{i}") for i in range(count))
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    fleet = Fleet()
    for me, vector in zip(group, vectors, strict=True):
        fleet.add(Reducer(me=me, group=group, vector=vector, rounds=2), marks=(2,))
    records = fleet.run()
    for _ in range(2):
        vectors = [outer.mean([vector + i for i, vector in enumerate(vectors)])] * count
    for host in fleet.hosts.values():
        assert torch.equal(host.marks.vector(0), vectors[0])
    sent = sum(record.recorder.sent_bytes for record in records.values())
    assert sent == 2 * 2 * (count - 1) * 4 * numel  # a ring's bytes


@dataclass(kw_only=True)
class Chatter(Actor):
    """Sends what it is told to when it starts, and keeps what it hears."""

    to: NodeId | None = None
    heard: int = 0

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start() if self.to is not None:
                vector = torch.zeros(3)
                for i in range(20):
                    vector += 1
                    ctx.send(self.to, Model(vector, i))
            case Model(theta=theta, progress=progress):
                assert theta.tolist() == [progress + 1.0] * 3
                assert progress == self.heard
                self.heard += 1
                self.absorbed = self.heard

    def model(self) -> Tensor:
        return torch.zeros(0)


def test_what_is_sent_is_a_snapshot_and_comes_in_order() -> None:
    fleet = Fleet()
    fleet.add(Chatter(me=A, to=B))
    fleet.add(Chatter(me=B), marks=(20,))
    records = fleet.run()
    assert records[B].recorder.messages == 20
    assert records[B].recorder.sent_bytes == 20 * 12
    assert records[B].recorder.slow_link_bytes == 0


def test_mail_that_comes_twice_or_from_another_run_is_not_handled() -> None:
    fleet = Fleet()
    fleet.add(Chatter(me=A, to=B))
    fleet.add(Chatter(me=B), marks=(20,))
    post = fleet.post

    def twice(to: NodeId, envelope: Envelope) -> None:
        post(
            to,
            Envelope(
                envelope.sender, 0, (0, 0), envelope.number, 0.0, envelope.kind, envelope.contents
            ),
        )
        post(to, envelope)
        post(to, envelope)

    for host in fleet.hosts.values():
        host.ctx.post = twice
    assert fleet.run()[B].recorder.messages == 20


@dataclass(kw_only=True)
class Trainee(Actor):
    steps: int = 4
    twice: bool = False

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                ctx.train(torch.zeros(0), self.steps, 0)
                if self.twice:
                    ctx.train(torch.zeros(0), self.steps, 0)
            case Trained(steps=steps):
                self.absorbed += steps

    def model(self) -> Tensor:
        return torch.zeros(0)


SHARD = Shard(0, 1, 0, 1, 0)


def test_a_pace_makes_inner_steps_last_as_long_as_it_says() -> None:
    fleet = Fleet()
    fleet.add(Trainee(me=A), marks=(4,), shard=SHARD, step_time_s=0.02)
    recorder = fleet.run()[A].recorder
    assert 0.08 <= recorder.compute_s[A] < 0.2
    assert [(span.what, span.node) for span in recorder.spans] == [("compute", A)]


def test_two_jobs_at_once_are_an_error() -> None:
    fleet = Fleet()
    fleet.add(Trainee(me=A, twice=True), marks=(4,), shard=SHARD, step_time_s=0.05)
    with pytest.raises(
        TrainingError,
        match=r"^east/a asked to train while it is training: a method's worker has one job at a "
        r"time$",
    ):
        fleet.run()


def test_a_server_cannot_train() -> None:
    fleet = Fleet()
    fleet.add(Trainee(me=A), marks=(4,))
    with pytest.raises(
        TrainingError, match=r"^east/a asked to train and is no worker of the topology$"
    ):
        fleet.run()


def test_a_method_that_fails_is_named_with_its_place() -> None:
    @dataclass(kw_only=True)
    class Broken(Actor):
        def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
            raise KeyError("nothing here")

    fleet = Fleet()
    fleet.add(Trainee(me=A), marks=(4,), shard=SHARD)
    fleet.hosts[A].node.actor = Broken(me=A)  # a local class cannot be pickled
    with pytest.raises(
        TrainingError, match=r"^east/a failed at .*test_host.py:\d+: KeyError: 'nothing here'$"
    ):
        fleet.run()


def test_a_status_says_what_a_host_waits_for() -> None:
    fleet = Fleet()
    fleet.add(Reducer(me=A, group=(A, B), vector=torch.zeros(2), rounds=1), marks=(1,))
    fleet.add(Chatter(me=B), marks=())
    fleet.add(Trainee(me=C, steps=1000), shard=SHARD, step_time_s=0.01)
    said: dict[NodeId, str] = {}

    def look() -> bool:
        said.update({node: host.status().doing for node, host in fleet.hosts.items()})
        return said[A].startswith("waits in") and said[C].startswith("trains")

    fleet.run(until=look)
    assert said[A] == "waits in all-reduce 0 of 2 for east/b"
    assert said[B] == "waits for a message"
    assert said[C].startswith("trains since 0.")


def test_random_numbers_are_the_simulators() -> None:
    fleet = Fleet()
    fleet.add(Chatter(me=A))
    fleet.add(Chatter(me=B), run=Run(1, 1, 7))
    assert fleet.hosts[B].ctx.rng.random() == np.random.default_rng((7, 1)).random()


# Lives


def test_mail_of_an_earlier_life_is_dropped_and_that_of_a_later_one_waits_for_the_news() -> None:
    inbox = Inbox(epoch=1)
    inbox.accept(letter(0))
    assert inbox.accept(letter(0, lives=(1, 0))) == []
    assert inbox.accept(letter(1, lives=(1, 0))) == []
    inbox.lost(A)
    assert inbox.accept(letter(1)) == []
    assert [(e.lives, e.number) for e in inbox.joined(A, 1)] == [((1, 0), 0), ((1, 0), 1)]
    assert inbox.accept(letter(2)) == []
    assert [e.number for e in inbox.accept(letter(2, lives=(1, 0)))] == [2]
    assert not inbox.early


def test_mail_for_an_earlier_life_of_mine_is_dropped() -> None:
    inbox = Inbox(epoch=1, life=1)
    assert inbox.accept(letter(0)) == []
    assert [e.number for e in inbox.accept(letter(0, lives=(0, 1)))] == [0]


def test_what_is_early_from_one_who_is_lost_is_not_heard_in_its_next_life() -> None:
    inbox = Inbox(epoch=1)
    inbox.accept(letter(1))
    inbox.lost(A)
    assert inbox.joined(A, 1) == []
    assert not inbox.early


@dataclass(kw_only=True)
class Listener(Actor):
    """Keeps what it is told."""

    others: tuple[NodeId, ...] = ()
    heard: list[str] = field(default_factory=list)

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        self.heard.append(f"{type(message).__name__} {getattr(message, 'node', '')}".strip())
        if isinstance(message, Joined) and message.node != self.me:
            ctx.send(message.node, Start())

    def peers(self) -> tuple[NodeId, ...]:
        return self.others


def lone(actor: Actor, posted: list[tuple[NodeId, Envelope]], **setup: Any) -> Host:
    usual = {"task": NoTask(), "run": Run(1, 1, 0), "shard": None}
    told = HostSetup(pickle.dumps(actor), 0, **{**usual, **PLAIN, **setup})
    return Host(told, lambda to, envelope: posted.append((to, envelope)))


PLAIN: dict[str, Any] = {"marks": (), "step_time_s": 0.0, "epoch": 1}


def test_an_actor_is_told_of_its_peers_and_nothing_is_sent_to_the_lost() -> None:
    posted: list[tuple[NodeId, Envelope]] = []
    host = lone(Listener(me=A, others=(B,)), posted)
    host.begin()
    host.handle(News(B))
    host.handle(News(C))
    host.ctx.send(B, Start())
    assert posted == []
    host.handle(News(B, life=2))
    assert host.actor.heard == ["Start", "Lost east/b", "Joined east/b"]  # type: ignore[attr-defined]
    assert [(to, e.lives, e.number) for to, e in posted] == [(B, (0, 2), 0)]


def test_a_host_that_is_started_again_is_told_that_it_is_there_and_who_is_not() -> None:
    host = lone(
        Listener(me=A, others=(B, C)), [], begins="restart", membership=Membership(1, gone=(C,))
    )
    host.begin()
    assert host.actor.heard == ["Joined east/a", "Lost west/c"]  # type: ignore[attr-defined]


# Bad updates


@dataclass(kw_only=True)
class Server(Actor):
    """Adds up what it gets, and keeps what is refused."""

    theta: Tensor
    refused: list[NodeId] = field(default_factory=list)

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Delta(gradient=gradient):
                self.theta += gradient
            case Refused(update=Delta()):
                self.refused.append(sender)

    def model(self) -> Tensor:
        return self.theta


def test_a_bad_update_is_refused_and_its_sender_named() -> None:
    config = ScreeningConfig(warm_up=2, multiple=10)
    host = lone(Server(me=A, theta=torch.zeros(2)), [], screening=config, parameters=2)
    host.begin()
    for number, (sender, value) in enumerate(
        [(B, 1.0), (B, 1.0), (C, torch.nan), (B, 11.0), (B, 9.0)]
    ):
        numbers = {B: [0, 1, None, 2, 3], C: [None, None, 0]}[sender]
        update = Envelope(
            sender,
            1,
            (0, 0),
            numbers[number] or 0,
            0.0,
            Delta,
            contents(Delta(torch.tensor([value, 0.0]), 1)),
        )
        host.deliver(update)
        item = host.mailbox.get()
        assert item is not None
        if sender == C or value == 11.0:
            with pytest.warns(
                UserWarning, match=rf"^an update of {sender} is refused after [\d.]+ s: its? "
            ):
                host.handle(item)
        else:
            host.handle(item)
    assert host.actor.theta.tolist() == [11.0, 0.0]  # type: ignore[attr-defined]
    assert host.actor.refused == [C, B]  # type: ignore[attr-defined]
    assert host.status().refused == {C: 1, B: 1}


@pytest.mark.filterwarnings("ignore:an update of")
def test_a_bad_contribution_is_not_in_the_mean_and_all_are_told() -> None:
    group = (A, B, C)
    heard: dict[NodeId, Reduced] = {}

    @dataclass(kw_only=True)
    class Reducing(Reducer):
        def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
            if isinstance(message, Reduced):
                heard[self.me] = message
                self.absorbed += 1
            else:
                ctx.all_reduce(self.group, self.vector)

    fleet = Fleet()
    for me in group:
        vector = torch.tensor([torch.nan, 1.0]) if me == B else torch.tensor([2.0, 4.0])
        fleet.add(
            Reducer(me=me, group=group, vector=vector, rounds=1),
            marks=(1,),
            screening=ScreeningConfig(),
            parameters=2,
        )
        fleet.hosts[me].node.actor = Reducing(
            me=me, group=group, vector=vector, rounds=1
        )  # a local class cannot be pickled
    records = fleet.run()
    for me in group:
        assert heard[me].mean.tolist() == [2.0, 4.0]
        assert heard[me].group == group
        assert heard[me].refused == (B,)
    assert records[B].recorder.refused == {B: 1}


# Saves


def trained(tmp_path: Path, **setup: Any) -> Host:
    """A NoLoCo worker with a real model that has taken 10 inner steps, and may save its part."""
    chosen = recipe("noloco", topology={"regions": {"east": [1.0]}})
    fleet = Fleet()
    run = Run(200, 1, 0)
    replica = Replica(make_task(chosen.task), run, torch.device("cpu"))
    world = World(chosen.topology.workers, replica.layout.parameters, 0)
    [actor] = methods.load("noloco").build(
        chosen.config, world, replica.layout.read(replica.module)
    )
    folder = SaveFolder(tmp_path / "east/w0", "the recipe")
    fleet.add(
        actor,
        marks=(10,),
        task=chosen.task,
        run=run,
        shard=Shard(0, 1, 0, 1, 0),
        save_folder=folder,
        **setup,
    )
    host = fleet.hosts[actor.me]
    if not setup:
        fleet.run()
        host.node.busy = False  # what it began after the last mark was not finished
    return host


def test_a_host_goes_on_from_its_save(tmp_path: Path) -> None:
    before = trained(tmp_path)
    before.save()
    after = trained(tmp_path, begins="restart", membership=Membership(1))
    assert after.load() == []
    assert isinstance(before.compute.inner, Solo)
    assert isinstance(after.compute.inner, Solo)
    assert torch.equal(after.actor.phi, before.actor.phi)  # type: ignore[attr-defined]
    assert (after.actor.outer_steps, after.compute.batch, after.status().events) == (
        before.actor.outer_steps,
        before.compute.batch,
        before.status().events,
    )
    assert all(
        torch.equal(a, b) for a, b in zip(after.compute.state, before.compute.state, strict=True)
    )
    assert after.ctx.rng.random() == before.ctx.rng.random()
    assert after.ctx.recorder.trainings == before.ctx.recorder.trainings


def test_a_host_saves_what_rounding_has_left_over(tmp_path: Path) -> None:
    before = trained(tmp_path)
    before.node.coder.left = {"Exchange.gradient": torch.arange(3.0)}
    before.save()
    after = trained(tmp_path, begins="restart", membership=Membership(1), wire="int8")
    assert after.load() == []
    assert after.node.coder.left["Exchange.gradient"].tolist() == [0.0, 1.0, 2.0]
    assert after.ctx.reduces.coder is after.node.coder


def test_a_damaged_save_is_named_and_the_one_before_it_is_taken(tmp_path: Path) -> None:
    host = trained(tmp_path)
    host.save()
    first = host.status().events
    host.handled += 1
    host.save()
    newest = tmp_path / f"east/w0/event-{first + 1:012}/tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    again = trained(tmp_path, begins="restart")
    [text] = again.load()
    assert re.fullmatch(
        r"checkpoint refused: .*event-\d+/tensors.safetensors has [\d,]+ bytes and should have .*",
        text,
    )
    assert again.status().events == first
    for path in tmp_path.glob("east/w0/*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(
        UserError,
        match=r"^no checkpoint to go on from in .*east/w0: .*manifest.json is not a manifest",
    ):
        trained(tmp_path, begins="restart").load()


def test_a_save_of_another_run_is_refused(tmp_path: Path) -> None:
    trained(tmp_path).save()
    host = trained(tmp_path, begins="restart")
    host.setup = replace(host.setup, save_folder=SaveFolder(tmp_path / "east/w0", "another recipe"))
    with pytest.raises(UserError, match=r"manifest\.json is that of another run"):
        host.load()


def test_who_has_no_save_begins_anew_but_for_a_server_of_a_whole_run_that_goes_on(
    tmp_path: Path,
) -> None:
    assert trained(tmp_path, begins="resume").load() == [
        "east/w0 has no save to go on from, and begins anew"
    ]
    folder = SaveFolder(tmp_path / "server", "the recipe")
    assert lone(Listener(me=A), [], begins="restart", save_folder=folder).load() == [
        "east/a has no save to go on from, and begins anew"
    ]
    with pytest.raises(
        UserError, match=r"^no checkpoint to go on from in .*/server: there is none$"
    ):
        lone(Listener(me=A), [], begins="resume", save_folder=folder).load()


def test_a_save_waits_until_inner_steps_have_ended_and_is_from_before_their_answer(
    tmp_path: Path,
) -> None:
    fleet = Fleet()
    fleet.add(
        Trainee(me=A, steps=5),
        marks=(5,),
        shard=SHARD,
        step_time_s=0.05,
        save_folder=SaveFolder(tmp_path / "a", ""),
    )
    host = fleet.hosts[A]
    with ThreadPoolExecutor(1) as threads:
        saving = None

        def until() -> bool:
            nonlocal saving
            if saving is None and host.node.busy:
                saving = threads.submit(host.save)
            return host.marks.complete.is_set()

        fleet.run(until=until)
        assert saving is not None
        saving.result(timeout=10)
    again = lone(Trainee(me=A), [], begins="restart", save_folder=SaveFolder(tmp_path / "a", ""))
    assert again.load() == []
    assert (again.actor.absorbed, again.compute.batch) == (0, 5)


def test_a_save_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "east").write_text("a file where the folder should be")
    with pytest.raises(
        TrainingError,
        match=r"event-\d+: this checkpoint cannot be written: .*; there is none before it$",
    ):
        trained(tmp_path).save()


def test_a_host_answers_and_goes_on_while_its_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk is: silence would be taken for death."""
    writing, may_end = threading.Event(), threading.Event()
    write = checkpoint.write

    def slow(*arguments: Any) -> Path:
        writing.set()
        assert may_end.wait(60)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", slow)
    folder = SaveFolder(tmp_path / "a", "")
    host = lone(Listener(me=A, others=(B,)), [], save_folder=folder)
    host.begin()
    with ThreadPoolExecutor(1) as threads:
        saving = threads.submit(host.save)
        assert writing.wait(60)
        host.handle(News(B))
        assert (host.status().saving, host.status().events) == (True, 2)
        may_end.set()
        saving.result(timeout=60)
    assert not host.status().saving
    again = lone(Listener(me=A), [], begins="restart", save_folder=folder)
    again.load()
    assert again.actor.heard == ["Start"]  # type: ignore[attr-defined]  # as it was when asked


def test_a_host_answers_while_a_handler_takes_long() -> None:
    host = lone(Listener(me=A), [])
    host.begin()
    with host.lock:
        status = host.status()
    assert (status.events, status.doing, status.holds) == (1, "waits for a message", False)


# A loss that is not finite


def test_after_a_bad_loss_a_host_hears_nothing_until_its_new_life(tmp_path: Path) -> None:
    folder = SaveFolder(tmp_path / "a", "")
    host = lone(Listener(me=A, others=(B, C)), [], shard=SHARD, save_folder=folder)
    host.begin()
    host.ctx.after(0, Trained(torch.zeros(0), 1, ()))  # of the earlier life
    host.node.busy = True
    host.handle(JobFailed("worker east/a: the loss is nan"))
    event = host.events.get()
    assert event == BadLoss("worker east/a: the loss is nan", finished=True)
    host.handle(News(B))
    host.deliver(letter(0, C))
    host.begin_again(Membership(1, {}, (B,), 1))
    while not host.mailbox.empty():
        item = host.mailbox.get()
        assert item is not None
        host.handle(item)
    heard = host.actor.heard  # type: ignore[attr-defined]
    assert heard == ["Start", "Joined east/a", "Lost east/b"]
    assert not host.node.busy
    host.deliver(letter(0, C, lives=(0, 1)))
    item = host.mailbox.get()
    assert item is not None
    host.handle(item)
    assert heard[-1] == "Start"  # what is sent to its new life is heard
    host.handle(JobFailed("worker east/a: the loss is inf"))
    assert host.events.get() == BadLoss("worker east/a: the loss is inf", finished=False)


def test_after_a_bad_loss_the_optimizer_begins_anew_behind_the_bad_batch(tmp_path: Path) -> None:
    host = trained(tmp_path)
    phi, batch = host.actor.phi.clone(), host.compute.batch  # type: ignore[attr-defined]
    assert host.compute.state[0].flatten()[0]  # its optimizer has begun
    host.handle(JobFailed("not finite"))
    assert not host.compute.state[0].flatten()[0]
    assert torch.equal(host.actor.phi, phi)  # type: ignore[attr-defined]
    assert host.compute.batch == batch


# Evaluations


def test_a_host_evaluates_its_model_at_each_mark_with_or_without_training_itself() -> None:
    """A server too, which makes a replica only then."""
    chosen = recipe("halos")
    replica = Replica(make_task(chosen.task), Run(200, 1, 0), torch.device("cpu"))
    theta = replica.first.clone()
    [expected] = replica.evaluate(theta)
    for shard in (SHARD, None):
        host = lone(Server(me=A, theta=theta), [], task=chosen.task, shard=shard, marks=(0,))
        assert (host.compute.replica is None) == (shard is None)
        host.begin()
        host.compute.thread.shutdown(wait=True)
        assert [mark.loss for mark in host.marks.reached] == [expected]
        assert torch.equal(torch.from_numpy(host.part(0, 3, 8)), theta[3:8])


COUNTED = """
import torch
from archipel import Task

class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.batches += 1
        return self.weight * self.batches

def make():
    return Task(
        Counted,
        lambda model, x: model(x).mean(),
        lambda shard, i: torch.zeros(2),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        tokens_per_step=1,
    )
"""


def test_an_evaluation_has_the_integer_buffers_of_its_mark(tmp_path: Path) -> None:
    """They are part of the model, and the steps of the job under way are not in them yet."""
    (tmp_path / "task.py").write_text(COUNTED)
    task = UserTask(name=f"{tmp_path}/task.py:make")
    run = Run(200, 1, 0)
    theta = Replica(make_task(task), run, torch.device("cpu")).first.clone()
    host = lone(Server(me=A, theta=theta), [], task=task, run=run, shard=SHARD, marks=(0, 3))
    host.begin()
    host.compute.train(theta, 3, 0)
    job = host.mailbox.get()
    host.node.actor.absorbed = 3
    host.handle(job)
    host.compute.thread.shutdown(wait=True)
    assert [mark.loss for mark in host.marks.reached] == [0.0, 3.0]


def test_local_updates_are_counted_up_to_the_moment_of_the_model() -> None:
    record = Record(Recorder(), ((0.0, 0), (1.0, 1), (2.0, 3)), {})
    assert [record.local_updates_at(time_s) for time_s in (0.9, 1.0, 1.9, 2.0)] == [0, 1, 1, 3]
    assert Record(Recorder(), ((5.0, 7),), {}).local_updates_at(1.0) == 7


def test_a_task_that_fails_in_an_evaluation_is_named_with_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: Any) -> list[float]:
        raise ValueError("no validation data")

    monkeypatch.setattr(Replica, "evaluate", broken)
    chosen = recipe("halos")
    theta = Replica(make_task(chosen.task), Run(200, 1, 0), torch.device("cpu")).first.clone()
    host = lone(Server(me=A, theta=theta), [], task=chosen.task, marks=(0,))
    host.begin()
    host.compute.thread.shutdown(wait=True)
    [mark] = host.marks.reached
    assert re.fullmatch(
        r"east/a: the task failed at .*test_host.py:\d+: ValueError: no validation data",
        mark.failure or "",
    )
