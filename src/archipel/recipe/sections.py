"""The recipe's sections `run`, `pipeline`, `live` and `track`.

What belongs here: what these sections can say, and what is wrong when one of them contradicts
itself. What does not: the sections that a part of the house reads itself (`sim/topology.py`,
`sim/faults.py`, `run/screening.py`, `train/task.py`, `methods/`), and reading a whole recipe
(`__init__.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from archipel.errors import nearest
from archipel.sim.topology import Strict
from archipel.train.pipeline import Routing

DEFAULT_STEPS = 10_000
TRACKERS = ("tensorboard", "wandb")


class RunConfig(Strict):
    """When a run ends, and its seed. The run ends as soon as one of its stop rules holds.

    `steps` and `tokens` count what all workers together have trained; the learning rate is planned
    for them.
    """

    steps: int | None = Field(
        None, ge=1, description=f"inner steps of all workers together; default: {DEFAULT_STEPS}"
    )
    tokens: int | None = Field(
        None, ge=1, description="tokens of all workers together, instead of steps"
    )
    seconds: float | None = Field(
        None, gt=0, description="the run ends after this many seconds on its clock"
    )
    target_loss: float | None = Field(
        None, description="the run ends when the validation loss is at or below this"
    )
    seed: int = Field(0, ge=0, description="seed of initial weights, data, peers and jitter")
    evaluations: int = Field(
        25, ge=1, description="how often the model is evaluated, at equal marks of inner steps"
    )
    strict: bool = Field(
        False, description="a training loss that is not finite ends the run, and restarts no worker"
    )

    @model_validator(mode="after")
    def _one_plan(self) -> RunConfig:
        if self.steps is not None and self.tokens is not None:
            raise ValueError(
                f"steps = {self.steps} and tokens = {self.tokens} are both given; give one of them"
            )
        return self


class PipelineConfig(Strict):
    """How one replica of the model is spread over several workers; see `train/pipeline.py`."""

    stages: int = Field(
        1,
        ge=1,
        description="how many neighbouring workers hold one replica; the number of workers must be "
        "a multiple",
    )
    micro_batches: int = Field(
        4, ge=1, description="into how many parts a batch is cut, which follow each other"
    )
    routing: Routing = Field(
        "random",
        description="random: a micro-batch goes on to the next stage of a random replica; fixed: "
        "of its own replica",
    )


Port = Annotated[int, Field(ge=1, le=65535)]


class LiveConfig(Strict):
    """How `archipel launch` runs a recipe; a simulation ignores this section."""

    pace: Literal["none", "profile"] = Field(
        "none",
        description="profile: an inner step takes at least its time in the simulator; none: it is "
        "not slowed down",
    )
    gpu_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="part of a GPU that each process takes; with 0.25 four processes share one",
    )
    processes: int = Field(
        1,
        ge=1,
        description="how many processes of each worker share one replica of the model, by FSDP2",
    )
    deadline_s: float = Field(
        60.0,
        gt=0,
        description="a node that shows no life or no progress for this long is taken for lost",
    )
    cut_s: float = Field(
        3600.0,
        gt=0,
        description="a run ends if nothing happens for this long because nodes cannot reach each "
        "other",
    )
    ports: list[Port] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="first and last of the ports on which nodes listen for each other's messages; "
        "null: any that are free",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="how often a node that died, or whose loss is not finite, is started again",
    )

    @model_validator(mode="after")
    def _ports_rise(self) -> LiveConfig:
        if self.ports and self.ports[0] > self.ports[1]:
            raise ValueError(f"ports = {self.ports}: the first is above the last")
        return self


class TrackConfig(Strict):
    """Who is told of a run's figures while it goes on; see `tracking.py`."""

    name: str = Field(description="tensorboard, wandb, or file.py:function, which gives a tracker")
    project: str | None = Field(None, description="of wandb: the project; default: archipel")
    entity: str | None = Field(None, description="of wandb: the user or team")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="of wandb; default: as WANDB_MODE says, or online"
    )

    @model_validator(mode="after")
    def _known(self) -> TrackConfig:
        if self.name not in TRACKERS and ":" not in self.name:
            raise ValueError(
                f"name = {self.name!r}: allowed are {', '.join(TRACKERS)} and "
                f"file.py:function{nearest(self.name, TRACKERS)}"
            )
        given = self.model_fields_set - {"name"}
        if self.name != "wandb" and given:
            raise ValueError(f"{min(given)}: only wandb has one, and this is {self.name}")
        return self
