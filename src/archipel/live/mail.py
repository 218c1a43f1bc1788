"""Messages between processes: what they travel in, and which of them are let in.

What belongs here: envelopes, and the inbox that puts them in order. What does not: who carries them
(`line.py`), which peers can be reached (`reach.py`), and who handles them (`host.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from archipel.actor import Message, NodeId
from archipel.live.reach import Reach
from archipel.run.codec import Coded


@dataclass(frozen=True, eq=False, slots=True)
class Envelope:
    """A message on its way. The vectors in it are NumPy views of their tensors, which nobody
    changes, or their codes.

    Attributes:
        sender: who sent it.
        epoch: number of the run that it belongs to.
        lives: the sender's life that it comes from, and the receiver's life that it is meant for,
            as numbers; a node that is started again begins another life.
        number: how many messages the sender had sent to this receiver before, in these lives and
            since they were last cut off from each other.
        sent_s: when it was sent, on the sender's clock.
        kind, contents: the message's class, and its fields.
        cuts: how often the two have been cut off from each other in these lives; see `reach.py`.
    """

    sender: NodeId
    epoch: int
    lives: tuple[int, int]
    number: int
    sent_s: float
    kind: type[Message]
    contents: tuple[Any, ...]
    cuts: int = 0

    @property
    def size_bytes(self) -> int:
        """Of the vectors inside."""
        return sum(
            value.nbytes for value in self.contents if isinstance(value, (np.ndarray, Coded))
        )

    def open(self) -> Message:
        """The message; its vectors are those that came, and are not to be written to. Codes are
        read where the message knows nothing of them; an all-reduce passes its own on as they are.
        """
        kind = self.kind
        return kind(
            *(
                torch.from_numpy(value)
                if isinstance(value, np.ndarray)
                else value.decode()
                if isinstance(value, Coded) and part.name in (*kind.differences, *kind.values)
                else value
                for part, value in zip(fields(kind), self.contents, strict=True)
            )
        )


def pack(envelope: Envelope) -> list[bytes | memoryview]:
    """An envelope as parts that travel: all but the vectors, and the vectors as they lie."""
    vectors: list[pickle.PickleBuffer] = []
    head = pickle.dumps(envelope, protocol=5, buffer_callback=vectors.append)
    return [head, *(vector.raw() for vector in vectors)]


def unpack(parts: Sequence[memoryview]) -> Envelope:
    """The envelope that `pack` has made parts of. They must be from somebody who is trusted:
    unpickling runs what it is told to.
    """
    envelope: Envelope = pickle.loads(parts[0], buffers=parts[1:])
    return envelope


def contents(message: Message, codes: Mapping[str, Coded] | None = None) -> tuple[Any, ...]:
    """The fields of a message, ready to travel; `codes` take the place of what they are of."""
    codes = codes or {}
    values = (codes.get(part.name, getattr(message, part.name)) for part in fields(message))
    return tuple(value.detach().numpy() if isinstance(value, Tensor) else value for value in values)


@dataclass
class Inbox:
    """Lets through the mail of one run: each sender's in the order of sending, once each, and only
    while it is not lost.

    Attributes:
        epoch: number of this run; mail of any other run is dropped.
        life: number of this node's life; mail for an earlier one is dropped.
        lives: the lives of other nodes that were started again, as far as this node was told.
            Mail of a later life waits until this node is told of that life.
        gone: the nodes that are lost.
        expected: the number that each sender's next message has.
        early: messages that came before their turn, by sender, life and number.
        reach: which senders are cut off, and how often each was; only what counts is let through.
    """

    epoch: int
    life: int = 0
    lives: dict[NodeId, int] = field(default_factory=dict)
    gone: set[NodeId] = field(default_factory=set)
    expected: dict[NodeId, int] = field(default_factory=dict)
    early: dict[tuple[NodeId, int, int], Envelope] = field(default_factory=dict)
    reach: Reach = field(default_factory=Reach)

    def is_of_now(self, envelope: Envelope) -> bool:
        """Its sender is not lost, and both mean the lives that they have now."""
        sender = envelope.sender
        return (
            envelope.epoch == self.epoch
            and envelope.lives == (self.lives.get(sender, 0), self.life)
            and sender not in self.gone
        )

    def accept(self, envelope: Envelope) -> list[Envelope]:
        """What can be handled now that `envelope` has come, in order; nothing if it is a stranger,
        a duplicate, or early.
        """
        sender, (life, mine), known = (
            envelope.sender,
            envelope.lives,
            self.lives.get(envelope.sender, 0),
        )
        if (
            envelope.epoch != self.epoch
            or mine != self.life
            or life < known
            or (life == known and sender in self.gone)
        ):
            return []
        if life == known and not self.reach.counts(sender, envelope.cuts):
            return []
        if life == known and envelope.number < self.expected.get(sender, 0):
            return []
        self.early[sender, life, envelope.number] = envelope
        return self._ready(sender)

    def lost(self, node: NodeId) -> None:
        """Whatever it has sent is lost."""
        self.gone.add(node)
        self._forget(node, self.lives.get(node, 0))

    def joined(self, node: NodeId, life: int) -> list[Envelope]:
        """It is there again; what it has sent since, and came before this news."""
        self._forget(node, life - 1)
        self.gone.discard(node)
        self.lives[node] = life
        self.expected.pop(node, None)
        self.reach.begin(node)
        if node in self.reach.off:
            self._forget(node, life)
        return self._ready(node)

    def begin_anew(self, node: NodeId) -> None:
        """It is cut off, or no longer: what it has sent before is lost, and the next one is the
        first.
        """
        self._forget(node, self.lives.get(node, 0))
        self.expected.pop(node, None)

    def _ready(self, sender: NodeId) -> list[Envelope]:
        life, number, ready = self.lives.get(sender, 0), self.expected.get(sender, 0), []
        while (sender, life, number) in self.early:
            ready.append(self.early.pop((sender, life, number)))
            number += 1
        self.expected[sender] = number
        return ready

    def _forget(self, node: NodeId, life: int) -> None:
        """What is early of this life or one before it will not be asked for."""
        for key in [key for key in self.early if key[0] == node and key[1] <= life]:
            del self.early[key]
