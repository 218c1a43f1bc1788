"""Hosts' lines to each other, on loopback: envelopes arrive as they were sent, and to whom."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from archipel.actor import Message, NodeId
from archipel.errors import TrainingError
from archipel.live.line import Line, LineSetup
from archipel.live.mail import Envelope, contents, pack, unpack
from archipel.live.protocol import UnderWay
from archipel.live.reach import Beat, CutOff
from archipel.parameter_server import Delta, Model
from archipel.transport.frames import Address
from archipel.transport.keys import Keys
from archipel.transport.transport import Transfer

A, B, C = NodeId("east", "a"), NodeId("west", "b"), NodeId("west", "c")
KEYS = Keys.make()


def envelope(message: Message, number: int = 0) -> Envelope:
    return Envelope(A, 7, (0, 1), number, 2.5, type(message), contents(message))


# Envelopes as parts


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # as in a host
@given(
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
    st.booleans(),
)
def test_an_envelope_comes_out_as_it_went_in(
    shape: list[int], dtype: torch.dtype, transposed: bool
) -> None:
    vector = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)
    if transposed:
        vector = vector.mT if vector.ndim > 1 else vector
    sent = envelope(Model(vector, 12), 3)
    came = unpack([memoryview(bytes(part)) for part in pack(sent)])
    assert (came.sender, came.epoch, came.lives, came.number) == (A, 7, (0, 1), 3)
    message = came.open()
    assert isinstance(message, Model)
    assert message.progress == 12
    assert message.theta.dtype == dtype
    assert message.theta.shape == vector.shape
    assert torch.equal(message.theta, vector)


def test_vectors_are_not_copied_on_their_way_out() -> None:
    vector = torch.zeros(1000)
    head, part = pack(envelope(Delta(vector, 1)))
    assert len(head) < 1000
    vector[5] = 3.0
    assert np.frombuffer(part, np.float32)[5] == 3.0


# Lines


class End:
    """One host's line, and what has come of it."""

    def __init__(self, node: NodeId) -> None:
        self.came: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        self.told: list[CutOff | Beat] = []
        setup = LineSetup(KEYS, "127.0.0.1", (), 60.0)
        self.line = Line(node, setup, self.came.put, self.told.append)
        self.address = self.line.transport.address

    def next(self) -> Envelope:
        return self.came.get(timeout=30)


@pytest.fixture
def ends() -> Iterator[Callable[[NodeId], End]]:
    made: list[End] = []

    def make(node: NodeId) -> End:
        made.append(End(node))
        return made[-1]

    yield make
    for end in made:
        end.line.transport.close()


def vector_of(came: Envelope) -> Tensor:
    message = came.open()
    assert isinstance(message, Model)
    return message.theta


def test_what_one_host_posts_the_other_gets(ends: Callable[[NodeId], End]) -> None:
    a, b = ends(A), ends(B)
    a.line.know({B: b.address})
    vectors = [torch.randn(size) for size in (0, 1, 300_000, 17)]
    for number, vector in enumerate(vectors):
        a.line.post(B, envelope(Model(vector, 0), number))
    came = {one.number: vector_of(one) for one in (b.next() for _ in vectors)}
    assert all(torch.equal(came[number], vector) for number, vector in enumerate(vectors))


def test_nothing_is_sent_to_a_node_that_is_lost_until_it_is_there_again(
    ends: Callable[[NodeId], End],
) -> None:
    a, b, again = ends(A), ends(B), ends(B)
    a.line.know({B: b.address})
    a.line.tell(B, None)
    a.line.post(B, envelope(Model(torch.zeros(1), 0), 0))
    a.line.tell(B, again.address)
    a.line.know({B: b.address})  # older than what has been told
    a.line.post(B, envelope(Model(torch.ones(1), 0), 1))
    assert again.next().number == 1
    assert b.came.empty()


def test_a_node_that_was_lost_and_is_back_in_the_same_process_gets_its_mail(
    ends: Callable[[NodeId], End],
) -> None:
    """A loss that is not finite: others are told of a loss, and the process goes on."""
    a, b = ends(A), ends(B)
    a.line.know({B: b.address})
    for number in range(3):
        a.line.post(B, envelope(Model(torch.full((3,), number), 0), number))
        assert b.next().number == number
        a.line.tell(B, None)
        a.line.tell(B, b.address)


def test_a_stranger_to_the_method_is_named(ends: Callable[[NodeId], End]) -> None:
    with pytest.raises(
        TrainingError, match=r"^east/a sent Delta to west/c, which is none of its peers$"
    ):
        ends(A).line.post(C, envelope(Delta(torch.zeros(1), 1)))


def test_the_host_is_told_of_a_peer_to_which_nothing_gets_unless_it_is_lost(
    ends: Callable[[NodeId], End],
) -> None:
    end, address = ends(A), Address("192.0.2.1", 9)
    end.line.know({B: address, C: None})
    end.line._failed(address, "it has taken nothing for 60 s")
    assert end.told == [CutOff(B)]
    end.line.tell(B, None)
    end.line._failed(address, "it has taken nothing for 60 s")
    assert end.told == [CutOff(B)]


def test_the_host_is_told_to_hail_its_peers_until_the_line_ends(
    ends: Callable[[NodeId], End],
) -> None:
    end = ends(A)
    end.line.deadline_s = 0.01
    end.line.begin_beat()
    until_s = time.monotonic() + 30
    while len(end.told) < 3:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert set(end.told) == {Beat()}


def test_the_message_that_takes_longest_is_shown(
    ends: Callable[[NodeId], End], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ends(A)
    b, c = Address("10.0.0.1", 1), Address("10.0.0.1", 2)
    end.line.know({B: b, C: c})
    small = Transfer(b, 10, 1000, 5.0, None)
    quick = Transfer(b, 500_000, 2_000_000, 1e6, 1.5)
    slow = Transfer(c, 1_000_000, 4_000_000, 1e5, 30.0)
    stuck = Transfer(b, 0, 4_000_000, 0.0, None)
    for transfers, expected in (
        ([], (False, None)),
        ([small], (True, None)),
        ([small, quick, slow], (True, UnderWay(C, 0.25, 1e5, 30.0))),
        ([stuck, slow], (True, UnderWay(B, 0.0, 0.0, None))),
        ([stuck], (False, UnderWay(B, 0.0, 0.0, None))),
    ):
        monkeypatch.setattr(end.line.transport, "transfers", lambda these=transfers: these)
        assert end.line.under_way() == expected
