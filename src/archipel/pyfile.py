"""Importing Python files that the user names (a task or a method), and finding the line in them
that failed.

What belongs here: what is the same for all such files. What does not: what a task or a method is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from archipel.errors import UserError, seen_from

PREFIX = "archipel_user_"
"""What the names begin with that the modules of such files get."""
folders: list[str] = []
"""The folders of all files that have been imported here, which have become importable."""
_importing: list[Path] = []
"""Files that are being imported at this moment."""


def import_file(path: Path, place: str) -> ModuleType:
    """The module in the file `path`; `place` names it in errors.

    Its folder becomes importable, and comes first, as that of a script does with `python path`: the
    file can import its neighbours, now or later. Another user's file may have imported neighbours
    of the same names; those are not found in their place.

    Raises:
        UserError: there is no such file, it is not a Python file, or what it does when it is
            imported fails.
    """
    if not os.path.isfile(path):
        raise UserError(f"{place}: there is no file {str(path)!r}{seen_from(path)}")
    spec = importlib.util.spec_from_file_location(PREFIX + path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{place}: {str(path)!r} is not a Python file")
    _put_first(str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    _importing.append(path)
    try:
        spec.loader.exec_module(module)
    except UserError:
        del sys.modules[spec.name]
        raise
    except Exception as error:
        del sys.modules[spec.name]
        raise UserError(f"{place}: importing it failed at {whereabouts(error)}") from error
    finally:
        _importing.remove(path)
    return module


def _put_first(folder: str) -> None:
    """Have imports look in this folder first, also for names that another user's folder has."""
    for name, module in list(sys.modules.items()):
        home = _user_folder(module)
        neighbour = Path(folder, name.split(".")[0])
        if home not in (None, folder) and (
            neighbour.is_dir() or neighbour.with_suffix(".py").is_file()
        ):
            del sys.modules[name]
    if folder in folders:
        sys.path.remove(folder)
    else:
        folders.append(folder)
    sys.path.insert(0, folder)


def _user_folder(module: ModuleType) -> str | None:
    """Which of `folders` the file of an imported neighbour lies in."""
    file = getattr(module, "__file__", None)
    if file is None or "site-packages" in file or module.__name__.startswith(PREFIX):
        return None
    homes = [folder for folder in folders if Path(folder) in Path(file).parents]
    return max(homes, key=len, default=None)


def check_not_importing(function: str) -> None:
    """Raise a `UserError` if `archipel.FUNCTION` is called by a user's file while archipel imports
    that file. A script that names itself as the task's file would start itself again and again.
    """
    if _importing:
        raise UserError(
            f"{_importing[-1]}: archipel.{function}() is called while this file is imported for "
            f'what it defines; put the call under `if __name__ == "__main__":`'
        )


def whereabouts(error: Exception) -> str:
    """What a file of the user's raised, on one line, and file and line of it."""
    at, text = place_of(error), " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:
        at, text = f"{error.filename}:{error.lineno}", error.msg
    return f"{at}: {type(error).__name__}: {text}"


CALLED = ("actor.py", "vector.py", "outer.py", "parameter_server.py", "collective.py")
"""Files of this package that do what a user's method tells them to."""


def is_due_to(file: Path, error: Exception) -> bool:
    """Whether the user's `file` raised `error`, itself or by what it gave to a library or to
    `CALLED`, or by another file that it called.

    An engine that falls over though a method only asked it for something has a mistake of its own,
    and so has a script that archipel tells of its progress.
    """
    package, frames = os.path.dirname(__file__), traceback.extract_tb(error.__traceback__)
    if not any(os.path.realpath(frame.filename) == os.path.realpath(file) for frame in frames):
        return False
    for frame in reversed(frames):
        if frame.filename.startswith(package + os.sep):  # first, for it may lie among libraries
            if frame.filename not in (os.path.join(package, name) for name in CALLED):
                return False
        elif not _is_foreign(frame.filename):
            return True
    return False


def _is_foreign(filename: str) -> bool:
    """Whether a file is a library's or this package's, or none at all."""
    foreign = ("site-packages", os.path.dirname(__file__), os.path.dirname(os.__file__))
    return filename.startswith("<") or any(part in filename for part in foreign)


def place_of(error: Exception) -> str:
    """File and line where `error` was raised: the deepest one that is neither a library's nor this
    package's, if there is any.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_foreign(frame.filename)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
