"""The libraries of the extras `hf`, `eval` and `track`, which are imported when they are needed.

What belongs here: importing one of them, and how it is told that one is missing or that the hub
does not answer. What does not: what they are used for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archipel.errors import UserError


def library(
    name: str, what: str = "task causal_lm and `archipel tokenize` need", extra: str = "hf"
) -> Any:
    """A library, without the bars that it draws.

    Args:
        name: as it is imported, such as `transformers`.
        what: needs it, with that verb.
        extra: what installs it.

    Raises:
        UserError: it is not installed.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{what} {name}, which cannot be imported ({error}); install it with: "
            f"pip install 'archipel[{extra}]'"
        ) from None
    match name:
        case "transformers":
            module.utils.logging.disable_progress_bar()
        case "datasets":
            module.disable_progress_bars()
    return module


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Make a `UserError` of whatever a Hugging Face library raises while it reads what the user
    named at `place`: a folder here, or something on the hub.
    """
    try:
        yield
    except Exception as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"{place}: cannot be read, neither here nor from the Hugging Face hub: {said}"
        ) from None
