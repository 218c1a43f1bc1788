"""What a Python program may give to `archipel.compare` and the like.

What belongs here: the types of their arguments, and how a wrong one is told. What does not: what is
in a recipe or a network, which say that themselves (`__init__.py`, `sim/topology.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from archipel.errors import UserError
from archipel.recipe import Recipe


def _is_path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, str) and bool(value.strip()))


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "recipe": (
        lambda value: isinstance(value, (Recipe, Mapping)) or _is_path(value),
        "a recipe's fields, or the path of a YAML file",
    ),
    "source": (
        lambda value: isinstance(value, Mapping) or _is_path(value),
        "a sweep's keys, or the path of a YAML file",
    ),
    "directory": (_is_path, "the path of a folder"),
    "methods": (  # one mapping alone would be taken for a list of its keys
        lambda value: isinstance(value, Iterable) and not isinstance(value, Mapping),
        "names such as 'halos,diloco', or a list of names and mappings",
    ),
    "faults": (
        lambda value: value is None or isinstance(value, Mapping) or _is_path(value),
        "the keys of a recipe's section `faults`, the path of a YAML file that has them, or None",
    ),
    "settings": (
        lambda value: (
            value is None
            or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value))
        ),
        "values by `section.key`, such as {'run.seed': 1}",
    ),
    "seeds": (lambda value: _is_number(value, int), "a whole number, at least 1"),
    "target_loss": (
        lambda value: value is None or _is_number(value, int, float),
        "a finite number, or None",
    ),
    "processes": (
        lambda value: value is None or (_is_number(value, int) and value >= 1),
        "a whole number, at least 1, or None",
    ),
    "checkpoint_every": (
        lambda value: value is None or isinstance(value, str) or _is_number(value, int),
        "tokens such as 1000000, seconds such as '600s', or None",
    ),
    "strict": (lambda value: isinstance(value, bool), "True or False"),
    "insecure": (lambda value: isinstance(value, bool), "True or False"),
    "address": (
        lambda value: value is None or _is_path(value),
        "a text such as '10.0.0.1:6379', or None",
    ),
    "out": (
        lambda value: value is None or _is_path(value),
        "the path of a folder, or None: a new one",
    ),
    "progress": (callable, "a function"),
    "tell": (callable, "a function"),
    "live_progress": (callable, "a function"),
}
"""What each argument may be, and how that is said."""


def check_arguments(**given: Any) -> None:
    """Raise a `UserError` for the first of the arguments that cannot be what it is."""
    for name, value in given.items():
        fits, allowed = _ALLOWED[name]
        if not fits(value):
            raise UserError(f"{name} = {value!r}: expected {allowed}")
