"""Reading YAML the way people write it: `1e-3` is a number, `no` is a word, and a mistake is one
line that says where it is.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from archipel.errors import UserError, seen_from


class _Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number and `no`, `off` or `yes` as text, as YAML 1.2 does (in YAML 1.1 the
    one is text and the others are true or false), and refuses a key that is given twice.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that `_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )
# A region may be called `no`, and a setting `off` is told as it was written.
_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] != _BOOL]
    for first, rules in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _BOOL, re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def parse(text: str) -> Any:
    """The value that `text` means.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except ValueError as error:  # what looks like a date or a number and is none
        raise yaml.YAMLError(str(error)) from None


def dump(data: dict[str, Any]) -> str:
    """`data` as YAML, keys in their order; `parse` reads it back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def inline(value: Any) -> str:
    """`value` as YAML on one line; `parse` reads it back."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping in the file `path`; `what` names it in errors.

    Raises:
        UserError: it cannot be read, is not YAML, or is not a mapping of names.
    """
    try:
        data = parse(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{what} {path}: {error.strerror}{seen_from(path)}") from None
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        kinds = {dict: "a key that is not text", list: "a list", str: "a text", NoneType: "nothing"}
        found = kinds.get(type(data), type(data).__name__)
        raise UserError(f"{what} {path}: expected `key: value` lines, found {found}")
    return data
