"""A first recipe: every section with its settings, their defaults and what they mean.

What belongs here: how such a file is laid out, and which settings a beginner changes first. What
does not: what a setting means and its default, which stand with the setting itself (`__init__.py`
and what it imports), and writing the file (`cli/recipes.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from archipel import methods
from archipel.errors import UserError
from archipel.recipe import DEFAULT_PROFILE, DEFAULT_TASK, DEFAULT_TOPOLOGY, SECTIONS
from archipel.recipe.sections import TRACKERS
from archipel.run.codec import CODECS
from archipel.sim.topology import MEASURED, PRESETS, Profile, Topology, load_topology
from archipel.train.configs import CONFIGS, task_config
from archipel.yamlfile import inline

FILL_IN = "FILL IN"
"""Stands where a setting is required."""
FIRST = {
    "batch_size",
    "evaluations",
    "gradient_accumulation",
    "heads",
    "layers",
    "lr",
    "pace",
    "precision",
    "seed",
    "sequence",
    "sources",
    "stages",
    "text_column",
    "vocabulary",
    "width",
}
"""Settings of tasks and sections that are changed first. All others are commented out."""
_COMMENT_COLUMN = 32


def template(
    name: str,
    method: str = "halos",
    topology: str = DEFAULT_TOPOLOGY,
    task: str = DEFAULT_TASK,
    schema: str | None = None,
) -> str:
    """The text of a recipe, which means the same as one that says no more than these three.

    Args:
        name: of the file that it will be.
        method, topology, task: names, as in a recipe. What a task requires is left to be filled in.
        schema: a file of `archipel schema` that editors are to check it by; None: there is none.

    Raises:
        UserError: there is no such method, topology or task.
    """
    load_topology(topology)
    module, task_kind = methods.load(method), task_config(task)
    label = Path(method).stem
    parts = [
        [
            *([f"# yaml-language-server: $schema={schema}"] if schema else []),
            f"# A recipe of archipel. `archipel check {name}` says what it would do,",
            f"# `archipel run {name}` simulates it, `archipel launch {name}` runs it for real.",
            "# All values are defaults. What is commented out is not set, and has its default too.",
        ],
        [
            _said(inspect.getdoc(module)),
            "method:",
            _line("  name", method, f"or {_names(methods.names(), method)}or your own file.py"),
            *_settings(cast(type[BaseModel], module.Config), first=None),
        ],
        [
            _said(Topology.__doc__),
            _line(
                "topology", topology, f"or {_names([*PRESETS, 'internet-N'], topology)}or a file"
            ),
        ],
        [
            _said(Profile.__doc__),
            _line("profile", DEFAULT_PROFILE, f"or {MEASURED}: this machine, this task"),
        ],
        [
            _said(task_kind.__doc__),
            "task:",
            _line("  name", task, f"or {_names(CONFIGS, task)}or your own file.py:function"),
            *_settings(task_kind, first=FIRST),
        ],
        [_line("wire", CODECS[0], f"how vectors travel; or {', '.join(CODECS[1:])}")],
        [
            _line(
                "# track",
                TRACKERS[0],
                f"who is told of the figures; or {TRACKERS[1]}, file.py:make",
            )
        ],
        [_line("# label", label, "what reports call the run")],
    ]
    for place, section in SECTIONS.items():
        lines = [_said(section.__doc__), f"{place}:", *_settings(section, first=FIRST)]
        if place in ("faults", "bad_updates"):  # to name them is to have them
            lines[1:] = [f"# {line.replace('  # ', '  ', 1)}" for line in lines[1:]]
        parts.insert(-2, lines)
    return "\n\n".join("\n".join(filter(None, lines)) for lines in parts) + "\n"


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet.

    Raises:
        UserError: it is there, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            f"{path} is there already, and is left as it is; name another file"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _settings(config: type[BaseModel], *, first: set[str] | None) -> Iterator[str]:
    """A line for each setting. Those that are not in `first`, and those that default to null, are
    commented out; `first` is None: only the latter.
    """
    # Not validated: some have no default.
    defaults = config.model_construct().model_dump(mode="json")
    for key, field in config.model_fields.items():
        meaning = field.description or ""
        if key == "name":
            continue
        if field.is_required():
            yield _line(f"  {key}", FILL_IN, f"to be filled in: {meaning}")
        else:
            value = defaults[key]
            set_here = value is not None and (first is None or key in first)
            yield _line(f"  {key}" if set_here else f"  # {key}", value, meaning)


def _line(key: str, value: Any, comment: str) -> str:
    setting = f"{key}: {inline(value)}"
    return f"{setting:<{_COMMENT_COLUMN}}  # {comment}" if comment else setting


def _said(text: str | None) -> str:
    """The first paragraph of a docstring, as a comment."""
    paragraph = " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())
    return f"# {paragraph}" if paragraph else ""


def _names(names: Iterable[str], but: str) -> str:
    return "".join(f"{name}, " for name in names if name != but)
