"""One experiment as typed, strict configuration.

What belongs here: what a recipe may say, its defaults, and the errors of those who write one. What
does not: running it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from archipel import methods
from archipel.actor import MethodConfig
from archipel.errors import UserError, explain, nearest
from archipel.run.screening import ScreeningConfig
from archipel.sim.faults import FaultsConfig, parse_faults
from archipel.sim.topology import (
    MEASURED,
    PROFILES,
    Profile,
    Topology,
    load_topology,
    parse_topology,
)
from archipel.train.pipeline import Routing
from archipel.train.task import GptTask, TaskConfig, task_config
from archipel.yamlfile import dump, parse, read_mapping

KEYS = (
    "method",
    "topology",
    "profile",
    "task",
    "pipeline",
    "run",
    "live",
    "faults",
    "bad_updates",
    "label",
)
DEFAULT_TOPOLOGY = "halos-4x4"
DEFAULT_PROFILE = "pythia-70m-h100"
DEFAULT_STEPS = 10_000


class RunConfig(BaseModel):
    """When a run ends, and its seed. The first stop rule that holds ends it.

    `steps` and `tokens` count what the model to take home has absorbed, of all workers together;
    the learning rate is planned for them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    steps: int | None = Field(None, ge=1, description=f"inner steps; default: {DEFAULT_STEPS}")
    tokens: int | None = Field(None, ge=1, description="instead of steps")
    seconds: float | None = Field(None, gt=0, description="on the engine's clock")
    target_loss: float | None = Field(None, description="validation loss")
    seed: int = Field(0, ge=0)
    evaluations: int = Field(
        25, ge=1, description="how often the model is evaluated, at equal marks of inner steps"
    )
    strict: bool = Field(
        False, description="a training loss that is not finite ends the run, and restarts no worker"
    )


class PipelineConfig(BaseModel):
    """One replica of the model over several workers; see `pipeline.py`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    stages: int = Field(
        1, ge=1, description="workers that hold one replica; they divide the number of workers"
    )
    micro_batches: int = Field(
        4, ge=1, description="parts of a batch that follow each other through the stages"
    )
    routing: Routing = Field(
        "random", description="whose next stage gets a micro-batch; fixed: the same replica's"
    )


class LiveConfig(BaseModel):
    """How a recipe runs for real, by `archipel launch`; a simulation does not look at it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    pace: Literal["none", "profile"] = Field(
        "none",
        description="profile: an inner step takes at least the time that the profile and the "
        "worker's speed give it",
    )
    gpu_fraction: float = Field(
        1.0, gt=0, le=1, description="part of a GPU that each process takes; 0.25: four share one"
    )
    processes: int = Field(
        1, ge=1, description="of each worker, which share one replica of the model by FSDP2"
    )
    deadline_s: float = Field(
        60.0, gt=0, description="longest time without a sign of life or of progress"
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="how often a node that died, or whose loss is not finite, is started again",
    )


@dataclass(frozen=True)
class Recipe:
    """A method, where it runs, what it trains, for how long, and what goes wrong.

    `profile` None: measured when the run starts. `faults` None: nothing goes wrong, and no
    invariants are checked. `bad_updates` None: refused live and not in the simulator; False: in
    neither.
    """

    label: str
    method: str
    config: MethodConfig
    topology: Topology
    profile: Profile | None
    task: TaskConfig
    run: RunConfig
    pipeline: PipelineConfig
    live: LiveConfig
    faults: FaultsConfig | None = None
    bad_updates: ScreeningConfig | Literal[False] | None = None

    @property
    def replicas(self) -> int:
        """Copies of the model that are trained."""
        return len(self.topology.workers) // self.pipeline.stages

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Settings of the method that are not the published ones: name to (used, published)."""
        published = type(self.config)()
        return {
            name: (value, getattr(published, name))
            for name, value in self.config
            if value != getattr(published, name)
        }

    def with_faults(self, faults: FaultsConfig) -> Recipe:
        """This recipe with faults; with an empty schedule of them, its invariants are checked.

        Raises:
            UserError: the model is in stages.
        """
        stages = self.pipeline.stages
        if stages > 1:
            raise UserError(
                f"faults: a model in stages (pipeline.stages = {stages}) cannot have any yet; give "
                "stages = 1"
            )
        return replace(self, faults=faults)

    def screening(self, *, live: bool) -> ScreeningConfig | None:
        """Which updates are refused, in a live run or a simulated one; None: none. The published
        comparisons refuse none.
        """
        if self.bad_updates is None:
            return ScreeningConfig() if live else None
        return self.bad_updates or None

    def strictly(self) -> Recipe:
        """This recipe, and the first training loss that is not finite ends the run."""
        return replace(self, run=self.run.model_copy(update={"strict": True}))

    def to_yaml(self) -> str:
        """The recipe with all defaults filled in; `parse_recipe` reads it back."""
        data: dict[str, Any] = {
            "label": self.label,
            "method": {"name": self.method, **self.config.model_dump(mode="json")},
            "topology": self.topology.model_dump(mode="json"),
            "profile": self.profile.model_dump(mode="json") if self.profile else MEASURED,
            "task": self.task.model_dump(mode="json"),
            "pipeline": self.pipeline.model_dump(mode="json"),
            "run": self.run.model_dump(mode="json"),
            "live": self.live.model_dump(mode="json"),
        }
        if self.faults is not None:
            data["faults"] = self.faults.model_dump(mode="json")
        if self.bad_updates is not None:
            data["bad_updates"] = (
                self.bad_updates.model_dump(mode="json") if self.bad_updates else False
            )
        return dump(data)


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """A recipe from its fields; only `method` is required.

    Raises:
        UserError: something is unknown, of the wrong type, or impossible.
    """
    for key in data:
        if key not in KEYS:
            raise UserError(
                f"recipe: unknown key {key!r}{nearest(key, KEYS)}; allowed: {', '.join(KEYS)}"
            )
    if "method" not in data:
        raise UserError(
            "recipe: `method` is required, for example `method: halos`; methods: "
            f"{', '.join(methods.names())}"
        )
    method, config = _method(section(data["method"], "method"))
    task_fields = section(data.get("task", "stdlib"), "task")
    run_fields, pipeline_fields = data.get("run", {}), data.get("pipeline", {})
    if not isinstance(run_fields, dict):
        raise UserError(f"run = {run_fields!r}: expected keys such as `steps: 10000`")
    if not isinstance(pipeline_fields, dict):
        raise UserError(f"pipeline = {pipeline_fields!r}: expected keys such as `stages: 2`")
    label = str(data.get("label", Path(method).stem))
    if not re.fullmatch(r"[\w.+-]+", label):
        raise UserError(
            f"label = {label!r}: it names a folder; use letters, digits, '.', '_', '+' and '-'"
        )
    pipeline, topology = (
        _pipeline(pipeline_fields),
        _topology(data.get("topology", DEFAULT_TOPOLOGY)),
    )
    if len(topology.workers) % pipeline.stages:
        raise UserError(
            f"pipeline.stages = {pipeline.stages}: topology {topology.name!r} has "
            f"{len(topology.workers)} workers, "
            f"which is no multiple of that"
        )
    recipe = Recipe(
        label=label,
        method=method,
        config=config,
        topology=topology,
        profile=_profile(data.get("profile", DEFAULT_PROFILE)),
        task=_task(task_fields, tied=pipeline.stages == 1),
        run=_run(run_fields),
        pipeline=pipeline,
        live=_live(data.get("live", {})),
        bad_updates=_bad_updates(data.get("bad_updates")),
    )
    faults = parse_faults(data.get("faults"))
    return recipe if faults is None else recipe.with_faults(faults)


def read_recipe(path: Path, overrides: list[str]) -> Recipe:
    """The recipe in a YAML file, with `section.key=value` laid over it.

    Raises:
        UserError: the file or what it says is wrong.
    """
    data = {
        "topology": DEFAULT_TOPOLOGY,
        "profile": DEFAULT_PROFILE,
        **read_mapping(path, "recipe"),
    }
    method = section(data.get("method", {}), "method").get("name")
    for override in overrides:
        place, key, value = parse_override(override)
        place = "method" if place == method else place
        if place not in KEYS:
            raise UserError(
                f"--set {override}: unknown section {place!r}{nearest(place, KEYS)}; allowed: "
                f"{', '.join(KEYS)}"
            )
        data[place] = {**section(data.get(place) or {}, place), key: value}
    return parse_recipe(data)


def parse_override(text: str) -> tuple[str, str, Any]:
    """`section.key=value` in three parts.

    Raises:
        UserError: it does not have that form.
    """
    place, equals, value = text.partition("=")
    name, dot, key = place.strip().partition(".")
    if not (equals and dot and key):
        raise UserError(
            f"--set {text}: expected section.key=value, for example halos.inner_steps=16 or "
            "task.width=64"
        )
    try:
        return name, key, parse(value)
    except yaml.YAMLError:
        raise UserError(f"--set {text}: {value!r} is not a value that YAML can read") from None


def section(value: Any, name: str) -> dict[str, Any]:
    """A section that may be given as its name alone."""
    match value:
        case str():
            return {"name": value}
        case dict():
            return dict(value)
        case _:
            raise UserError(f"{name} = {value!r}: expected a name, or keys with `name` among them")


def _method(fields: dict[str, Any]) -> tuple[str, MethodConfig]:
    if "name" not in fields:
        raise UserError(f"method: `name` is required; methods: {', '.join(methods.names())}")
    name = str(fields.pop("name"))
    config = methods.load(name).Config
    try:
        return name, config.model_validate(fields)
    except ValidationError as error:
        raise explain(error, name, config) from None


def _topology(value: Any) -> Topology:
    match value:
        case str():
            return load_topology(value)
        case dict() if (
            "name" in value and "regions" not in value
        ):  # a preset or file, and what differs from it
            base = load_topology(str(value["name"]))
            topology = parse_topology({**base.model_dump(), **value})
            return (
                topology
                if topology == base
                else topology.model_copy(update={"name": f"{base.name} (changed)"})
            )
        case dict():
            return parse_topology(value)
        case _:
            raise UserError(
                f"topology = {value!r}: expected a preset's name, a YAML file, or the topology's "
                "keys"
            )


def _profile(value: Any) -> Profile | None:
    fields = section(value, "profile")
    if fields == {"name": MEASURED}:
        return None
    match fields:
        case {"name": str(name)} if name in PROFILES:
            fields = {**PROFILES[name].model_dump(), **fields}
            if fields != PROFILES[name].model_dump():
                fields["name"] = f"{name} (changed)"
        case {"name": str(name)} if len(fields) == 1:
            known = [*PROFILES, MEASURED]
            raise UserError(
                f"profile = {name!r}: allowed are {', '.join(known)}{nearest(name, known)}"
            )
    try:
        return Profile.model_validate(fields)
    except ValidationError as error:
        raise explain(error, "profile", Profile) from None


def _task(fields: dict[str, Any], *, tied: bool) -> TaskConfig:
    config = task_config(str(fields.get("name", "stdlib")))
    if issubclass(config, GptTask):
        fields = {"tied": tied, **fields}
    try:
        return config.model_validate({"name": "stdlib", **fields})
    except ValidationError as error:
        raise explain(error, "task", config) from None


def _pipeline(fields: dict[str, Any]) -> PipelineConfig:
    try:
        return PipelineConfig.model_validate(fields)
    except ValidationError as error:
        raise explain(error, "pipeline", PipelineConfig) from None


def _run(fields: dict[str, Any]) -> RunConfig:
    try:
        run = RunConfig.model_validate(fields)
    except ValidationError as error:
        raise explain(error, "run", RunConfig) from None
    if run.steps is not None and run.tokens is not None:
        raise UserError(
            f"run: steps = {run.steps} and tokens = {run.tokens} are both given; give one of them"
        )
    return run


def _live(fields: Any) -> LiveConfig:
    if not isinstance(fields, dict):
        raise UserError(f"live = {fields!r}: expected keys such as `pace: profile`")
    try:
        return LiveConfig.model_validate(fields)
    except ValidationError as error:
        raise explain(error, "live", LiveConfig) from None


def _bad_updates(fields: Any) -> ScreeningConfig | Literal[False] | None:
    if fields is None or fields is False:
        return fields
    if not isinstance(fields, dict):
        raise UserError(
            f"bad_updates = {fields!r}: expected false, or keys such as `multiple: 1000`"
        )
    try:
        return ScreeningConfig.model_validate(fields)
    except ValidationError as error:
        raise explain(error, "bad_updates", ScreeningConfig) from None
