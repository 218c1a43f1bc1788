"""What a host of a live run is told, and what it tells: plain data that travels between processes.

What belongs here: the messages between a host and those who watch over it. What does not: mail
between actors (`mail.py`), what a host does (`host.py`), who decides what (`watch.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from archipel.actor import Group, NodeId
from archipel.run.codec import Codec
from archipel.run.metrics import Recorder
from archipel.run.screening import ScreeningConfig
from archipel.sim.topology import Topology
from archipel.train.configs import NoTask, TaskConfig
from archipel.train.data import Shard
from archipel.train.pipeline import Pipeline
from archipel.train.replica import Run
from archipel.transport.frames import Address

# What a host is told


@dataclass(frozen=True)
class SaveFolder:
    """Where a host saves its part of the run.

    Attributes:
        path: the folder of this host alone.
        recipe: the text of the run's recipe; a save of another run is refused by it.
    """

    path: Path
    recipe: str


@dataclass(frozen=True)
class Membership:
    """Which hosts are there when a host begins a life.

    Attributes:
        life: how many lives this host has had before.
        lives: the same number for every other host that was started again.
        gone: hosts that are lost now.
        losses: how often any host has been lost so far.
    """

    life: int = 0
    lives: Mapping[NodeId, int] = field(default_factory=dict)
    gone: Group = ()
    losses: int = 0


Beginning = Literal["start", "restart", "resume"]
"""How a host's process begins. `start`: with the run. `restart`: its process has died; it goes on
from its last save if it has one. `resume`: with a run that was stopped and goes on; a server must
have a save then.
"""


@dataclass(frozen=True)
class HostSetup:
    """What a host is told when it is made.

    Attributes:
        actor: as `initial.pack` makes it: its class may lie in a file of the user's that the host
            has to import first.
        seed_rank: the actor's place among all actors; with the run's seed it seeds `Context.rng`.
        task, run: what is trained, for hosts that train.
        shard: this worker's data; None: this actor is no worker.
        marks: counts of inner steps, rising, at which the actor's part of the model is kept
            and evaluated; () where the actor holds no part.
        step_time_s: the least time of an inner step, to act out a slower machine; 0: as fast as it
            goes.
        epoch: a number of this run, which all its mail carries.
        weights: digest of the initial weights that the actor was packed with.
        rank: this worker's place among the workers.
        pipeline: how workers share the replicas' stages; None: each has a whole replica.
        shards: the data of all replicas, for a stage.
        processes: how many processes share this worker's replica.
        deadline_s: longest wait for those with whom inner steps are taken.
        parameters: leading entries of this node's vectors that are parameters.
        topology: the network, for the best way of a collective; None: it goes in the order of its
            members.
        screening: which updates are refused; None: none.
        wire: the codec by which vectors travel.
        save_folder: where this host saves its part; None: it saves nothing.
        waits_for_release: a copy of the model is kept until the watch has said that it is not
            needed.
        begins: how this process begins.
        membership: which hosts are there.
    """

    actor: bytes
    seed_rank: int
    task: TaskConfig
    run: Run
    shard: Shard | None
    marks: tuple[int, ...]
    step_time_s: float
    epoch: int
    weights: bytes = b""
    rank: int = 0
    pipeline: Pipeline | None = None
    shards: tuple[Shard, ...] = ()
    processes: int = 1
    deadline_s: float = 60.0
    parameters: int = 0
    topology: Topology | None = None
    screening: ScreeningConfig | None = None
    wire: Codec = "fp32"
    save_folder: SaveFolder | None = None
    waits_for_release: bool = False
    begins: Beginning = "start"
    membership: Membership = field(default_factory=Membership)

    @property
    def learns(self) -> bool:
        """The run trains a model (its task is not `none`)."""
        return not isinstance(self.task, NoTask)

    @property
    def trains(self) -> bool:
        """This host is a worker that trains a model."""
        return self.shard is not None and self.learns


@dataclass(frozen=True)
class News:
    """From the watch to a host: another host is lost, or is there again.

    Attributes:
        node: the other host.
        life: None: it is lost. A number: it is there again, and this is how many lives it has had
            before.
    """

    node: NodeId
    life: int | None = None


# What a host tells


@dataclass(frozen=True)
class Mark:
    """A host's part of the model as it was at one moment.

    Attributes:
        time_s: when that was, on the host's clock.
        trained, absorbed, outer_steps: what the actor had counted; see `actor.Actor`.
        evaluated: its loss has been computed, or there is none to compute.
        loss: its validation loss; None where nothing is trained, or where this part is a stage.
        failure: why its loss could not be computed; None: it could.
    """

    time_s: float
    trained: int
    absorbed: int
    outer_steps: int
    evaluated: bool = False
    loss: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Ready:
    """A host can run.

    Attributes:
        address: where its mail goes.
        said: what the user should know of how it has begun.
    """

    address: Address
    said: list[str]


@dataclass(frozen=True)
class NeedsWeights:
    """A host cannot run yet: its machine makes other initial weights from the seed than that of the
    command, and has to be sent them.
    """


@dataclass(frozen=True)
class UnderWay:
    """A message that is on its way and takes long.

    Attributes:
        to: who gets it.
        fraction: the part of it that has arrived.
        bytes_per_s: of all that goes there, over the last seconds.
        left_s: seconds until it has arrived, at that rate; None: nothing moves.
    """

    to: NodeId
    fraction: float
    bytes_per_s: float
    left_s: float | None


@dataclass(frozen=True)
class BadLoss:
    """A worker's training loss is not a finite number. The worker waits until it is told that it
    begins a new life.

    Attributes:
        text: which worker, and which loss.
        finished: the worker has finished inner steps since its last loss that was not finite.
    """

    text: str
    finished: bool


@dataclass(frozen=True)
class Status:
    """What a host reports of itself when it is asked.

    Attributes:
        time_s: the time on its clock.
        events: messages handled and inner steps taken so far. If this stands still, the host does.
        quiet_s: seconds since the last of these events; 0 while it evaluates the model, and while
            a message from here moves.
        trained: inner steps that its actor has counted; see `actor.Actor`.
        compute_s: seconds spent on inner steps that have ended.
        loss: mean of the last inner steps; None before the first.
        doing: what it does or waits for.
        holds: it holds a part of the model to take home.
        saving: it writes its part to disk.
        refused: how many updates of each sender it has refused.
        messages, sent_bytes, slow_link_bytes: of the mail that has arrived here so far.
        first_mark: number of the first of `marks`.
        marks: those from that number on that it has reached.
        under_way: the message from here that takes longest; None: none takes long.
        cut_off: peers that are there and that it cannot reach.
    """

    time_s: float
    events: int
    quiet_s: float
    trained: int
    compute_s: float
    loss: float | None
    doing: str
    holds: bool
    saving: bool
    refused: dict[NodeId, int]
    messages: int
    sent_bytes: float
    slow_link_bytes: float
    first_mark: int
    marks: tuple[Mark, ...]
    under_way: UnderWay | None = None
    cut_off: Group = ()


@dataclass(frozen=True)
class Record:
    """What a host leaves when it has stopped.

    Attributes:
        recorder: what happened at this host.
        local_updates: the last values of `Actor.local_updates`, and when each was reached, in
            seconds of the run. A host goes on for a moment after the model to take home is kept.
        integers: the integer buffers of its model, by name.
    """

    recorder: Recorder
    local_updates: Sequence[tuple[float, int]]
    integers: dict[str, Tensor]

    def local_updates_at(self, time_s: float) -> int:
        """How many there had been at `time_s`."""
        earlier = [count for at_s, count in self.local_updates if at_s <= time_s]
        return earlier[-1] if earlier else self.local_updates[0][1]
