"""The contract between training methods and the engines that run them.

What belongs here: the verbs that a method may use (`Context`), the messages that every engine
sends, and what an engine may ask of an actor. What does not: any method, any engine, anything that
measures time or moves bytes.

A training method is a few small actors that react to messages. The simulator runs them under a
virtual clock; a live runtime runs the same objects under the real one. An actor knows of the world
only what messages told it, and its fields are its whole state: so a run can be replayed, and
resumed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict
from torch import Tensor

Vector = Tensor
"""A model's weights (or a difference of them): 1-D, fp32, laid out by `vector.Layout`."""


class NodeId(NamedTuple):
    """An actor's address: the region it lives in and its name there. Written `region/name`."""

    region: str
    name: str

    def __str__(self) -> str:
        return f"{self.region}/{self.name}"


Group = tuple[NodeId, ...]
"""The members of a collective, in rank order."""


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """What actors say to each other. A vector inside is never changed in place after sending, by
    nobody: neither by its sender nor by its receivers, and no more when one of them has kept it.

    In the simulator they all hold the same memory, so that the change of one would be seen by the
    others; in a live run they do not. An engine ends the run where an actor changes a vector while
    it reacts to the message that brought it. It does not watch what an actor has kept or sent:
    clone what is to be changed later.

    A run may have vectors travel in fewer bits than fp32 has (`wire` in a recipe). So a kind of
    message says what its vectors are. All that it does not name travels as it is.

    Attributes:
        differences: its fields that its receiver adds to something, again and again, such as outer
            gradients. They bear the coarsest rounding, for what it takes from one of them the
            sender adds to the next of its kind. A kind has one such sequence at each sender.
        values: its fields that stand for themselves, such as weights to go on from. They are
            rounded to bf16 at most.
    """

    differences: ClassVar[tuple[str, ...]] = ()
    values: ClassVar[tuple[str, ...]] = ()

    @property
    def weight(self) -> float | None:
        """What this message weighs on its way: 1 is all the weights that its sender holds, as fp32.

        None, as here: as much as the tensors among its fields, and where nothing is trained each of
        them counts as a whole model. A message that carries less than that, a fragment or a code of
        fewer bits, states its weight, so that a run without gradients is timed right too. What
        `wire` saves comes off that.
        """
        return None


Sent = TypeVar("Sent", bound=Message)


@dataclass(frozen=True, eq=False, slots=True)
class Start(Message):
    """From the engine to every actor, once, at time 0."""


@dataclass(frozen=True, eq=False, slots=True)
class Trained(Message):
    """The answer to `Context.train` and `Context.apply`: the moved weights and the loss before each
    inner step.
    """

    theta: Vector
    steps: int
    losses: tuple[float, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Gradient(Message):
    """The answer to `Context.gradient`: the gradient on the worker's next batch, and the loss
    there.
    """

    vector: Vector
    loss: float


@dataclass(frozen=True, eq=False, slots=True)
class Reduced(Message):
    """The answer to `Context.all_reduce`: the mean of the members' vectors. The members share it:
    read only.

    `group` are the members that took part, in the order in which the first of them named them.
    `refused` are those of them whose vectors were left out of the mean, because they were not
    finite or absurdly large. Each member is told the same. If all are refused, `mean` is zero and
    stands for nothing: do not use it.
    """

    mean: Vector
    group: Group
    round: int = 0
    refused: Group = ()


@dataclass(frozen=True, eq=False, slots=True)
class Update(Message):
    """A message that moves its receiver's model by `gradient`, an outer gradient.

    An engine may look at it before its receiver does; see `Refused`.
    """

    differences: ClassVar[tuple[str, ...]] = ("gradient",)

    gradient: Vector


@dataclass(frozen=True, eq=False, slots=True)
class Refused(Message):
    """From the engine to the receiver of an update, in place of that update: it is not finite, or
    absurdly large. The sender of the message is the sender of the update.

    The receiver does not apply the update, counts nothing for it, and still answers its sender.
    """

    update: Update


@dataclass(frozen=True, eq=False, slots=True)
class Lost(Message):
    """From the engine to the peers of `node`: it has crashed or left. With `unreachable`: it may
    still be running, but the receiver of this message cannot reach it.

    Messages under way between the two are lost, and so are all that they send to each other before
    `Joined(node)`.
    """

    node: NodeId
    unreachable: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Joined(Message):
    """From the engine to the peers of `node`: it has come for the first time, has come back, or can
    be reached again.

    The node itself gets this message too when it comes or comes back. Its fields are then as they
    were at its last save, or at the start. Nothing that it asked for earlier will be answered. All
    its peers are there, except those for whom a `Lost` follows. A node that comes for the first
    time gets this message instead of `Start`.
    """

    node: NodeId


class Context(Protocol):
    """All that an actor may touch of the world."""

    @property
    def me(self) -> NodeId: ...

    @property
    def now(self) -> float:
        """Seconds on this engine's clock."""

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of this node, seeded by (run seed, node)."""

    def send(self, to: NodeId, message: Sent) -> Sent:
        """Message `to`; messages from one sender to one receiver arrive in the order of sending.

        Returns:
            The message as it arrives, which is `message` itself where nothing is rounded on the
            way. If one and the same message is sent to several while an actor reacts, all of them
            get the same.
        """

    def train(self, theta: Vector, steps: int, progress: int) -> None:
        """Take `steps` inner steps from `theta` on this worker's own data; `Trained` comes back to
        me.

        `progress` is the number of inner steps that all workers together have taken, as far as this
        actor was told: the learning rate follows it. The engine takes a snapshot of `theta`.
        """

    def after(self, seconds: float, message: Message) -> None:
        """`message` comes back to me in `seconds`."""

    # For the synchronous baselines only; NoLoCo and HALoS never call these three.

    def gradient(self, theta: Vector, progress: int) -> None:
        """Compute one gradient at `theta` on this worker's next batch; `Gradient` comes back to
        me.
        """

    def apply(self, theta: Vector, gradient: Vector, progress: int) -> None:
        """One step of the inner optimizer with a gradient that is already known; `Trained` comes
        back to me.
        """

    def all_reduce(
        self,
        group: Group,
        vector: Vector,
        round: int = 0,
        share: float | None = None,
        *,
        difference: bool = False,
    ) -> None:
        """Mean over `group`, once every member has called with this `round`; `Reduced` comes back
        to me.

        The first of `group` decides who takes part: all members wait for everybody whom it names. A
        member that is lost is waited for no longer; if that happens while the mean is computed, the
        others begin again without it. A member waits for one mean at a time. Where members can be
        lost, `round` must go up from call to call: it tells those who begin again from those who go
        on.

        `share` is the part of a model that `vector` is; None: as large as it is, and where nothing
        is trained a whole model. All members give the same.

        `difference`: the mean is added to something, again and again, and may travel in fewer bits;
        see `Message.differences`. Else it travels as it is, for then the members go on from it, and
        nobody would be left who knows what rounding has taken. All get the same bits in any case.
        """


@dataclass(kw_only=True)
class Actor(ABC):
    """One node's part in a training method. A dataclass: its fields are its whole state.

    Attributes:
        me: this actor's address.
        absorbed: inner steps that are in `model()`, summed over the workers that took them. 0 where
            there is no model.
        outer_steps: outer steps that this actor has taken on the model that a user takes home.
        local_updates: outer steps that it has taken on a model that only its region sees.
    """

    me: NodeId
    absorbed: int = 0
    outer_steps: int = 0
    local_updates: int = 0

    @property
    def trained(self) -> int:
        """Inner steps that count for the plan of the run: those that workers have taken, as far as
        this actor has been told.

        They are the `absorbed` ones, unless the method trains steps that never reach the model that
        a user takes home; it then has a field of this name. 0 where there is no model.
        """
        return self.absorbed

    @abstractmethod
    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        """React to one message. The only place where an actor's fields change."""

    def model(self) -> Vector | None:
        """This actor's part of the model that a user takes home (the mean of all parts), or None if
        it holds none.
        """
        return None

    def peers(self) -> Iterable[NodeId]:
        """Whom this actor may send to, or reduce with: checked against the topology before a run
        starts.
        """
        return ()

    def waits_for(self) -> str:
        """What must arrive before this actor goes on, for the message of a deadlock."""
        return "a message"


@dataclass(frozen=True)
class WorkerSpec:
    """What every method is told of a worker: one accelerator, or a group of them that shares one
    copy of the model. `speed` is relative to that of the profile's step time.
    """

    id: NodeId
    speed: float = 1.0


class Block(NamedTuple):
    """One tensor of the model: the entries from `start` to `stop` of every vector of weights."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class World:
    """What every method is told when its actors are made, and what never changes afterwards.

    Attributes:
        workers: all workers, in rank order; their regions in the order of the topology.
        parameters: how many leading entries of the weight vector are parameters; the rest are
            buffers.
        seed: the seed that all nodes share.
        blocks: the model's tensors in the order of the vector, so that a method can send a fragment
            of it; empty where nothing is trained.
    """

    workers: tuple[WorkerSpec, ...]
    parameters: int
    seed: int
    blocks: tuple[Block, ...] = ()

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions that hold workers, in the order of the topology."""
        return tuple(dict.fromkeys(worker.id.region for worker in self.workers))

    def inner_steps(self, steps: int, *, dynamic: bool) -> dict[NodeId, int]:
        """Inner steps of each worker between two exchanges.

        With `dynamic`, `max(1, ceil(steps · speed / fastest speed))`, so that all finish at about
        the same time (DynUpd in HALoS, arXiv 2506.04531).
        """
        fastest = max(worker.speed for worker in self.workers)
        return {
            # The guard keeps a quotient such as 8·0.3/0.3 = 8.000000000000002 from becoming 9.
            worker.id: max(1, math.ceil(steps * worker.speed / fastest - 1e-9))
            if dynamic
            else steps
            for worker in self.workers
        }


class MethodConfig(BaseModel):
    """Base of every method's typed configuration: unknown keys and wrong types are refused, nothing
    changes later.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Method(Protocol):
    """What a file in `methods/` offers."""

    Config: type[MethodConfig]

    def build(self, config: MethodConfig, world: World, theta: Vector) -> Sequence[Actor]:
        """The method's actors, all starting from the weights `theta`."""
