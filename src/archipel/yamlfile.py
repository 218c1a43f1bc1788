"""Reading YAML the way people write it: `1e-3` is a number, and a mistake is one line that says where it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from archipel.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-3` as text, because there is no dot in it; YAML 1.2 and everybody else read a number."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def parse(text: str) -> Any:
    """The value that `text` means.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    return yaml.load(text, _Loader)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping in the file `path`; `what` names it in errors.

    Raises:
        UserError: it cannot be read, is not YAML, or is not a mapping of names.
    """
    try:
        data = parse(path.read_text())
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UserError(f"{what} {path}: expected `key: value` lines, found {type(data).__name__}")
    return data
