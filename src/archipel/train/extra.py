"""The libraries of the extra `hf`, which are imported when a task needs them.

What belongs here: importing one of them, and how it is told that one is missing or that the hub
does not answer. What does not: what they are used for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archipel.errors import UserError


def library(name: str) -> Any:
    """`transformers`, `datasets` or `tokenizers`, without the bars that it draws.

    Raises:
        UserError: it is not installed.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"task causal_lm and `archipel tokenize` need {name}, which cannot be imported "
            f"({error}); install it with: pip install 'archipel[hf]'"
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
