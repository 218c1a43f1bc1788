"""What a recipe may say of what goes wrong on purpose: its section `faults`.

What belongs here: each kind of fault, its settings, and the error messages for wrong ones. What
does not: when a fault happens and what it does to times (`schedule.py`), who is told of it
(`trouble.py`), and what must hold all the same (`run/invariants.py`).

Nodes are written `region/name`; times are seconds on the virtual clock.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from archipel.errors import checked
from archipel.sim.topology import Strict

Seconds = Annotated[float, Field(ge=0)]
Duration = Annotated[float, Field(gt=0)]
Pair = Annotated[tuple[str, str], Field(strict=False)]  # YAML has lists, not tuples


class Slow(Strict):
    """A node takes `factor` times as long for its inner steps."""

    kind: Literal["slow"] = "slow"
    node: str = Field(description="the node, written `region/name`")
    at_s: Seconds = Field(description="when the fault begins, in seconds")
    for_s: Duration = Field(description="how long the fault lasts, in seconds")
    factor: float = Field(gt=1, description="an inner step takes this many times as long")


class Crash(Strict):
    """A node dies, and loses its inner steps and messages under way. It comes back as it was at its
    last save, or never.
    """

    kind: Literal["crash"] = "crash"
    node: str = Field(description="the node, written `region/name`")
    at_s: Seconds = Field(description="when the node dies, in seconds")
    restart_after_s: Duration | None = Field(
        None, description="seconds until the node is back; null: it never comes back"
    )


class Leave(Strict):
    """A worker leaves for good, and says so: nobody has to wait for the deadline to notice."""

    kind: Literal["leave"] = "leave"
    node: str = Field(description="the node, written `region/name`")
    at_s: Seconds = Field(description="when the worker leaves, in seconds")


class Join(Strict):
    """A worker of the topology is absent at first, and joins at this time."""

    kind: Literal["join"] = "join"
    node: str = Field(description="the node, written `region/name`")
    at_s: Seconds = Field(description="when the worker joins, in seconds")


class OnLinks(Strict):
    """A fault that disturbs messages, on some links or on all."""

    between: Pair | None = Field(
        None, description="two regions, or one region twice; null: all links"
    )
    at_s: Seconds = Field(description="when the fault begins, in seconds")
    for_s: Duration = Field(description="how long the fault lasts, in seconds")

    def on(self, a: str, b: str) -> bool:
        """Whether messages from region `a` to region `b` are concerned."""
        return self.between is None or {*self.between} == {a, b}


class Loss(OnLinks):
    """Each message is lost with this probability; the sender notices after `retransmit_s` and sends
    it again.
    """

    kind: Literal["loss"] = "loss"
    probability: float = Field(
        gt=0, lt=1, description="how likely each message is lost, from 0 to 1"
    )


class Duplicate(OnLinks):
    """Each message is sent twice with this probability; the receiver drops the second one."""

    kind: Literal["duplicate"] = "duplicate"
    probability: float = Field(
        gt=0, le=1, description="how likely each message is sent twice, 0 to 1"
    )


class Delay(OnLinks):
    """Each message takes `extra_s` longer."""

    kind: Literal["delay"] = "delay"
    extra_s: Duration = Field(description="seconds added to the time of each message")


class LinkDown(Strict):
    """A link between two regions carries nothing. Messages on it wait until it is up again."""

    kind: Literal["link_down"] = "link_down"
    between: Pair = Field(description="the two regions that the link joins")
    at_s: Seconds = Field(description="when the fault begins, in seconds")
    for_s: Duration = Field(description="how long the fault lasts, in seconds")


class Partition(Strict):
    """All links between these regions and all other regions are down."""

    kind: Literal["partition"] = "partition"
    regions: list[str] = Field(min_length=1, description="the regions on one side")
    at_s: Seconds = Field(description="when the fault begins, in seconds")
    for_s: Duration = Field(description="how long the fault lasts, in seconds")


Fault = Annotated[
    Slow | Crash | Leave | Join | Loss | Duplicate | Delay | LinkDown | Partition,
    Field(discriminator="kind"),
]


KINDS: dict[str, type[Strict]] = {
    "slow": Slow,
    "crash": Crash,
    "leave": Leave,
    "join": Join,
    "loss": Loss,
    "delay": Delay,
    "duplicate": Duplicate,
    "link_down": LinkDown,
    "partition": Partition,
}
"""All kinds, by what a recipe calls them."""


class RandomFaults(Strict):
    """Faults drawn from a seed. Each kind comes at a mean rate per hour (a Poisson process), and
    hits nodes and links drawn evenly.
    """

    seed: int = Field(0, ge=0, description="seed of all that is drawn")
    until_s: float = Field(gt=0, description="no fault begins later than this, in seconds")
    mean_s: float = Field(
        60.0, gt=0, description="mean seconds that a fault lasts, or a node takes to restart"
    )
    slow_per_hour: float = Field(0.0, ge=0, description="nodes that become slow, per hour")
    crashes_per_hour: float = Field(
        0.0, ge=0, description="servers and workers that crash, per hour; each restarts"
    )
    losses_per_hour: float = Field(
        0.0, ge=0, description="how often links begin to lose messages, per hour"
    )
    delays_per_hour: float = Field(
        0.0, ge=0, description="how often links begin to delay messages, per hour"
    )
    duplicates_per_hour: float = Field(
        0.0, ge=0, description="how often links begin to double messages, per hour"
    )
    links_down_per_hour: float = Field(0.0, ge=0, description="links that go down, per hour")
    partitions_per_hour: float = Field(
        0.0, ge=0, description="how often the network falls into two parts, per hour"
    )


class FaultsConfig(Strict):
    """What goes wrong on purpose: the section `faults` of a recipe."""

    schedule: tuple[Fault, ...] = Field(
        (), strict=False, description="a list of faults, each with its `kind` and its time"
    )
    random: RandomFaults | None = Field(None, description="faults that are drawn from a seed")
    save_every_s: float = Field(
        600.0,
        gt=0,
        description="seconds between two saves of a node; it restarts from the last one",
    )
    deadline_s: float = Field(
        30.0, gt=0, description="seconds of silence after which a node is taken for lost"
    )
    retransmit_s: float = Field(
        1.0, gt=0, description="seconds after which a lost message is sent again"
    )


def parse_faults(value: Any) -> FaultsConfig | None:
    """The section `faults`; None if there is none.

    Raises:
        UserError: something in it is unknown or impossible.
    """
    if value is None:
        return None
    return checked(FaultsConfig, value, "faults", "keys such as `schedule` or `random`")
