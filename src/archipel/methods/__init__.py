"""One file a method; the file's name is its name on the command line.

A file here imports `actor`, `vector`, `outer` and `parameter_server` and nothing else of this package. It offers
`Config`, the method's settings with the published values as defaults, and `build`, which makes the actors. A new file
is a new method: nothing is registered.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from archipel.actor import Method


def names() -> list[str]:
    """The names of all methods, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Method:
    """The method called `name`, one of `names()`."""
    return cast(Method, importlib.import_module(f"{__name__}.{name}"))
