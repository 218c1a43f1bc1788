"""A JSON schema of recipes, for editors that complete keys and underline mistakes.

What belongs here: which sections a recipe has in which forms, as a schema. What does not: the
sections' settings, which stand where they are read; and what is wrong with a recipe, which
`__init__.py` says better, and with more to go by: a schema sees no files.

https://json-schema.org/draft/2020-12
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from archipel import methods
from archipel.recipe import DEFAULT_TASK, KEYS, SECTIONS
from archipel.recipe.sections import TrackConfig
from archipel.run.codec import CODECS
from archipel.sim.topology import MEASURED, PRESETS, PROFILES, Profile, Topology
from archipel.train.configs import CONFIGS

Schema = dict[str, Any]
OWN_METHOD, OWN_TASK = r"\.py$", ":"
"""What is found in the name of a method or a task of the user's own."""


def recipe_schema() -> Schema:
    """The schema of a recipe. What a method or a task of the user's own can set is not in it."""
    methods_of = {
        name: cast(type[BaseModel], methods.load(name).Config) for name in methods.names()
    }
    models: list[type[BaseModel]] = [
        *methods_of.values(),
        *CONFIGS.values(),
        *SECTIONS.values(),
        Topology,
        Profile,
        TrackConfig,
    ]
    found, shared = models_json_schema([(model, "validation") for model in models])
    of = {model: found[model, "validation"] for model in models}
    definitions: dict[str, Schema] = shared["$defs"]

    def whole(model: type[BaseModel]) -> Schema:
        """The schema of a model itself, not a reference to it."""
        return definitions.pop(of[model]["$ref"].rpartition("/")[2])

    topology, profile = whole(Topology), whole(Profile)
    names = {
        "method": _by_name({name: whole(model) for name, model in methods_of.items()}, OWN_METHOD),
        "task": _by_name(
            {name: whole(model) for name, model in CONFIGS.items()}, OWN_TASK, DEFAULT_TASK
        ),
    }
    properties: Schema = {
        "method": names["method"],
        "topology": _named(topology, f"{', '.join(PRESETS)}, internet-N, or a YAML file"),
        "profile": _named(profile, f"{', '.join(PROFILES)}, or {MEASURED}"),
        "task": names["task"],
        **{name: of[model] for name, model in SECTIONS.items()},
        "wire": {"anyOf": [_one_of(CODECS), _object({"name": _one_of(CODECS)}, ["name"])]},
        "label": {"type": ["string", "number"], "description": "the name that reports show"},
    }
    tracker = [{"type": "string"}, of[TrackConfig]]
    several = {"type": "array", "items": {"anyOf": tracker}}
    properties["track"] = {"anyOf": [{"type": "null"}, *tracker, several]}
    properties["faults"] = {"anyOf": [{"type": "null"}, properties["faults"]]}
    properties["bad_updates"] = {"anyOf": [{"enum": [None, False]}, properties["bad_updates"]]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of archipel",
        **_object({key: properties[key] for key in KEYS}, ["method"]),
        "$defs": definitions,
    }


def _by_name(kinds: dict[str, Schema], own: str, default: str | None = None) -> Schema:
    """A section whose settings depend on its name, given as the name alone or with settings.

    Args:
        own: a pattern for names of the user's own.
        default: the name that it has without one; None: it needs one.
    """
    name = {"anyOf": [_one_of(kinds), {"type": "string", "pattern": own}]}
    rules = []
    for kind, settings in kinds.items():
        allowed = {"const": kind, "description": settings.get("description", "")}
        settings["properties"] = {**settings.get("properties", {}), "name": allowed}
        asked = {"properties": {"name": {"const": kind}}}
        # Where there is no name, its schema holds.
        rules.append(
            {"if": asked if kind == default else {**asked, "required": ["name"]}, "then": settings}
        )
    section: Schema = {"type": "object", "properties": {"name": name}, "allOf": rules}
    if default is None:
        section["required"] = ["name"]
    return {"if": {"type": "string"}, "then": name, "else": section}


def _named(model: Schema, names: str) -> Schema:
    """A section that is a name, or all its keys, or a name and what differs from it."""
    required = model.pop("required")
    model["anyOf"] = [{"required": ["name"]}, {"required": required}]
    named = {"type": "string", "description": names}
    return {"if": {"type": "string"}, "then": named, "else": model}


def _one_of(names: Iterable[str]) -> Schema:
    return {"enum": list(names)}


def _object(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
