"""Errors that are the user's to mend, and how they are worded: place, value, what is allowed, the
nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


class UserError(Exception):
    """A mistake in what the user asked for. The command line prints it as one line and exits with
    code 2.
    """


class Diverged(UserError):
    """A loss is not a finite number. The settings are the user's to mend, so this is a `UserError`
    too.
    """


class TrainingError(Exception):
    """Training could not go on: a deadlock, a pool process that died, an exception in the user's
    task. Exit code 1.
    """


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has stopped a run. The text says what goes on from there."""


def seen_from(path: str | Path) -> str:
    """` (relative to /a/folder)` behind a path that is not absolute: also one in a file is relative
    to where the command runs.
    """
    return "" if Path(path).is_absolute() else f" (relative to {Path.cwd()})"


def nearest(name: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing if no known name is near. In YAML a name may turn out to
    be a number or a date.
    """
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def checked(model: type[Model], fields: Any, place: str, expected: str = "") -> Model:
    """The settings `fields`, written at `place` by a user, as a `model`.

    Args:
        expected: what is allowed instead of something that is no mapping; where it is empty, that
            has been looked at already.

    Raises:
        UserError: something in them is unknown, of the wrong type, or impossible.
    """
    if expected and not isinstance(fields, dict):
        raise UserError(f"{place} = {fields!r}: expected {expected}")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise explain(error, place, model) from None


def explain(error: ValidationError, place: str, model: type[BaseModel]) -> UserError:
    """pydantic's first complaint about a `model` at `place` as one line: where, what was given,
    what is allowed.
    """
    complaints = error.errors(include_url=False)
    # A name that is mistyped is also missing.
    first = next((one for one in complaints if one["type"] == "extra_forbidden"), complaints[0])
    where = ".".join(str(part) for part in (place, *first["loc"]) if str(part))
    given = repr(first["input"])
    match first["type"]:
        case "extra_forbidden":
            name = str(first["loc"][-1])
            options = list(_at(model, first["loc"][:-1]).model_fields)
            allowed = (
                f"; allowed: {', '.join(options)}" if options else "; there is nothing to set here"
            )
            return UserError(f"{where}: unknown key {name!r}{nearest(name, options)}{allowed}")
        case "missing":
            return UserError(f"{where}: this key is required")
        case "union_tag_invalid":
            known = [tag.strip("' ") for tag in first["ctx"]["expected_tags"].split(",")]
            name = first["ctx"]["tag"]
            return UserError(
                f"{where}.kind = {name!r}: allowed are {', '.join(known)}{nearest(name, known)}"
            )
        case "union_tag_not_found":
            return UserError(f"{where}.kind: this key is required")
        case "value_error":
            return UserError(f"{where}: {first['ctx']['error']}")
        case "bool_type":
            return UserError(f"{where} = {given}: should be true or false")
        case _:
            return UserError(
                f"{where} = {given if len(given) < 80 else given[:77] + '...'}: "
                f"{first['msg'].removeprefix('Input ')}"
            )


def _at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """The model inside `model` that has the field `location`. In a union of kinds, pydantic names
    the kind on the way.
    """
    kinds: list[type[BaseModel]] = []
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            kinds = list(_models(model.model_fields[part].annotation))
            model = kinds[-1] if kinds else model
        elif tagged := [
            kind
            for kind in kinds
            if (field := kind.model_fields.get("kind")) and field.default == part
        ]:
            [model] = tagged
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation such as `list[Link] | None` speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
