"""The training methods, one file each; a file's name is the method's name on the command line.

A file here imports `actor`, `vector`, `outer`, `parameter_server` and `collective` and nothing else
of this package. It offers `Config`, the method's settings with the published values as defaults,
and `build`, which makes the actors. A new file is a new method: nothing is registered, and a method
of your own can lie anywhere and go by its path, `my_method.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import cast

from archipel.actor import Method
from archipel.errors import TrainingError, UserError, nearest
from archipel.pyfile import import_file, is_due_to, whereabouts


def names() -> list[str]:
    """The names of all methods in this folder, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


@cache
def load(name: str) -> Method:
    """The method called `name`: one of `names()`, or a Python file.

    Raises:
        UserError: there is no such method or file, or the file lacks `Config` or `build`.
    """
    if not name.endswith(".py"):
        if name not in names():
            known = f"{', '.join(names())} and files such as my_method.py"
            raise UserError(f"method = {name!r}: allowed are {known}{nearest(name, names())}")
        return cast(Method, importlib.import_module(f"{__name__}.{name}"))
    module = import_file(Path(name), f"method = {name!r}")
    for part in ("Config", "build"):
        if not hasattr(module, part):
            raise UserError(f"method = {name!r}: the file has no {part!r}")
    return cast(Method, module)


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """Make a `UserError` of what the method called `name` raises, if it is a file of the user's. A
    mistake of this package stays what it is, and so is seen with its traceback.
    """
    try:
        yield
    except (UserError, TrainingError):
        raise
    except Exception as error:
        if not name.endswith(".py") or not is_due_to(Path(name), error):
            raise
        raise UserError(f"method = {name!r}: it failed at {whereabouts(error)}") from error
