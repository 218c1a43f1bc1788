"""Importing a Python file that the user names: a task of their own, a method of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from archipel.errors import UserError


def import_file(path: Path, place: str) -> ModuleType:
    """The module in the file `path`; `place` names it in errors. What the file itself raises goes through.

    Raises:
        UserError: there is no such file, or it is not a Python file.
    """
    if not os.path.isfile(path):
        raise UserError(f"{place}: there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"archipel_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{place}: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
