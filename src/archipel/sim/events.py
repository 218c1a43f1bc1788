"""What can happen on the virtual clock.

What belongs here: the entries of the clock's heap, as plain data. What does not: what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from archipel.actor import Message, NodeId
from archipel.train.trainer import Promise

# Those that there are many of are not frozen: that would make each of them three times as slow to
# make.


@dataclass(eq=False, slots=True)
class Deliver:
    """A message arrives. `size_bytes` is its size on the wire."""

    to: NodeId
    message: Message
    sender: NodeId
    size_bytes: float = 0.0


@dataclass(eq=False, slots=True)
class Finish:
    """A worker's inner steps end. If `answer` is still being computed, the clock waits for it."""

    worker: NodeId
    answer: Promise
    steps: int
    progress: int


@dataclass(eq=False, slots=True)
class Drain:
    """A transfer on a shared link ends, unless another one has started or ended there since."""

    direction: tuple[str, str]
    version: int


@dataclass(eq=False, slots=True)
class PassEnd:
    """A node of a pipeline has done its work in one pass, see `passes.py`."""

    node: NodeId


@dataclass(eq=False, slots=True)
class Tally:
    """The inner steps of a pipeline's team end. These are the messages and bytes that they sent."""

    messages: int = 0
    sent_bytes: float = 0.0
    slow_link_bytes: float = 0.0


# Faults on purpose


@dataclass(frozen=True, slots=True)
class Save:
    """A node saves its state. Only the saves that a restart will need are made."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Fail:
    """A node is gone. `leaves`: it is gone for good, and has said so."""

    node: NodeId
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """The deadline has passed for a node that has been silent since `since_s`."""

    node: NodeId
    since_s: float


@dataclass(frozen=True, slots=True)
class Return:
    """A node is there again, or for the first time."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Sever:
    """A link has been down for longer than the deadline: the nodes on both sides take each other
    for lost.
    """

    link: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Mend:
    """A link that was severed is up again."""

    link: tuple[str, str]


Trouble = Save | Fail | Notice | Return | Sever | Mend
Event = Deliver | Finish | Drain | PassEnd | Tally | Trouble
