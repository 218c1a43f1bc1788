"""The virtual clock: order, waiting, stopping, deadlocks, shared links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
from worlds import PROFILE, TINY, Quadratic, model_of, simulator

from archipel.actor import Actor, Context, Message, NodeId, Trained
from archipel.errors import Diverged, TrainingError, UserError
from archipel.run.census import Plan
from archipel.sim.topology import Link, RegionLink, Topology
from archipel.train.trainer import NoTraining

A, B, C = NodeId("a", "w0"), NodeId("b", "w0"), NodeId("b", "w1")


def two_regions(**fields: object) -> Topology:
    link = RegionLink(between=("a", "b"), **({"bandwidth_gbit_s": 0.008} | fields))
    return Topology(
        regions={"a": [1.0], "b": [1.0, 0.5]}, links=[link], local=Link(bandwidth_gbit_s=0.08)
    )


@dataclass(frozen=True, eq=False, slots=True)
class Note(Message):
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class Parcel(Message):
    theta: torch.Tensor
    number: int = 0


@dataclass(kw_only=True)
class Scripted(Actor):
    """Does `script[kind of message]` and writes down what it hears, and when."""

    script: dict[str, object] = field(default_factory=dict)
    heard: list[tuple[float, str]] = field(default_factory=list)
    theta: torch.Tensor = field(default_factory=lambda: torch.zeros(8))

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        self.heard.append((ctx.now, f"{type(message).__name__} from {sender}"))
        if isinstance(message, Trained):
            self.absorbed += message.steps
        if action := self.script.get(type(message).__name__):
            action(ctx, message)

    def model(self) -> torch.Tensor:
        return self.theta

    def peers(self) -> Iterable[NodeId]:
        return (A, B, C)


def run(actors: list[Actor], topology: Topology, plan: Plan, trainer: object = None):
    sim = simulator(
        "",
        trainer or Quadratic(),
        topology=topology,
        actors=actors,
        theta=torch.zeros(8),
        profile=TINY,
        plan=plan,
    )
    return sim, sim.run()


def test_a_message_takes_bytes_over_bandwidth_and_training_takes_steps_over_speed() -> None:
    a = Scripted(me=A, script={"Start": lambda ctx, _: ctx.send(B, Parcel(torch.zeros(8)))})
    b = Scripted(me=B, script={"Parcel": lambda ctx, _: ctx.train(torch.zeros(8), 3, 0)})
    c = Scripted(me=C, script={"Start": lambda ctx, _: ctx.train(torch.zeros(8), 2, 0)})
    sim, _ = run([a, b, c], two_regions(), Plan(steps=5))
    assert b.heard == [
        (0.0, "Start from b/w0"),
        (1.0, "Parcel from a/w0"),
        (4.0, "Trained from b/w0"),
    ]
    assert c.heard[-1] == (4.0, "Trained from b/w1")
    assert sim.now == 4.0


def test_events_at_one_time_keep_the_order_of_their_sequence_numbers() -> None:
    def start(ctx: Context, _: Message) -> None:
        for text in "xyz":
            ctx.after(1.0, Note(text))

    order: list[str] = []
    a = Scripted(me=A, script={"Start": start, "Note": lambda ctx, note: order.append(note.text)})
    b = Scripted(me=B, script={"Start": lambda ctx, _: ctx.train(torch.zeros(8), 9, 0)})
    run([a, b], two_regions(), Plan(steps=1))
    assert order == ["x", "y", "z"]


def test_jitter_never_reorders_messages_between_two_nodes() -> None:
    def start(ctx: Context, _: Message) -> None:
        for number in range(200):
            ctx.send(B, Parcel(torch.zeros(0), number))

    numbers: list[int] = []
    a = Scripted(me=A, script={"Start": start})
    b = Scripted(me=B, script={"Parcel": lambda ctx, parcel: numbers.append(parcel.number)})
    c = Scripted(me=C, script={"Start": lambda ctx, _: ctx.train(torch.zeros(8), 10**6, 0)})
    run([a, b, c], two_regions(latency_ms=500, jitter=1.0, bandwidth_gbit_s=100), Plan(steps=1))
    assert numbers == list(range(200))


def test_gradients_are_waited_for_only_when_they_are_due() -> None:
    """All workers' jobs are handed over before the first result is asked for, and results are asked
    for in virtual order.
    """
    log: list[str] = []

    class Lazy(Quadratic):
        def train(self, worker, theta, steps, progress, due_s):
            log.append(f"give {worker} due {due_s:g}")
            done = super().train(worker, theta, steps, progress, due_s)

            class Promise:
                def result(self):
                    log.append(f"take {worker}")
                    return done.value

            return Promise()

    actors = [
        Scripted(me=node, script={"Start": lambda ctx, _: ctx.train(torch.zeros(8), 1, 0)})
        for node in (C, A, B)
    ]
    run(actors, two_regions(), Plan(steps=3), Lazy())
    assert log == [
        "give b/w1 due 2",
        "give a/w0 due 1",
        "give b/w0 due 1",
        "take a/w0",
        "take b/w0",
        "take b/w1",
    ]


def test_an_all_reduce_starts_when_the_last_member_calls_and_gives_all_the_mean() -> None:
    means: list[float] = []

    def script(value: float) -> dict[str, object]:
        return {
            "Start": lambda ctx, _: ctx.train(torch.zeros(8), 1, 0),
            "Trained": lambda ctx, _: ctx.all_reduce((A, B, C), torch.full((8,), value)),
            "Reduced": lambda ctx, reduced: means.append(float(reduced.mean[0])),
        }

    actors = [
        Scripted(me=node, script=script(value)) for node, value in ((A, 1.0), (B, 2.0), (C, 6.0))
    ]
    sim = simulator(
        "",
        Quadratic(),
        topology=two_regions(),
        actors=actors,
        theta=torch.zeros(8),
        profile=TINY,
        plan=Plan(seconds=100),
    )
    with pytest.raises(TrainingError, match="deadlock"):
        sim.run()
    assert means == [3.0, 3.0, 3.0]
    # The slowest trains until 2 s; then 2·(3 − 1) steps of a third of 1 MB over the slow link at 1
    # MB/s.
    assert [time for time, heard in actors[0].heard if heard.startswith("Reduced")] == [
        pytest.approx(2 + 4 / 3)
    ]


def test_a_deadlock_names_who_waits_for_what() -> None:
    """C never joins, and B's message never comes."""
    a = Scripted(me=A, script={"Start": lambda ctx, _: ctx.all_reduce((A, C), torch.zeros(8))})
    with pytest.raises(TrainingError) as error:
        run([a, Scripted(me=B), Scripted(me=C)], two_regions(), Plan(steps=1))
    assert str(error.value) == (
        "deadlock at 0 s after 0 inner steps: a/w0 waits in an all-reduce of 2 for b/w1, "
        "b/w0 waits for a message, b/w1 waits for a message"
    )


def test_a_noloco_worker_in_a_deadlock_names_its_peer() -> None:
    """Its peer is left out of the run after it has been drawn."""
    sim = simulator(
        "noloco",
        Quadratic(),
        topology=Topology(regions={"a": [1.0, 1.0]}),
        settings={"inner_steps": 2},
    )
    silent = Scripted(me=NodeId("a", "w1"))
    sim.state.nodes[silent.me].actor = silent
    with pytest.raises(
        TrainingError,
        match=r"a/w0 waits for the exchange of outer step 0 from a/w1, a/w1 waits for a message$",
    ):
        sim.run()


def test_a_message_to_nobody_is_an_error() -> None:
    a = Scripted(
        me=A, script={"Start": lambda ctx, _: ctx.send(NodeId("b", "nobody"), Note("hello"))}
    )
    with pytest.raises(
        TrainingError, match=r"^a/w0 sent Note to b/nobody, and there is no such node$"
    ):
        run([a], two_regions(), Plan(steps=1))


def test_training_twice_at_once_is_an_error() -> None:
    def twice(ctx: Context, _: Message) -> None:
        ctx.train(torch.zeros(8), 1, 0)
        ctx.train(torch.zeros(8), 1, 0)

    with pytest.raises(TrainingError, match=r"^a/w0 asked to train while it is training"):
        run([Scripted(me=A, script={"Start": twice})], two_regions(), Plan(steps=1))


def test_two_transfers_share_a_link_fairly_and_one_has_it_alone_again() -> None:
    """1 MB and 1 MB half a second later at 1 MB/s: the first ends at 1.5 s, the second at 2 s.
    Unshared: 1 s and 1.5 s.
    """
    arrivals: dict[str, list[float]] = {}
    for sharing in ("fair", "none"):
        topology = two_regions().model_copy(update={"sharing": sharing})
        times = arrivals[sharing] = []

        def later(ctx: Context, _: Message) -> None:
            ctx.send(A, Parcel(torch.zeros(8)))

        b = Scripted(me=B, script={"Start": later})
        c = Scripted(
            me=C, script={"Start": lambda ctx, _: ctx.after(0.5, Note("go")), "Note": later}
        )
        a = Scripted(me=A, script={"Parcel": lambda ctx, _, times=times: times.append(ctx.now)})
        a.script["Start"] = lambda ctx, _: ctx.train(torch.zeros(8), 50, 0)
        run([a, b, c], topology, Plan(steps=50))
    assert arrivals == {
        "fair": [pytest.approx(1.5), pytest.approx(2.0)],
        "none": [pytest.approx(1.0), pytest.approx(1.5)],
    }


def test_transfers_in_opposite_directions_do_not_share() -> None:
    topology = two_regions().model_copy(update={"sharing": "fair"})
    times: list[float] = []
    script = {"Parcel": lambda ctx, _: times.append(ctx.now)}
    a = Scripted(
        me=A, script={**script, "Start": lambda ctx, _: ctx.send(B, Parcel(torch.zeros(8)))}
    )
    b = Scripted(
        me=B, script={**script, "Start": lambda ctx, _: ctx.send(A, Parcel(torch.zeros(8)))}
    )
    c = Scripted(me=C, script={"Start": lambda ctx, _: ctx.train(torch.zeros(8), 50, 0)})
    run([a, b, c], topology, Plan(steps=50))
    assert times == [pytest.approx(1.0)] * 2


def test_a_run_ends_at_its_seconds() -> None:
    sim = simulator(
        "diloco", Quadratic(), topology="halos-4x4", plan=Plan(steps=10**9, seconds=300.0)
    )
    assert sim.run() == "seconds"
    assert sim.now == 300.0
    assert sim.holders()[0].outer_steps == 3  # rounds of 97.9 s


def test_a_run_ends_at_its_target_loss() -> None:
    trainer = Quadratic()
    sim = simulator(
        "diloco", trainer, topology="halos-4x4", plan=Plan(10**9, None, 1e-3), evaluate_every=1
    )
    assert sim.run() == "target_loss"
    losses = [evaluation.loss for evaluation in sim.recorder.evaluations]
    assert losses[-1] <= 1e-3
    assert min(losses[:-1]) > 1e-3


def test_evaluations_lie_at_equal_marks() -> None:
    sim = simulator("halos", Quadratic(), topology="halos-4x4", steps=10_000, evaluate_every=1000)
    sim.run()
    steps = [evaluation.inner_steps for evaluation in sim.recorder.evaluations]
    assert steps[0] == 0
    # Each is the first model that has absorbed the mark.
    assert all(
        mark <= step < mark + 1000 for mark, step in zip(range(0, 10_001, 1000), steps, strict=True)
    )


def test_the_spread_of_replicas_is_the_published_one() -> None:
    sim = simulator(
        "noloco",
        Quadratic(),
        topology="halos-4x4",
        settings={"inner_steps": 5},
        steps=400,
        evaluate_every=100,
    )
    for i, actor in enumerate(sim.actors.values()):
        actor.phi += i
    sim.run()
    parts = torch.stack(sim.parts())
    last = sim.recorder.evaluations[-1]
    assert last.replica_std == pytest.approx(
        float((parts - parts.mean(dim=0)).square().mean().sqrt()), rel=1e-5
    )
    assert last.loss == pytest.approx(float(model_of(sim).square().sum() / 2), rel=1e-5)
    assert last.replica_loss == pytest.approx(float(parts.square().sum(dim=1).mean() / 2), rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run_and_says_when() -> None:
    class Exploding(Quadratic):
        def train(self, worker, theta, steps, progress, due_s):
            class Promise:
                def result(self):
                    raise Diverged(f"worker {worker}: the training loss is nan at its inner step 0")

            return Promise()

    sim = simulator("diloco", Exploding())
    with (
        pytest.raises(Diverged) as error,
        pytest.warns(UserWarning, match=r"after 7\.6 s; it is restarted from the newest model$"),
    ):
        sim.run()
    assert str(error.value) == (
        "worker r0/w0: the training loss is nan at its inner step 0, after 22.9 s on the virtual "
        "clock, 3 times in a row; "
        "try a lower learning rate"
    )


def test_a_run_whose_model_never_changes_is_stopped() -> None:
    """K larger than all updates of the run: the local server would never report."""
    sim = simulator(
        "halos", Quadratic(), topology="halos-4x4", settings={"accumulate": 10**9}, steps=100
    )
    with pytest.raises(
        UserError,
        match=r"^the workers have taken 1\d,\d\d\d inner steps since the model to take home last "
        r"changed",
    ):
        sim.run()


def test_one_long_round_is_no_such_run() -> None:
    sim = simulator(
        "diloco", Quadratic(), topology="halos-4x4", settings={"inner_steps": 1000}, steps=100
    )
    sim.run()
    assert sim.inner_steps == 16_000


def test_idle_time_counts_a_step_that_is_cut_by_the_end_of_the_run() -> None:
    """A trains 1 of 1 s; C's 2 s end after the run does."""
    a = Scripted(me=A, script={"Start": lambda ctx, _: ctx.train(torch.zeros(8), 1, 0)})
    c = Scripted(me=C, script={"Start": lambda ctx, _: ctx.train(torch.zeros(8), 1, 0)})
    sim, _ = run([a, c], two_regions(), Plan(steps=1))
    assert sim.now == 1.0
    assert sim.recorder.idle_fraction([A, C], sim.now) == 0.0
    assert sim.recorder.idle_fraction([A, B, C], sim.now) == pytest.approx(1 / 3)


def test_random_numbers_of_a_node_depend_on_the_seed_and_the_node_alone() -> None:
    def draws(seed: int) -> list[float]:
        sim = simulator("noloco", Quadratic(), topology="halos-4x4", seed=seed)
        return [float(context.rng.random()) for context in sim.engine.contexts.values()]

    assert draws(0) == draws(0)
    assert len({*draws(0), *draws(1)}) == 32


def test_the_profile_counts_each_vector_of_a_message() -> None:
    """NoLoCo's exchange carries two vectors, and one worker left alone sends nothing."""
    sim = simulator(
        "noloco",
        Quadratic(),
        topology=Topology(regions={"a": [1.0] * 3}),
        settings={"inner_steps": 1},
        steps=3,
    )
    sim.run()
    assert sim.recorder.sent_bytes == sim.recorder.messages * 2 * PROFILE.model_bytes
    assert sim.recorder.messages == 2


@pytest.mark.parametrize("method", ["sync_sgd", "diloco", "noloco", "async_local_sgd"])
def test_many_workers_take_their_one_round_of_few_steps(method: str) -> None:
    """A round of all workers may be longer than the plan: that is no run without outer steps."""
    sim = simulator(method, NoTraining(), topology="internet-300", theta=torch.zeros(0), steps=10)
    assert sim.run() == "steps"
    assert sim.inner_steps >= 10
    assert sim.holders()[0].outer_steps <= 1 or method == "async_local_sgd"


def test_setting_up_and_losing_nodes_grows_with_their_number_alone() -> None:
    """Nodes that give one tuple of peers share one set of them."""
    sim = simulator("noloco", NoTraining(), topology="internet-50", theta=torch.zeros(0))
    assert len({id(peers) for peers in sim.engine.setting.peers.values()}) == 1
