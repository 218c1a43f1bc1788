"""The commands for writing a recipe: `init`, `check`, `schema`.

What belongs here: the arguments of these commands, and how their answers are printed. What does
not: what is in a first recipe (`recipe/template.py`), in the schema (`recipe/schema.py`), and what
a recipe would do (`preview.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from archipel import preview
from archipel.cli import terminal
from archipel.cli.options import Json, Processes, Set, a_path, file_argument
from archipel.recipe import DEFAULT_TASK, DEFAULT_TOPOLOGY, load_recipe, parse_settings, template
from archipel.recipe.schema import recipe_schema
from archipel.report.words import in_bytes

SCHEMA = "recipe.schema.json"
"""Where `init` looks for the schema, beside the recipe."""
LINKS = 10
"""Links between regions that are printed."""
_NAMES = len("message, modelled")
"""Columns of the names in front of what is said."""


def init(
    file: Annotated[
        Path | None,
        typer.Argument(
            parser=a_path, metavar="[FILE]", help="The new recipe. Default: recipe.yaml."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="How it trains; see `archipel list methods`.")
    ] = "halos",
    topology: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The network: a preset or a YAML file.")
    ] = DEFAULT_TOPOLOGY,
    task: Annotated[
        str, typer.Option(metavar="NAME", help="What it trains; see `archipel list tasks`.")
    ] = DEFAULT_TASK,
) -> None:
    """Write a recipe that says what can be set in it."""
    file = file or Path("recipe.yaml")
    schema = SCHEMA if (file.parent / SCHEMA).is_file() else None
    text = template.template(str(file), method, topology, task, schema)
    template.write_new(file, text)
    terminal.tell(f"{file}: `archipel check {file}` says what it would do")
    if template.FILL_IN in text:
        terminal.tell(f"First fill in what says {template.FILL_IN}.")


def check(
    recipe: Annotated[
        Path,
        file_argument("RECIPE.yaml", "What would run."),
    ],
    settings: Set = None,
    processes: Processes = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="For `archipel launch` here: what it refuses, and its memory."),
    ] = False,
    as_json: Json = False,
) -> None:
    """What a recipe would do, and what it takes; nothing is run."""
    loaded = load_recipe(recipe, parse_settings(settings or []))
    found = preview.preview(loaded, processes, live=live)
    if as_json:
        print(json.dumps(asdict(found), allow_nan=False))
        return
    terminal.tell(
        "Computed, not run: nothing was trained or measured. Times, and bytes on links, are "
        "modelled."
    )
    for name, said in _lines(found):
        terminal.tell(f"{name:<{_NAMES}}  {said}")
    for warning in found.warnings:
        terminal.say(f"archipel: warning: {warning}")


def schema() -> None:
    """Print a JSON schema of recipes, for editors."""
    print(json.dumps(recipe_schema(), indent=1))


def _lines(found: preview.Preview) -> Iterator[tuple[str, str]]:
    """What is printed: a name, and what is said."""
    changed = ", ".join(
        f"{name} {used} (published: {published})"
        for name, (used, published) in found.changed.items()
    )
    yield "method", f"{found.label}: {changed or 'all settings as published'}"
    yield (
        "topology",
        f"{found.topology}: {_count(found.workers, 'worker')} in "
        f"{_count(found.regions, 'region')}"
        + (f", {found.replicas} replicas" if found.replicas < found.workers else ""),
    )
    if found.slowest_link:
        yield "slowest link", found.slowest_link
    yield from _task_lines(found)
    tokens = f", {found.tokens:,} tokens" if found.tokens else ""
    yield (
        "plan",
        f"{found.steps:,} inner steps of all workers together{tokens}; "
        f"{found.steps / found.replicas:,.4g} steps a {_trainer(found)} on average",
    )
    yield from _modelled_lines(found)
    yield from _memory_lines(found)


def _task_lines(found: preview.Preview) -> Iterator[tuple[str, str]]:
    if found.model is None:
        yield "task", "none: nothing is trained"
        return
    model = found.model
    yield "task", model.description
    yield "parameters", f"{model.parameters:,}"
    yield "message, live", _on_wire(model.message, found.wire)
    first, largest, last = model.lr
    yield (
        "learning rate",
        f"{first:.3g} at first, {largest:.3g} at most, {last:.3g} at last, as planned",
    )


def _modelled_lines(found: preview.Preview) -> Iterator[tuple[str, str]]:
    modelled = found.modelled
    if modelled is None:
        yield (
            "modelled",
            f"nothing yet: profile {found.profile} takes the time of a step, and the model's own "
            "bytes, when the run starts",
        )
        return
    yield (
        "message, modelled",
        f"{_on_wire(modelled.message, found.wire)} (profile {found.profile})",
    )
    idle = "" if modelled.idle_fraction is None else f", workers idle {modelled.idle_fraction:.1%}"
    yield (
        "time, modelled",
        f"{modelled.time_s:,.1f} s until it ends by its {modelled.stopped}{idle}; an inner step "
        f"takes the fastest worker {modelled.step_time_s * 1e3:.6g} ms",
    )
    least = min(modelled.steps_of, key=lambda worker: modelled.steps_of[worker])
    most = max(modelled.steps_of, key=lambda worker: modelled.steps_of[worker])
    yield (
        "steps a worker",
        f"{modelled.steps_of[least]:,} ({least}) to {modelled.steps_of[most]:,} ({most})",
    )
    yield (
        "bytes, modelled",
        f"{in_bytes(modelled.sent_bytes)} on all links, {in_bytes(modelled.slow_link_bytes)} "
        "between regions:",
    )
    shown = list(modelled.by_link.items())[:LINKS]
    for link, size_bytes in shown:
        yield "", f"{link}: {in_bytes(size_bytes)}"
    rest = sum(modelled.by_link.values()) - sum(size_bytes for _, size_bytes in shown)
    if rest:
        yield "", f"{len(modelled.by_link) - LINKS} more links: {in_bytes(rest)}"
    unplaced = modelled.slow_link_bytes - sum(modelled.by_link.values())
    if unplaced > len(modelled.by_link):  # more than rounding
        yield "", f"on links that the model does not name: {in_bytes(unplaced)}"


def _memory_lines(found: preview.Preview) -> Iterator[tuple[str, str]]:
    memory = found.memory
    if memory is None:
        if found.model is not None:
            yield "memory", "not known: the method's actors look at values when they are made"
        return
    there = "not known" if found.machine_bytes is None else in_bytes(found.machine_bytes)
    yield (
        "memory, computed",
        f"{in_bytes(memory.simulated_bytes)} for a simulated run, of which a worker's weights and "
        f"inner optimizer are {in_bytes(memory.worker_bytes)}",
    )
    yield (
        "",
        f"{in_bytes(memory.host_bytes)} for the largest host of a live run, "
        f"{in_bytes(memory.live_bytes)} for all of it on one machine",
    )
    yield "", f"this machine's: {there}"
    if not memory.whole:
        yield "", "without activations: the task's loss cannot be looked at without values"


def _on_wire(message: preview.OnWire, wire: str) -> str:
    whole = f"{message.fp32_bytes:,} bytes a vector of weights"
    if wire == "fp32":
        return whole
    return (
        f"{whole} as fp32; by {wire} {message.difference_bytes:,} bytes where it is a difference, "
        f"{message.value_bytes:,} where it is a value"
    )


def _trainer(found: preview.Preview) -> str:
    return "replica" if found.replicas < found.workers else "worker"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
