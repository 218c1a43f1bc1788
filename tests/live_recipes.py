"""Recipes of small runs, which tests launch."""

from __future__ import annotations

from typing import Any

from archipel import methods
from archipel.recipe import Recipe, parse_recipe

SETTINGS = {
    "inner_steps": 5,
    "accumulate": 2,
    "global_lr": 1.0,
    "local_lr": 1.6,
    "local_momentum": 0.0,
    "outer_momentum": 0.0,
}
PROFILE = {"name": "small", "model_bytes": 10_000, "step_time_s": 0.03}
QUICK = {**PROFILE, "step_time_s": 0.002}
TASK = {"name": "synthetic", "width": 16, "valid_sequences": 8}
ONE: dict[str, Any] = {"topology": {"regions": {"east": [1.0]}}}
TWO: dict[str, Any] = {
    "topology": {
        "regions": {"east": [1.0], "west": [0.5]},
        "default": {"bandwidth_gbit_s": 1.0},
    }
}
"""For what needs no more hosts: each takes seconds to start."""


def recipe(method: str, /, *, seed: int = 0, **sections: Any) -> Recipe:
    """Four workers in two regions, 50 inner steps each, unless `sections` say something else."""
    settings = {}
    if method in methods.names():
        fields = methods.load(method).Config.model_fields
        settings = {key: value for key, value in SETTINGS.items() if key in fields}
    return parse_recipe(
        {
            "method": {"name": method, **settings},
            "topology": {
                "regions": {"east": [1.0, 1.0], "west": [1.0, 0.5]},
                "default": {"bandwidth_gbit_s": 1.0},
            },
            "profile": PROFILE,
            "task": TASK,
            "run": {"steps": 200, "evaluations": 4, "seed": seed},
            **sections,
        }
    )
