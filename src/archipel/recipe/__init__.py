"""One experiment as typed, strict configuration.

What belongs here: what a recipe may say, its defaults, and the error messages for a wrong one. What
does not: running it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel

from archipel import methods
from archipel.actor import MethodConfig
from archipel.errors import UserError, checked, nearest
from archipel.recipe.sections import LiveConfig, PipelineConfig, RunConfig, TrackConfig
from archipel.run.codec import CODECS, Codec
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
from archipel.train.configs import CausalLmTask, GptTask, TaskConfig, task_config
from archipel.yamlfile import dump, parse, read_mapping

KEYS = (
    "method",
    "topology",
    "profile",
    "task",
    "pipeline",
    "run",
    "live",
    "wire",
    "track",
    "faults",
    "bad_updates",
    "label",
)
SECTIONS: dict[str, type[BaseModel]] = {
    "run": RunConfig,
    "pipeline": PipelineConfig,
    "live": LiveConfig,
    "faults": FaultsConfig,
    "bad_updates": ScreeningConfig,
}
"""Sections that have one kind of settings."""
DEFAULT_TOPOLOGY = "halos-4x4"
DEFAULT_TASK = "stdlib"
DEFAULT_PROFILE = "pythia-70m-h100"


@dataclass(frozen=True)
class Recipe:
    """A method, where it runs, what it trains, for how long, and what goes wrong.

    Attributes:
        label: the name under which a report shows the run; its folder's name begins with it.
        method: the method's name, or the path of its file.
        config: the method's settings.
        profile: the size of the job; None: it is measured when the run starts.
        faults: what goes wrong on purpose; None: nothing, and no invariants are checked.
        bad_updates: when an update is refused. None: by the default rule in a live run, and never
            in a simulated one. False: never.
        wire: the codec by which vectors travel.
        track: who is told of its figures while it goes on.
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
    wire: Codec = "fp32"
    track: tuple[TrackConfig, ...] = ()

    @property
    def acts_out_profile(self) -> bool:
        """A live run of it takes an inner step's time from a profile that is known beforehand."""
        return self.live.pace == "profile" and self.profile is not None

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
            "wire": self.wire,
        }
        if self.track:
            data["track"] = [one.model_dump(exclude_unset=True) for one in self.track]
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
    label = str(data.get("label", Path(method).stem))
    if not re.fullmatch(r"[\w.+=,-]+", label):
        raise UserError(
            f"label = {label!r}: it names a folder; use letters, digits, '.', '_', '+', '=', ',' "
            "and '-'"
        )
    topology = _topology(data.get("topology", DEFAULT_TOPOLOGY))
    pipeline = checked(
        PipelineConfig, data.get("pipeline", {}), "pipeline", "keys such as `stages: 2`"
    )
    if len(topology.workers) % pipeline.stages:
        raise UserError(
            f"pipeline.stages = {pipeline.stages}: topology {topology.name!r} has "
            f"{len(topology.workers)} workers, which is no multiple of that"
        )
    task = _task(section(data.get("task", DEFAULT_TASK), "task"), in_stages=pipeline.stages > 1)
    recipe = Recipe(
        label=label,
        method=method,
        config=config,
        topology=topology,
        profile=_profile(data.get("profile", DEFAULT_PROFILE)),
        task=task,
        run=checked(RunConfig, data.get("run", {}), "run", "keys such as `steps: 10000`"),
        pipeline=pipeline,
        live=checked(LiveConfig, data.get("live", {}), "live", "keys such as `pace: profile`"),
        bad_updates=_bad_updates(data.get("bad_updates")),
        wire=_wire(data.get("wire", "fp32")),
        track=_track(data.get("track")),
    )
    faults = parse_faults(data.get("faults"))
    return recipe if faults is None else recipe.with_faults(faults)


def load_recipe(
    source: Recipe | Mapping[str, Any] | str | Path, settings: Mapping[str, Any] | None = None
) -> Recipe:
    """A recipe as it is, from its fields, or from a YAML file, with `settings` laid over it.

    Args:
        settings: values by `section.key`; the method's own name is a section too.

    Raises:
        UserError: the file, or what it or `settings` say, is wrong.
    """
    match source:
        case Recipe() if not settings:
            return source
        case Recipe():
            fields = parse(source.to_yaml())
        case Mapping():
            fields = dict(source)
        case _:
            fields = read_mapping(Path(source), "recipe")
    fields = {"topology": DEFAULT_TOPOLOGY, "profile": DEFAULT_PROFILE, **fields}
    method = section(fields.get("method", {}), "method").get("name")
    for name, value in (settings or {}).items():
        place, key = split_name(name, f"{name}={value}")
        place = "method" if place == method else place
        if place not in KEYS:
            raise UserError(
                f"--set {name}={value}: unknown section {place!r}{nearest(place, KEYS)}; allowed: "
                f"{', '.join(KEYS)}"
            )
        fields[place] = {**section(fields.get(place) or {}, place), key: value}
    return parse_recipe(fields)


def recipes_of(
    chosen: str | Iterable[str | Mapping[str, Any]],
    common: Mapping[str, Any],
    seeds: int,
    settings: Mapping[str, Any],
) -> list[Recipe]:
    """One recipe for each method and seed.

    Args:
        chosen: the methods, see `experiment.compare`.
        common: the sections that all recipes have.
        settings: laid over them; a method's name or label is a section too.

    Raises:
        UserError: something in them is unknown or impossible.
    """
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: must be at least 1")
    if isinstance(chosen, str):
        labelled = [_labelled(text) for text in chosen.split(",") if text.strip()]
    else:
        labelled = [_labelled(one) for one in chosen]
    if not labelled:
        raise UserError(f"--methods {chosen!r}: name at least one of {', '.join(methods.names())}")
    labels = [label for label, _ in labelled]
    if repeated := {label for label in labels if labels.count(label) > 1}:
        raise UserError(f"--methods: {', '.join(sorted(repeated))} is named twice")
    run = {key: value for key, value in common["run"].items() if value is not None}
    sections: dict[str, Any] = {**common, "run": run}
    for name, value in settings.items():
        place, key = split_name(name, f"{name}={value}")
        matching = [fields for label, fields in labelled if place in (label, fields["name"])]
        for fields in matching:
            fields[key] = value
        if place in sections:
            sections[place] = {**section(sections[place] or {}, place), key: value}
        elif not matching:
            names = (fields["name"] for _, fields in labelled)
            known = [*dict.fromkeys([*labels, *names]), *sections]
            raise UserError(
                f"--set {name}={value}: {place!r} is none of "
                f"{', '.join(known)}{nearest(place, known)}"
            )
    first = sections["run"].get("seed", 0)
    return [
        parse_recipe(
            {
                **sections,
                "method": dict(fields),
                "label": label,
                # A seed that is no number is refused where the recipe is parsed.
                "run": {**sections["run"], "seed": first + i if isinstance(first, int) else first},
            }
        )
        for label, fields in labelled
        for i in range(seeds)
    ]


def _labelled(method: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A method's label and fields, from `name`, `name+flag+flag` or a mapping."""
    if isinstance(method, Mapping):
        fields = dict(method)
        if "name" not in fields:
            raise UserError(f"method: `name` is required; methods: {', '.join(methods.names())}")
        label = fields.pop("label", Path(str(fields["name"])).stem)
        return str(label), {**fields, "name": str(fields["name"])}
    if not isinstance(method, str):
        raise UserError(
            f"method = {method!r}: expected a name, or keys with `name` among them; methods: "
            f"{', '.join(methods.names())}"
        )
    name, *flags = method.strip().split("+")
    known = [
        key
        for key, field in methods.load(name).Config.model_fields.items()
        if field.annotation is bool
    ]
    for flag in flags:
        if flag not in known:
            raise UserError(
                f"--methods {method.strip()}: {name} has no flag {flag!r}{nearest(flag, known)}; "
                f"its flags: {', '.join(known) or 'none'}"
            )
    return "+".join([Path(name).stem, *flags]), {"name": name, **dict.fromkeys(flags, True)}


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Values by `section.key`, from texts such as `halos.inner_steps=16`; the last one counts.

    Raises:
        UserError: one of them does not have that form.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        split_name(name if equals else "", text)
        try:
            settings[name.strip()] = parse(value)
        except yaml.YAMLError:
            raise UserError(f"--set {text}: {value!r} is not a value that YAML can read") from None
    return settings


def split_name(name: str, text: str) -> tuple[str, str]:
    """Section and key of a setting's name; `text` is what the user wrote.

    Raises:
        UserError: the name is not `section.key`.
    """
    place, dot, key = name.strip().partition(".")
    if not (dot and key):
        raise UserError(
            f"--set {text}: expected section.key=value, for example halos.inner_steps=16 or "
            "task.width=64"
        )
    return place, key


def section(value: Any, name: str) -> dict[str, Any]:
    """A section that may be given as its name alone."""
    match value:
        case str():
            return {"name": value}
        case {"name": given} if not isinstance(given, str):
            raise UserError(f"{name}.name = {given!r}: expected a name, as text")
        case dict():
            return dict(value)
        case _:
            raise UserError(f"{name} = {value!r}: expected a name, or keys with `name` among them")


def _method(fields: dict[str, Any]) -> tuple[str, MethodConfig]:
    if "name" not in fields:
        raise UserError(f"method: `name` is required; methods: {', '.join(methods.names())}")
    name = str(fields.pop("name"))
    return name, checked(methods.load(name).Config, fields, name)


def _topology(value: Any) -> Topology:
    match value:
        case str():
            return load_topology(value)
        case {"name": _} if "regions" not in value:  # a preset or file, and what differs from it
            base = load_topology(section(value, "topology")["name"])
            changed = parse_topology({**base.model_dump(), **value})
            if changed == base:
                return base
            return changed.model_copy(update={"name": f"{base.name} (changed)"})
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
            preset = PROFILES[name].model_dump()
            fields = {**preset, **fields}
            if fields != preset:
                fields["name"] = f"{name} (changed)"
        case {"name": str(name)} if len(fields) == 1:
            known = [*PROFILES, MEASURED]
            raise UserError(
                f"profile = {name!r}: allowed are {', '.join(known)}{nearest(name, known)}"
            )
    return checked(Profile, fields, "profile")


def _task(fields: dict[str, Any], *, in_stages: bool) -> TaskConfig:
    config = task_config(str(fields.get("name", DEFAULT_TASK)))
    if issubclass(config, GptTask):
        fields = {"tied": not in_stages, **fields}
    if issubclass(config, CausalLmTask):
        fields = {"blocks": in_stages, **fields}
    return checked(config, {"name": DEFAULT_TASK, **fields}, "task")


def _wire(value: Any) -> Codec:
    fields = section(value, "wire")
    name = fields.get("name")
    if fields.keys() != {"name"} or name not in CODECS:
        wrong = name if fields.keys() == {"name"} else value
        raise UserError(
            f"wire = {wrong!r}: allowed are {', '.join(CODECS)}{nearest(wrong, CODECS)}"
        )
    return cast(Codec, name)


def _track(value: Any) -> tuple[TrackConfig, ...]:
    if value is None:
        return ()
    several = value if isinstance(value, list) else [value]
    found = tuple(checked(TrackConfig, section(one, "track"), "track") for one in several)
    names = [one.name for one in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"track: {min(repeated)} is named twice")
    return found


def _bad_updates(fields: Any) -> ScreeningConfig | Literal[False] | None:
    if fields is None or fields is False:
        return fields
    return checked(
        ScreeningConfig, fields, "bad_updates", "false, or keys such as `multiple: 1000`"
    )
