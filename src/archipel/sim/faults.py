"""What a recipe may say of what goes wrong on purpose: its section `faults`.

What belongs here: each kind of fault, what it takes, and the errors of those who write one. What
does not: when it happens and what it does to times (`schedule.py`), who is told what
(`clock.py`), what must hold all the same (`run/invariants.py`).

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
    node: str = Field(description="which node, written `region/name`")
    at_s: Seconds = Field(description="when it begins")
    for_s: Duration = Field(description="how long it lasts")
    factor: float = Field(gt=1, description="an inner step takes so many times as long")


class Crash(Strict):
    """A node is gone, with its inner steps and messages under way; it comes back as it was at its
    last save, or never (null).
    """

    kind: Literal["crash"] = "crash"
    node: str = Field(description="which node, written `region/name`")
    at_s: Seconds = Field(description="when it begins")
    restart_after_s: Duration | None = Field(
        None, description="time until it is back; null: it never is"
    )


class Leave(Strict):
    """A worker goes for good and says so, so that nobody waits for the deadline to know."""

    kind: Literal["leave"] = "leave"
    node: str = Field(description="which node, written `region/name`")
    at_s: Seconds = Field(description="when it begins")


class Join(Strict):
    """A worker of the topology is absent until then."""

    kind: Literal["join"] = "join"
    node: str = Field(description="which node, written `region/name`")
    at_s: Seconds = Field(description="when it begins")


class OnLinks(Strict):
    """What happens to messages, on some links or on all."""

    between: Pair | None = Field(
        None, description="two regions, or one region twice; null: everywhere"
    )
    at_s: Seconds = Field(description="when it begins")
    for_s: Duration = Field(description="how long it lasts")

    def on(self, a: str, b: str) -> bool:
        """Whether messages from region `a` to region `b` are concerned."""
        return self.between is None or {*self.between} == {a, b}


class Loss(OnLinks):
    """Each message is lost with this probability; the sender notices after `retransmit_s` and sends
    it again.
    """

    kind: Literal["loss"] = "loss"
    probability: float = Field(gt=0, lt=1, description="probability for each message, by itself")


class Duplicate(OnLinks):
    """Each message is sent twice with this probability; the receiver drops the second one."""

    kind: Literal["duplicate"] = "duplicate"
    probability: float = Field(gt=0, le=1, description="probability for each message, by itself")


class Delay(OnLinks):
    """Each message takes `extra_s` longer."""

    kind: Literal["delay"] = "delay"
    extra_s: Duration = Field(description="added to the time of each message")


class LinkDown(Strict):
    """A link between two regions passes nothing. What is on its way waits."""

    kind: Literal["link_down"] = "link_down"
    between: Pair = Field(description="the two regions")
    at_s: Seconds = Field(description="when it begins")
    for_s: Duration = Field(description="how long it lasts")


class Partition(Strict):
    """All links between these regions and the others are down."""

    kind: Literal["partition"] = "partition"
    regions: list[str] = Field(min_length=1, description="the regions on one side")
    at_s: Seconds = Field(description="when it begins")
    for_s: Duration = Field(description="how long it lasts")


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
    """Faults drawn from a seed: each kind comes at a rate (a Poisson process), of nodes and links
    drawn evenly.
    """

    seed: int = Field(0, ge=0, description="seed of all that is drawn")
    until_s: float = Field(gt=0, description="no fault begins later")
    mean_s: float = Field(
        60.0, gt=0, description="mean of the time that a fault lasts, or a node takes to restart"
    )
    slow_per_hour: float = Field(0.0, ge=0, description="nodes that become slow, an hour")
    crashes_per_hour: float = Field(
        0.0, ge=0, description="crashes of any server or worker, an hour; each one restarts"
    )
    losses_per_hour: float = Field(
        0.0, ge=0, description="times at which links lose messages, an hour"
    )
    delays_per_hour: float = Field(
        0.0, ge=0, description="times at which links delay messages, an hour"
    )
    duplicates_per_hour: float = Field(
        0.0, ge=0, description="times at which links double messages, an hour"
    )
    links_down_per_hour: float = Field(0.0, ge=0, description="links that go down, an hour")
    partitions_per_hour: float = Field(
        0.0, ge=0, description="times at which the network falls in two, an hour"
    )


class FaultsConfig(Strict):
    """The section `faults` of a recipe."""

    schedule: tuple[Fault, ...] = Field(
        (), strict=False, description="a list of faults, each with its `kind` and when it happens"
    )
    random: RandomFaults | None = Field(None, description="faults that are drawn from a seed")
    save_every_s: float = Field(
        600.0, gt=0, description="how often each node saves its state, to restart from"
    )
    deadline_s: float = Field(
        30.0, gt=0, description="silence after which a node is taken for lost"
    )
    retransmit_s: float = Field(
        1.0, gt=0, description="time after which a lost message is sent again"
    )


def parse_faults(value: Any) -> FaultsConfig | None:
    """The section `faults`; None if there is none.

    Raises:
        UserError: something in it is unknown or impossible.
    """
    if value is None:
        return None
    return checked(FaultsConfig, value, "faults", "keys such as `schedule` or `random`")
