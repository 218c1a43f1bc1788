"""`run/wire.py` and what both clocks make of it: what is sent is what counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from worlds import PROFILE, Quadratic, simulator

from archipel import report, simulation
from archipel.actor import Actor, Context, Message, NodeId, Reduced, Start, Update
from archipel.parameter_server import Delta, Model
from archipel.recipe import parse_recipe
from archipel.run import wire
from archipel.run.census import Plan
from archipel.run.codec import BLOCK, CODECS, Codec, encode
from archipel.run.wire import Coder
from archipel.sim.topology import Topology
from archipel.train.trainer import NoTraining
from archipel.yamlfile import parse

A, B = NodeId("a", "w0"), NodeId("b", "w0")
NUMEL = 8
PAIR = Topology(regions={"a": [1.0], "b": [1.0]}, default={"bandwidth_gbit_s": 1.0})
MODEL_S = PROFILE.model_bytes * 8 / 1e9
"""Seconds of a whole model on that link."""


@dataclass(frozen=True, eq=False, slots=True)
class Parcel(Message):
    """Whatever tensors it is given; it does not say what it weighs."""

    first: Tensor
    number: int = 7
    second: Tensor | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Quarter(Message):
    """A fragment that says so, for runs without gradients."""

    part: Tensor

    @property
    def weight(self) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("message", "trained", "untrained"),
    [
        (Parcel(torch.zeros(NUMEL)), 1.0, 1.0),
        (Parcel(torch.zeros(NUMEL), second=torch.zeros(NUMEL)), 2.0, 2.0),
        (Parcel(torch.zeros(2)), 0.25, 1.0),
        (Parcel(torch.zeros(NUMEL, dtype=torch.int8)), 0.25, 1.0),
        (Parcel(torch.zeros(NUMEL, dtype=torch.float64)), 2.0, 1.0),
        (Parcel(torch.zeros(0)), 0.0, 1.0),
        (Parcel(torch.zeros(())), 1 / NUMEL, 1.0),
        (Start(), 0.0, 0.0),
        (Quarter(torch.zeros(2)), 0.25, 0.25),
    ],
)
def test_a_message_weighs_what_its_tensors_do(
    message: Message, trained: float, untrained: float
) -> None:
    assert wire.weight(message, NUMEL) == trained
    assert wire.weight(message, 0) == untrained


def test_the_vectors_of_a_message_come_in_the_order_of_its_fields() -> None:
    one, other = torch.zeros(1), torch.zeros(2)
    assert [len(vector) for vector in wire.vectors(Parcel(one, 3, other))] == [1, 2]
    assert wire.vectors(Parcel(one)) == [one]


@pytest.mark.parametrize(
    ("entries", "numel", "share"), [(NUMEL, NUMEL, 1.0), (2, NUMEL, 0.25), (0, 0, 1.0)]
)
def test_a_vector_is_its_entries_part_of_the_whole(entries: int, numel: int, share: float) -> None:
    assert wire.share(torch.zeros(entries), numel) == share


@dataclass(kw_only=True)
class Sender(Actor):
    """Sends one message at the start."""

    message: Message

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        if isinstance(message, Start):
            ctx.send(B, self.message)

    def model(self) -> Tensor:
        return torch.zeros(NUMEL)

    def peers(self) -> tuple[NodeId, ...]:
        return (B,)


@dataclass(kw_only=True)
class Receiver(Actor):
    """Ends the run when something has come."""

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        if not isinstance(message, Start):
            self.absorbed = 1


@dataclass(kw_only=True)
class Reducer(Actor):
    """Averages a fragment once."""

    vector: Tensor
    share: float | None
    difference: bool = False

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                ctx.all_reduce((A, B), self.vector, 0, self.share, difference=self.difference)
            case Reduced():
                self.absorbed = 1

    def model(self) -> Tensor:
        return torch.zeros(NUMEL)


def sent(actors: list[Actor], trainer: Any, numel: int, **more: Any) -> tuple[float, float]:
    """Bytes of a run of one inner step, in models, and the models that its time stands for."""
    sim = simulator(
        "none",
        trainer,
        topology=PAIR,
        theta=torch.zeros(numel),
        plan=Plan(steps=1),
        actors=actors,
        **more,
    )
    sim.run()
    return sim.recorder.sent_bytes / PROFILE.model_bytes, sim.now / MODEL_S


@pytest.mark.parametrize(
    ("message", "models"),
    [
        (Parcel(torch.zeros(NUMEL)), 1.0),
        (Parcel(torch.zeros(2)), 0.25),
        (Parcel(torch.zeros(NUMEL, dtype=torch.int8)), 0.25),
        (Quarter(torch.zeros(2)), 0.25),
    ],
)
def test_a_fragment_costs_its_part_of_a_model(message: Message, models: float) -> None:
    actors = [Sender(me=A, message=message), Receiver(me=B)]
    assert sent(actors, Quadratic(), NUMEL) == pytest.approx((models, models), rel=1e-12)


def test_a_fragment_that_states_its_weight_costs_the_same_without_gradients() -> None:
    actors = [Sender(me=A, message=Quarter(torch.zeros(0))), Receiver(me=B)]
    assert sent(actors, NoTraining(), 0) == pytest.approx((0.25, 0.25), rel=1e-12)


@pytest.mark.parametrize(
    ("numel", "entries", "share"),
    [(NUMEL, 8, None), (NUMEL, 2, None), (0, 0, 0.25), (0, 0, None)],
)
def test_an_all_reduce_costs_its_share_of_a_model(
    numel: int, entries: int, share: float | None
) -> None:
    """A ring of two passes on the whole vector once in each direction: 2(n − 1)/n = 1."""
    expected = share if share is not None else (entries / numel if numel else 1.0)
    actors = [Reducer(me=me, vector=torch.zeros(entries), share=share) for me in (A, B)]
    trainer = Quadratic() if numel else NoTraining()
    bytes_sent, seconds = sent(actors, trainer, numel)
    assert bytes_sent == pytest.approx(2 * expected, rel=1e-12)
    assert seconds == pytest.approx(expected, rel=1e-12)


# In fewer bits

SMALL: tuple[Codec, ...] = ("bf16", "int8", "int4")
FEW: tuple[Codec, ...] = ("int8", "int4")
OF_AN_ENTRY = {"fp32": 4.0, "bf16": 2.0, "int8": 1.015625, "int4": 0.515625}
"""Bytes: a code, and 2 / 128 of a scale."""


@dataclass(frozen=True, eq=False, slots=True)
class Both(Update):
    """A difference, a value, and what is neither."""

    values: ClassVar[tuple[str, ...]] = ("theta",)

    theta: Tensor
    counts: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class HalfDelta(Delta):
    """Half of a model's difference, and says so."""

    @property
    def weight(self) -> float:
        return 0.5


def both(numel: int) -> Both:
    return Both(torch.randn(numel), torch.randn(numel), torch.randn(numel))


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_message_weighs_in_fewer_bits(codec: Codec) -> None:
    numel, statistics = 10 * BLOCK, 2 * BLOCK
    value = 2.0 if codec != "fp32" else 4.0
    trained = wire.weight(both(numel), numel, codec, numel)
    assert trained == (OF_AN_ENTRY[codec] + value + 4.0) / 4
    empty = wire.weight(both(0), 0, codec, 0)
    assert empty == trained  # where nothing is trained, it weighs the same
    behind = wire.weight(both(numel), numel, codec, numel - statistics)
    assert behind == pytest.approx(
        (8 * OF_AN_ENTRY[codec] + 2 * 4 + 8 * value + 2 * 4 + 10 * 4.0) / 40, rel=1e-12
    )
    for message, entries in (
        (HalfDelta(torch.zeros(0), 1), 0),
        (HalfDelta(torch.ones(640), 1), 640),
    ):
        stated = wire.weight(message, 2 * entries, codec, 2 * entries)
        assert stated == 0.5 * OF_AN_ENTRY[codec] / 4


@pytest.mark.parametrize("codec", CODECS)
def test_what_weighs_is_what_is_packed(codec: Codec) -> None:
    """With a short last block and statistics behind."""
    numel, parameters = 3 * BLOCK + 5, 2 * BLOCK + 9
    message = both(numel)
    codes = Coder(codec, parameters).pack(message).codes
    assert set(codes) == (set() if codec == "fp32" else {"gradient", "theta"})
    in_all = sum(
        codes[name].nbytes if name in codes else 4 * numel
        for name in ("gradient", "theta", "counts")
    )
    assert wire.weight(message, numel, codec, parameters) == in_all / (4 * numel)


@pytest.mark.parametrize("codec", SMALL)
def test_what_is_neither_difference_nor_value_arrives_as_it_was(codec: Codec) -> None:
    message = both(BLOCK)
    arrived = Coder(codec, BLOCK).arrived(message)
    assert arrived.counts is message.counts
    assert torch.equal(arrived.theta, encode(message.theta, "bf16", BLOCK).decode())
    assert torch.equal(arrived.gradient, encode(message.gradient, codec, BLOCK).decode())
    for odd in (torch.tensor(1.7), torch.ones(3, 3) / 3, torch.ones(3, dtype=torch.float64) / 3):
        same = Coder(codec, BLOCK).arrived(Model(odd, 0))
        assert same.theta is odd


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_made_of_messages_that_no_codec_changes(codec: Codec) -> None:
    coder = Coder(codec, 0 if codec != "fp32" else BLOCK)  # nothing is trained
    message = both(0 if codec != "fp32" else BLOCK)
    assert coder.arrived(message) is message
    start = Start()
    assert Coder(codec, BLOCK).arrived(start) is start


DIFFERENCES = st.lists(
    st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=12
)


@pytest.mark.parametrize("codec", FEW)
@given(rows=DIFFERENCES)
def test_all_that_arrives_is_all_that_was_meant_but_for_one_rounding(
    codec: Codec, rows: list[list[float]]
) -> None:
    coder = Coder(codec, 2)  # the third entry is a statistic
    meant, arrived = torch.zeros(3), torch.zeros(3)
    for row in rows:
        message = Delta(torch.tensor([*row[:2], 1.0]), 1)
        # Small ones, but none beside which what is left of the one before would be absurd.
        message.gradient[0] += 2.0
        meant += message.gradient
        came = coder.arrived(message)
        assert came.gradient[2] == 1.0
        arrived += came.gradient
        coder.last = None
    torch.testing.assert_close(
        arrived[:2] + coder.left["Delta.gradient"], meant[:2], rtol=0, atol=1e-5
    )
    assert float(coder.left["Delta.gradient"].abs().max()) <= 3.6 / {"int8": 254, "int4": 14}[codec]


def test_bf16_keeps_nothing() -> None:
    coder = Coder("bf16", 3)
    coder.pack(Delta(torch.rand(3), 1))
    assert coder.left == {}


@pytest.mark.parametrize("codec", FEW)
def test_what_is_left_of_an_absurd_difference_is_dropped(codec: Codec) -> None:
    """Its receiver has refused it; it would have to refuse all those that carry what is left."""
    coder, usual = Coder(codec, 300), torch.rand(300)
    coder.pack(Delta(usual * 1e30, 1))
    coder.last = None
    assert float(coder.left["Delta.gradient"].abs().max()) > 1e27
    arrived = coder.arrived(Delta(usual, 1))
    assert torch.equal(arrived.gradient, encode(usual, codec, 300).decode())


@pytest.mark.parametrize("codec", FEW)
def test_of_what_is_not_finite_nothing_is_left(codec: Codec) -> None:
    coder = Coder(codec, 2 * BLOCK)
    bad = torch.rand(2 * BLOCK)
    bad[3] = torch.nan
    assert coder.arrived(Delta(bad, 1)).gradient[:BLOCK].isnan().all()
    left = coder.left["Delta.gradient"]
    assert left.isfinite().all()
    assert not left[:BLOCK].any()
    assert left[BLOCK:].any()
    coder.last = None
    assert coder.arrived(Delta(torch.rand(2 * BLOCK), 1)).gradient.isfinite().all()


def test_a_message_to_several_is_coded_once_and_all_get_the_same() -> None:
    coder, message = Coder("int4", 3), Delta(torch.rand(3), 1)
    first = coder.arrived(message)
    assert coder.arrived(message) is first
    assert coder.arrived(first) is first
    coder.last = None  # the next handler
    assert coder.arrived(message) is not first


@pytest.mark.parametrize("codec", FEW)
@given(st.integers(2, 5), st.integers(0, 31), st.randoms(use_true_random=False))
def test_what_a_chain_takes_from_the_mean_its_members_keep(
    codec: Codec, size: int, refused: int, rng: Any
) -> None:
    """Over several means: what all gave and had left is what came and what they have left."""
    coders = [Coder(codec, 5) for _ in range(size)]
    out = [place for place in range(size) if refused >> place & 1]
    given_in_all, came = torch.zeros(7), torch.zeros(7)
    for _ in range(4):
        total = None
        count = size - len(out)
        lefts = {}
        for place, coder in enumerate(coders):
            last = place == size - 1
            mine = torch.tensor([rng.uniform(-1, 1) for _ in range(7)])
            if place in out:
                if not last or total is None:
                    continue
            else:
                given_in_all += mine
            total, lefts[place] = coder.pass_on(
                total,
                None if place in out else mine,
                coder.left_of_sums(7),
                5,
                count if last else 1,
            )
        if total is None:
            return
        came += total.decode() * count
        for place, left in lefts.items():
            coders[place].keep(left)
    left = torch.zeros(7)
    for coder in coders:
        kept = coder.left_of_sums(7)
        left[:5] += torch.zeros(5) if kept is None else kept
    torch.testing.assert_close(came + left, given_in_all, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_time_and_bytes_of_the_modelled_network_follow_the_codec(codec: Codec) -> None:
    """Without gradients, where all vectors are empty: a difference, a value, and a mean."""
    gradient, theta = OF_AN_ENTRY[codec] / 4, 0.5 if codec != "fp32" else 1.0
    for message, models in (
        (Delta(torch.zeros(0), 1), gradient),
        (Model(torch.zeros(0), 1), theta),
    ):
        actors: list[Actor] = [Sender(me=A, message=message), Receiver(me=B)]
        assert sent(actors, NoTraining(), 0, wire=codec) == pytest.approx((models, models))
    for difference in (False, True):
        expected = gradient if difference else 1.0
        pair: list[Actor] = [
            Reducer(me=me, vector=torch.zeros(0), share=None, difference=difference)
            for me in (A, B)
        ]
        assert sent(pair, NoTraining(), 0, wire=codec) == pytest.approx((2 * expected, expected))


@dataclass(kw_only=True)
class Replier(Sender):
    """Keeps what it was told of how its message arrives."""

    arrives: list[Message] = field(default_factory=list)

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        if isinstance(message, Start):
            self.arrives.append(ctx.send(B, self.message))


@dataclass(kw_only=True)
class Keeper(Receiver):
    got: list[Message] = field(default_factory=list)

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        self.got.append(message)
        Receiver.upon(self, message, sender, ctx)


@pytest.mark.parametrize("codec", CODECS)
def test_a_sender_is_told_what_its_receiver_gets(codec: Codec) -> None:
    replier, keeper = Replier(me=A, message=both(NUMEL)), Keeper(me=B)
    sent([replier, keeper], Quadratic(), NUMEL, wire=codec)
    assert keeper.got[-1] is replier.arrives[0]
    assert (keeper.got[-1] is replier.message) == (codec == "fp32")


@pytest.mark.parametrize("codec", CODECS)
def test_a_run_says_how_its_vectors_travelled(codec: Codec, tmp_path: Path) -> None:
    recipe = parse_recipe({"method": "diloco", "task": "none", "run": {"steps": 600}})
    recipe = parse_recipe({**parse(recipe.to_yaml()), "wire": codec})
    assert parse_recipe(parse(recipe.to_yaml())).wire == codec
    summary = simulation.simulate(recipe, None, tmp_path / "run")
    assert summary["wire"] == codec
    headline = report.headline([report.load(tmp_path / "run")])
    assert (f" Wire: {codec}. 1 seed." in headline) == (codec != "fp32")
    sent_bytes = summary["sent_bytes"] / recipe.profile.model_bytes  # type: ignore[union-attr]
    rounds = summary["outer_steps"]
    assert sent_bytes == pytest.approx(rounds * 2 * 15 * OF_AN_ENTRY[codec] / 4, rel=1e-6)
