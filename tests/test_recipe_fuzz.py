"""Recipes and topologies that nobody would write: always a recipe or a `UserError` with a place,
never another exception.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from archipel import assemble, methods
from archipel.errors import UserError
from archipel.recipe import (
    KEYS,
    Recipe,
    load_recipe,
    parse_recipe,
    parse_settings,
)
from archipel.recipe.sections import LiveConfig, PipelineConfig, RunConfig, TrackConfig
from archipel.run.codec import CODECS
from archipel.run.screening import ScreeningConfig
from archipel.sim.faults import Crash, FaultsConfig, Partition, RandomFaults, Slow
from archipel.sim.topology import PRESETS, PROFILES, Link, Profile, RegionLink, Topology
from archipel.train.configs import CONFIGS

WORDS = st.sampled_from(
    [
        *KEYS,
        *methods.names(),
        *CONFIGS,
        *PRESETS,
        *PROFILES,
        "name",
        "measured",
        "regions",
        "a",
        "b",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**7)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(string.printable, max_size=6)
    | st.dates()
    | WORDS
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3),
    max_leaves=6,
)
FEW = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def fields_of(*configs: type[BaseModel]) -> st.SearchStrategy[dict[Any, Any]]:
    """Right keys of a section with any values, and a wrong key now and then."""
    known = [key for config in configs for key in config.model_fields]
    return st.dictionaries(st.sampled_from(known) | WORDS, SCALARS | JUNK, max_size=4)


METHODS = [methods.load(name).Config for name in methods.names()]
LINKS = st.lists(fields_of(RegionLink, Link) | JUNK, max_size=2)
REGIONS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(st.floats(0.01, 4), max_size=3) | JUNK, max_size=3
)
SECTIONS = {
    "method": WORDS
    | fields_of(*METHODS).flatmap(lambda keys: WORDS.map(lambda name: {"name": name, **keys})),
    "topology": WORDS
    | fields_of(Topology)
    | st.fixed_dictionaries({"regions": REGIONS}, optional={"links": LINKS, "local": JUNK}),
    "profile": WORDS | fields_of(Profile),
    "task": WORDS | fields_of(*CONFIGS.values()),
    "pipeline": fields_of(PipelineConfig),
    "run": fields_of(RunConfig),
    "live": fields_of(LiveConfig),
    "faults": fields_of(FaultsConfig, RandomFaults, Crash, Slow, Partition),
    "bad_updates": fields_of(ScreeningConfig),
    "wire": WORDS | st.sampled_from(CODECS) | fields_of(Topology),
    "track": WORDS | fields_of(TrackConfig) | st.lists(WORDS | fields_of(TrackConfig), max_size=3),
    "label": SCALARS,
}
WHOLE: dict[str, Any] = {
    "method": "noloco",
    "topology": {"regions": {"a": [1.0, 1.0]}},
    "task": "none",
}


def result_or_text(make: Callable[[], Recipe]) -> Recipe | str:
    """A recipe that could run, or what its author is told."""
    try:
        recipe = make()
        assemble.check_reachable(recipe)
    except UserError as error:
        return str(error)
    return recipe


def check(fields: dict[Any, Any]) -> None:
    found = result_or_text(lambda: parse_recipe(fields))
    if isinstance(found, str):
        assert 5 < len(found) < 2000
    else:
        assert parse_recipe(yaml.safe_load(found.to_yaml())) == found


@FEW
@given(st.dictionaries(st.sampled_from(KEYS) | SCALARS, JUNK, max_size=5))
def test_any_mapping(fields: dict[Any, Any]) -> None:
    check(fields)


@pytest.mark.parametrize("name", SECTIONS)
@FEW
@given(st.data())
def test_one_section_that_is_wrong(name: str, data: st.DataObject) -> None:
    check({**WHOLE, name: data.draw(SECTIONS[name] | JUNK)})


@FEW
@given(
    st.fixed_dictionaries(
        {"method": SECTIONS["method"]},
        optional={key: SECTIONS[key] for key in KEYS if key != "method"},
    )
)
def test_all_sections_at_once(fields: dict[Any, Any]) -> None:
    check(fields)


@FEW
@given(content=st.text(string.printable, max_size=60) | st.binary(max_size=40) | JUNK.map(repr))
def test_any_file(content: str | bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = result_or_text(lambda: load_recipe(path))
    assert isinstance(found, Recipe) or ": " in found  # the place, then what is wrong with it


@FEW
@given(
    override=st.text(string.printable, max_size=20)
    | st.builds("{}.{}={}".format, WORDS, WORDS, st.text(max_size=5))
)
def test_any_override(override: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "sound.yaml"
    path.write_text(yaml.safe_dump(WHOLE))
    found = result_or_text(lambda: load_recipe(path, parse_settings([override])))
    assert isinstance(found, Recipe) or len(found) > 5
