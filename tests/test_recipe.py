"""`recipe/` and `yamlfile.py`: what a recipe may leave out, that its filled-in copy is the same,
and each mistake's own line.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipel import methods
from archipel.assemble import warn_of_size
from archipel.errors import UserError
from archipel.recipe import (
    Recipe,
    load_recipe,
    parse_recipe,
    parse_settings,
)
from archipel.recipe.sections import LiveConfig, PipelineConfig, RunConfig
from archipel.sim.topology import PRESETS, PROFILES, Profile, load_topology
from archipel.train.configs import StdlibTask
from archipel.train.task import make_task
from archipel.yamlfile import parse


def problem(data: dict[str, Any]) -> str:
    """What `parse_recipe` says against `data`."""
    with pytest.raises(UserError) as error:
        parse_recipe(data)
    return str(error.value)


def halos(**sections: Any) -> dict[str, Any]:
    """A recipe for HALoS with these sections."""
    return {"method": "halos", **sections}


def read_back(recipe: Recipe) -> Recipe:
    return parse_recipe(parse(recipe.to_yaml()))


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Reads a recipe from a text, with overrides laid over it."""

    def read(text: str, *overrides: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe(path, parse_settings(overrides))

    return read


# What may be left out


def test_only_the_method_is_required() -> None:
    assert parse_recipe({"method": "diloco"}) == Recipe(
        label="diloco",
        method="diloco",
        config=methods.load("diloco").Config(
            inner_steps=32, dynamic_steps=False, outer_lr=0.7, outer_momentum=0.9
        ),
        topology=load_topology("halos-4x4"),
        profile=PROFILES["pythia-70m-h100"],
        task=StdlibTask(),
        run=RunConfig(
            steps=None, tokens=None, seconds=None, target_loss=None, seed=0, evaluations=25
        ),
        pipeline=PipelineConfig(stages=1, micro_batches=4, routing="random"),
        live=LiveConfig(pace="none", gpu_fraction=1.0, processes=1, deadline_s=60.0),
    )


@pytest.mark.parametrize(
    ("method", "published"),
    [
        ("sync_sgd", {}),
        (
            "diloco",
            {"inner_steps": 32, "dynamic_steps": False, "outer_lr": 0.7, "outer_momentum": 0.9},
        ),
        (
            "async_local_sgd",
            {
                "inner_steps": 32,
                "dynamic_steps": True,
                "outer_lr": 1.6,
                "outer_momentum": 0.9,
                "buffer": 32,
            },
        ),
        (
            "noloco",
            {
                "inner_steps": 50,
                "dynamic_steps": False,
                "group_size": 2,
                "alpha": 0.5,
                "beta": 0.7,
                "gamma": 0.7,
            },
        ),
        (
            "halos",
            {
                "inner_steps": 32,
                "dynamic_steps": True,
                "accumulate": 32,
                "merge_weight": 0.25,
                "report_since": "merge",
                "local_lr": 3.2,
                "local_momentum": 0.9,
                "local_buffer": 16,
                "global_lr": 0.3,
                "global_momentum": 0.5,
                "global_buffer": 2,
                "workers_per_server": None,
            },
        ),
    ],
)
def test_a_methods_defaults_are_the_published_ones(method: str, published: dict[str, Any]) -> None:
    assert parse_recipe({"method": method}).config.model_dump() == published


def test_a_name_alone_stands_for_a_section() -> None:
    names = {
        "method": "noloco",
        "topology": "two-regions",
        "profile": "pythia-70m-h100",
        "task": "none",
    }
    short, long = (
        parse_recipe(names),
        parse_recipe({key: {"name": name} for key, name in names.items()}),
    )
    assert short == long


def test_a_task_without_a_name_is_the_default_one() -> None:
    assert parse_recipe(halos(task={"width": 66})).task == StdlibTask(width=66)


def test_a_preset_topology_can_be_changed() -> None:
    topology = parse_recipe(halos(topology={"name": "halos-4x4", "sharing": "fair"})).topology
    assert topology == load_topology("halos-4x4").model_copy(
        update={"sharing": "fair", "name": "halos-4x4 (changed)"}
    )


def test_a_topology_can_be_written_out() -> None:
    assert parse_recipe(halos(topology={"regions": {"a": [1, 0.5]}})).topology.regions == {
        "a": [1.0, 0.5]
    }


def test_a_known_profile_can_be_changed() -> None:
    profile = parse_recipe(halos(profile={"name": "pythia-70m-h100", "step_time_s": 0.5})).profile
    preset = PROFILES["pythia-70m-h100"]
    assert profile == preset.model_copy(
        update={"name": "pythia-70m-h100 (changed)", "step_time_s": 0.5}
    )


def test_a_profile_of_ones_own_needs_no_name() -> None:
    profile = parse_recipe(halos(profile={"model_bytes": 4, "step_time_s": 0.5})).profile
    assert profile == Profile(name="custom", model_bytes=4, step_time_s=0.5)


def test_a_profile_may_wait_to_be_measured() -> None:
    assert parse_recipe(halos(profile="measured")).profile is None


def test_what_differs_from_the_published_settings_is_known() -> None:
    recipe = parse_recipe(
        {"method": {"name": "halos", "accumulate": 4, "merge_weight": 0.25, "local_lr": 1.5}}
    )
    assert recipe.changed() == {"accumulate": (4, 32), "local_lr": (1.5, 3.2)}


# The filled-in copy


@pytest.mark.parametrize("method", methods.names())
def test_the_filled_in_copy_of_each_method_is_the_same_recipe(method: str) -> None:
    recipe = parse_recipe({"method": method})
    assert read_back(recipe) == recipe


@pytest.mark.parametrize(
    "topology",
    [*PRESETS, "internet-3", {"name": "halos-4x4", "sharing": "fair", "collective": "tree"}],
)
def test_the_filled_in_copy_of_each_topology_is_the_same_recipe(topology: Any) -> None:
    recipe = parse_recipe(halos(topology=topology))
    assert read_back(recipe) == recipe


@pytest.mark.parametrize(
    "task",
    [
        "none",
        "own.py:make",
        {"name": "text", "path": "a b/ü: #1"},
        {"name": "synthetic", "lr": 1e-5, "gradient_clip": None, "dirichlet": 0.5},
    ],
    ids=["none", "own", "text", "synthetic"],
)
def test_the_filled_in_copy_of_each_task_is_the_same_recipe(task: Any) -> None:
    recipe = parse_recipe(halos(task=task))
    assert read_back(recipe) == recipe


@pytest.mark.parametrize(
    "run",
    [
        {"steps": 7},
        {"tokens": 10**12},
        {"seconds": 1e-7, "target_loss": -1.5},
        {"seed": 2**40, "evaluations": 1},
    ],
)
def test_the_filled_in_copy_of_each_stop_rule_is_the_same_recipe(run: dict[str, Any]) -> None:
    recipe = parse_recipe(halos(run=run))
    assert read_back(recipe) == recipe


def test_the_filled_in_copy_of_a_measured_profile_holds_what_was_measured() -> None:
    waiting = parse_recipe(halos(profile="measured"))
    assert read_back(waiting) == waiting
    measured = replace(
        waiting, profile=Profile(name="measured", model_bytes=123, step_time_s=1.25e-3)
    )
    assert read_back(measured) == measured


@pytest.mark.parametrize(
    "label", ["halos+dynamic_steps", "12", "yes", "null", "0x10", "1.5", "1_000"]
)
def test_a_label_is_text_even_if_it_looks_otherwise(label: str) -> None:
    recipe = parse_recipe(halos(label=label))
    assert read_back(recipe).label == label


@pytest.mark.parametrize("name", ["1e3", "12e-1"])
def test_names_that_look_like_a_power_of_ten_are_read_back(name: str) -> None:
    recipe = parse_recipe(halos(label=name, topology={"regions": {name: [1.0]}}))
    assert read_back(recipe) == recipe


# Numbers in YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2e+3", -2000.0),
        ("+1e2", 100.0),
        ("1.5e-3", 0.0015),
        ("2.e2", 200.0),
        ("1.0", 1.0),
    ],
)
def test_a_number_with_an_exponent_is_a_number(text: str, value: float) -> None:
    assert parse(text) == value
    assert isinstance(parse(text), float)


@pytest.mark.parametrize("text", ["e3", "1e", "1e-", "1e3x", "x1e3", "1e-3.5", "1-e3"])
def test_what_only_looks_like_one_is_text(text: str) -> None:
    assert parse(text) == text


@pytest.mark.parametrize("word", ["no", "No", "off", "OFF", "yes", "on", "y", "n"])
def test_a_word_that_old_yaml_takes_for_true_or_false_is_text(word: str) -> None:
    assert parse(f"{word}: {word}") == {word: word}
    topology = {"regions": {word: [1.0], "other": [1.0]}, "default": {"bandwidth_gbit_s": 1.0}}
    recipe = parse_recipe(halos(topology=topology, label=word))
    assert parse_recipe(parse(recipe.to_yaml())) == recipe


@pytest.mark.parametrize("written", ["true", "True", "TRUE", "false", "False", "FALSE"])
def test_true_and_false_are_no_text(written: str) -> None:
    assert parse(written) is (written.lower() == "true")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("method: no", "method = 'no': allowed are async_local_sgd, diloco, halos, noloco, "
                       "sync_sgd and files such as my_method.py (did you mean 'noloco'?)"),
        ("method: {name: nolco}", "method = 'nolco': allowed are async_local_sgd, diloco, halos, "
                                  "noloco, sync_sgd and files such as my_method.py (did you mean "
                                  "'noloco'?)"),
        ("method: {name: }", "method.name = None: expected a name, as text"),
        ("method: {name: true}", "method.name = True: expected a name, as text"),
        ("{method: halos, task: no}", "task = 'no': allowed are none, stdlib, synthetic, text, "
                                      "causal_lm and your own 'file.py:function' (did you mean "
                                      "'none'?)"),
        ("{method: halos, task: {name: 3}}", "task.name = 3: expected a name, as text"),
        ("{method: halos, task: own.py}", "task = 'own.py': allowed are none, stdlib, synthetic, "
                                          "text, causal_lm and your own 'file.py:function'; name "
                                          "its function too: 'own.py:make'"),
        ("{method: halos, topology: {name: }}", "topology.name = None: expected a name, as text"),
        ("{method: halos, topology: off}", "topology 'off' is neither a preset (halos-4x4, "
                                           "halos-4x4-2x, uneven-2-6, two-regions, one-node, "
                                           "internet-N) nor a YAML file"),
        ("{method: halos, profile: {name: no}}", "profile = 'no': allowed are pythia-70m-h100, "
                                                 "measured"),
        ("{method: halos, run: {strict: yes}}", "run.strict = 'yes': should be true or false"),
        ("{method: halos, run: {steps: 0}}", "run.steps = 0: should be greater than or equal to 1"),
        ("{method: halos, run: off}", "run = 'off': expected keys such as `steps: 10000`"),
    ],
)  # fmt: skip
def test_what_is_written_in_a_recipe_is_told_as_it_was_written(
    written: Any, line: str, text: str
) -> None:
    with pytest.raises(UserError) as error:
        written(line)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("name", "lacking"), [(":make", "file"), ("own.py:", "function"), (":", "file")]
)
def test_a_task_of_ones_own_names_its_file_and_its_function(name: str, lacking: str) -> None:
    with pytest.raises(UserError) as error:
        make_task(parse_recipe(halos(task=name)).task)
    said = f"task.name = {name!r}: no {lacking} is named; expected 'file.py:function'"
    assert str(error.value) == said


def test_whole_numbers_stay_whole() -> None:
    assert isinstance(parse("12"), int)


def test_a_quoted_number_is_text() -> None:
    assert parse("'1e-3'") == "1e-3"


def test_a_learning_rate_can_be_written_as_a_power_of_ten(written: Any) -> None:
    recipe = written(
        "method: {name: diloco, outer_lr: 5e-1}\ntask: {lr: 1e-3}\nrun: {seconds: 1e3}"
    )
    assert (recipe.config.outer_lr, recipe.task.lr, recipe.run.seconds) == (0.5, 0.001, 1000.0)


# Files and overrides


def test_overrides_are_laid_over_the_file(written: Any) -> None:
    text = "method: {name: diloco, inner_steps: 4, outer_lr: 0.5}\nrun: {steps: 10}"
    recipe = written(
        text,
        "method.inner_steps=16",
        "task.width=66",
        "run.seed=3",
        "run.steps=null",
        "run.tokens=99",
    )
    assert (recipe.config.inner_steps, recipe.config.outer_lr, recipe.task.width) == (16, 0.5, 66)
    assert (recipe.run.seed, recipe.run.steps, recipe.run.tokens) == (3, None, 99)


def test_the_last_of_two_overrides_holds(written: Any) -> None:
    assert written("method: diloco", "run.seed=1", "run.seed=2").run.seed == 2


def test_a_name_in_the_file_can_be_built_on(written: Any) -> None:
    recipe = written(
        "method: halos\ntopology: two-regions\nprofile: pythia-70m-h100",
        "topology.sharing=fair",
        "profile.step_time_s=1",
    )
    assert recipe.topology == load_topology("two-regions").model_copy(
        update={"sharing": "fair", "name": "two-regions (changed)"}
    )
    assert recipe.profile == PROFILES["pythia-70m-h100"].model_copy(
        update={"step_time_s": 1, "name": "pythia-70m-h100 (changed)"}
    )


@pytest.mark.parametrize("override", ["topology.sharing=fair", "profile.step_time_s=1"])
def test_a_default_can_be_built_on(written: Any, override: str) -> None:
    place = override.partition(".")[0]
    name = {"topology": "halos-4x4", "profile": "pythia-70m-h100"}[place]
    assert written("method: halos", override) == written(
        f"method: halos\n{place}: {name}", override
    )


def test_a_methods_setting_goes_by_the_methods_name_too(written: Any) -> None:
    assert written("method: halos", "halos.inner_steps=16").config.inner_steps == 16


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run.steps=1e3", ("run", "steps", 1000.0)),
        ("task.betas=[0.9, 0.99]", ("task", "betas", [0.9, 0.99])),
        ("task.path=a=b.c", ("task", "path", "a=b.c")),
        ("topology.regions={a: [1.0]}", ("topology", "regions", {"a": [1.0]})),
        ("task.dirichlet=", ("task", "dirichlet", None)),
    ],
)
def test_an_override_is_a_section_a_key_and_a_yaml_value(
    text: str, parts: tuple[str, str, Any]
) -> None:
    place, key, value = parts
    assert parse_settings([text]) == {f"{place}.{key}": value}


@pytest.mark.parametrize("text", ["run.steps", "steps=3", "run.=3", "=3", "", "run steps=3"])
def test_a_malformed_override_is_told_the_form(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_settings([text])
    assert (
        str(error.value)
        == f"--set {text}: expected section.key=value, for example halos.inner_steps=16 or "
        "task.width=64"
    )


def test_an_override_must_be_yaml() -> None:
    with pytest.raises(UserError) as error:
        parse_settings(["run.seconds=[1"])
    assert str(error.value) == "--set run.seconds=[1: '[1' is not a value that YAML can read"


@pytest.mark.parametrize("value", ["2024-13-45", "0b_", "!!int x"])
def test_a_value_that_yaml_takes_for_an_impossible_date_or_number_is_told_so(value: str) -> None:
    with pytest.raises(UserError) as error:
        parse_settings([f"run.seconds={value}"])
    assert (
        str(error.value)
        == f"--set run.seconds={value}: {value!r} is not a value that YAML can read"
    )


def test_an_override_of_an_unknown_section_names_the_nearest(written: Any) -> None:
    with pytest.raises(UserError) as error:
        written("method: halos", "tsak.width=64")
    assert str(error.value) == (
        "--set tsak.width=64: unknown section 'tsak' (did you mean 'task'?); "
        "allowed: method, topology, profile, task, pipeline, run, live, wire, track, faults, "
        "bad_updates, label"
    )


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("", ": expected `key: value` lines, found nothing"),
        ("- a", ": expected `key: value` lines, found a list"),
        ("halos", ": expected `key: value` lines, found a text"),
        ("a: [1", " is not YAML: while parsing a flow sequence in"),
        ("a: @b", " is not YAML: while scanning for the next token found character '@'"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(
    written: Any, tmp_path: Path, text: str, rest: str
) -> None:
    with pytest.raises(UserError) as error:
        written(text)
    assert str(error.value).startswith(f"recipe {tmp_path / 'recipe.yaml'}{rest}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir()], ids=["missing", "folder"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "recipe.yaml"
    make(path)
    reason = "Is a directory" if path.exists() else "No such file or directory"
    with pytest.raises(UserError) as error:
        load_recipe(path)
    assert str(error.value) == f"recipe {path}: {reason}"


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"recipe {path} is not YAML: ")


def test_a_key_given_twice_is_refused(written: Any) -> None:
    with pytest.raises(UserError, match="steps"):
        written("method: halos\nrun: {steps: 10, seed: 1, steps: 20}")


# Mistakes


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {},
            "recipe: `method` is required, for example `method: halos`; methods: async_local_sgd, "
            "diloco, halos, noloco, sync_sgd",
        ),
        (
            halos(topologie="one-node"),
            "recipe: unknown key 'topologie' (did you mean 'topology'?); "
            "allowed: method, topology, profile, task, pipeline, run, live, wire, track, faults, "
            "bad_updates, label",
        ),
        (
            halos(wire="int9"),
            "wire = 'int9': allowed are fp32, bf16, int8, int4 (did you mean 'int8'?)",
        ),
        (halos(wire=8), "wire = 8: expected a name, or keys with `name` among them"),
        (
            halos(wire={"name": "int8", "block": 64}),
            "wire = {'name': 'int8', 'block': 64}: allowed are fp32, bf16, int8, int4",
        ),
        ({"method": 5}, "method = 5: expected a name, or keys with `name` among them"),
        (
            halos(task=["stdlib"]),
            "task = ['stdlib']: expected a name, or keys with `name` among them",
        ),
        (halos(profile=None), "profile = None: expected a name, or keys with `name` among them"),
        (halos(run="long"), "run = 'long': expected keys such as `steps: 10000`"),
        (
            halos(topology=3),
            "topology = 3: expected a preset's name, a YAML file, or the topology's keys",
        ),
        (
            halos(label="../a"),
            "label = '../a': it names a folder; use letters, digits, '.', '_', '+', '=', ',' and "
            "'-'",
        ),
        (
            halos(label=""),
            "label = '': it names a folder; use letters, digits, '.', '_', '+', '=', ',' and '-'",
        ),
    ],
)
def test_a_recipe_says_what_it_lacks(data: dict[str, Any], text: str) -> None:
    assert problem(data) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"name": "diloco", "inner_step": 3},
            "diloco.inner_step: unknown key 'inner_step' (did you mean 'inner_steps'?); "
            "allowed: inner_steps, dynamic_steps, outer_lr, outer_momentum",
        ),
        (
            {"name": "sync_sgd", "inner_steps": 3},
            "sync_sgd.inner_steps: unknown key 'inner_steps'; there is nothing to set here",
        ),
        (
            {"name": "diloco", "inner_steps": 0},
            "diloco.inner_steps = 0: should be greater than or equal to 1",
        ),
        (
            {"name": "halos", "accumulate": 0},
            "halos.accumulate = 0: should be greater than or equal to 1",
        ),
        (
            {"name": "halos", "merge_weight": 1.5},
            "halos.merge_weight = 1.5: should be less than or equal to 1",
        ),
        (
            {"name": "halos", "report_since": "start"},
            "halos.report_since = 'start': should be 'merge' or 'send'",
        ),
        (
            {"name": "noloco", "group_size": 0},
            "noloco.group_size = 0: should be greater than or equal to 1",
        ),
        (
            {"name": "diloco", "outer_momentum": 1.0},
            "diloco.outer_momentum = 1.0: should be less than 1",
        ),
        (
            {"name": "diloco", "outer_lr": float("nan")},
            "diloco.outer_lr = nan: should be a finite number",
        ),
        (
            {"name": "diloco", "inner_steps": "8"},
            "diloco.inner_steps = '8': should be a valid integer",
        ),
        (
            {"name": "diloco", "inner_steps": 8.0},
            "diloco.inner_steps = 8.0: should be a valid integer",
        ),
        (
            {"name": "diloco", "dynamic_steps": 1},
            "diloco.dynamic_steps = 1: should be true or false",
        ),
        (
            {"name": "diloco", "outer_lr": [0.7]},
            "diloco.outer_lr = [0.7]: should be a valid number",
        ),
    ],
)
def test_a_methods_setting_is_known_of_its_type_and_possible(
    fields: dict[str, Any], text: str
) -> None:
    assert problem({"method": fields}) == text


def test_an_unknown_method_names_the_nearest() -> None:
    assert problem({"method": "halso"}) == (
        "method = 'halso': allowed are async_local_sgd, diloco, halos, noloco, sync_sgd and files "
        "such as my_method.py "
        "(did you mean 'halos'?)"
    )


def test_a_method_of_ones_own_must_be_there() -> None:
    assert (
        problem({"method": "no/own.py"})
        == f"method = 'no/own.py': there is no file 'no/own.py' (relative to {Path.cwd()})"
    )


@pytest.mark.parametrize("lacking", ["Config", "build"])
def test_a_method_of_ones_own_must_be_whole(tmp_path: Path, lacking: str) -> None:
    path = tmp_path / "own.py"
    path.write_text("\n".join(f"{name} = None" for name in ("Config", "build") if name != lacking))
    assert problem({"method": str(path)}) == f"method = {str(path)!r}: the file has no {lacking!r}"


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        (
            "pythia",
            "profile = 'pythia': allowed are pythia-70m-h100, measured (did you mean "
            "'pythia-70m-h100'?)",
        ),
        (
            {"name": "pythia-70m-h100", "step_time_s": 0},
            "profile.step_time_s = 0: should be greater than 0",
        ),
        ({"name": "mine", "step_time_s": 1.0}, "profile.model_bytes: this key is required"),
        (
            {"model_bytes": 3, "step_time_s": 1.0, "step_time": 1},
            "profile.step_time: unknown key 'step_time' (did you mean 'step_time_s'?); "
            "allowed: name, model_bytes, step_time_s, activation_bytes",
        ),
    ],
)
def test_a_profile_is_known_or_whole(profile: Any, text: str) -> None:
    assert problem(halos(profile=profile)) == text


def test_a_profile_that_lacks_a_key_says_which() -> None:
    assert problem(halos(profile={"model_bytes": 3})) == "profile.step_time_s: this key is required"


def test_the_name_of_a_profile_is_text() -> None:
    assert problem(halos(profile={"name": ["a"], "model_bytes": 3, "step_time_s": 1.0})).startswith(
        "profile.name = ['a']: "
    )


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (
            "sdtlib",
            "task = 'sdtlib': allowed are none, stdlib, synthetic, text, causal_lm and your own "
            "'file.py:function' (did you mean 'stdlib'?)",
        ),
        ({"width": 0}, "task.width = 0: should be greater than or equal to 1"),
        ({"width": [1]}, "task.width = [1]: should be a valid integer"),
        ({"lr": -1e-3}, "task.lr = -0.001: should be greater than 0"),
        ({"precision": "fp16"}, "task.precision = 'fp16': should be 'fp32' or 'bf16'"),
        ({"name": "none", "width": 3}, "task.width: unknown key 'width'; allowed: name"),
        ("text", "task.path: this key is required"),
    ],
)
def test_a_tasks_setting_is_known_of_its_type_and_possible(task: Any, text: str) -> None:
    assert problem(halos(task=task)) == text


def test_an_unknown_setting_of_a_task_names_the_nearest_and_all() -> None:
    text = problem(halos(task={"name": "synthetic", "source": 2}))
    assert text.startswith(
        "task.source: unknown key 'source' (did you mean 'sources'?); allowed: name, layers, "
        "width, heads, "
    )
    assert text.endswith(", vocabulary, sources")


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            {"step": 5},
            "run.step: unknown key 'step' (did you mean 'steps'?); "
            "allowed: steps, tokens, seconds, target_loss, seed, evaluations, strict",
        ),
        ({"steps": 0}, "run.steps = 0: should be greater than or equal to 1"),
        ({"steps": 10.0}, "run.steps = 10.0: should be a valid integer"),
        ({"seed": -1}, "run.seed = -1: should be greater than or equal to 0"),
        ({"seed": True}, "run.seed = True: should be a valid integer"),
        ({"seconds": 0}, "run.seconds = 0: should be greater than 0"),
        ({"target_loss": float("inf")}, "run.target_loss = inf: should be a finite number"),
        (
            {"steps": 5, "tokens": 6},
            "run: steps = 5 and tokens = 6 are both given; give one of them",
        ),
    ],
)
def test_a_stop_rule_is_known_of_its_type_and_possible(run: dict[str, Any], text: str) -> None:
    assert problem(halos(run=run)) == text


def test_a_long_value_is_cut() -> None:
    text = problem({"method": {"name": "diloco", "inner_steps": "x" * 500}})
    assert text == f"diloco.inner_steps = '{'x' * 76}...: should be a valid integer"


@pytest.mark.parametrize(
    ("task", "profile", "size_bytes", "warns"),
    [
        ("own.py:make", "pythia-70m-h100", 134_400, True),
        ("own.py:make", "pythia-70m-h100", PROFILES["pythia-70m-h100"].model_bytes, False),
        ("own.py:make", {"model_bytes": 134_400, "step_time_s": 0.1}, 134_400, False),
        ("own.py:make", "measured", 134_400, False),
        ("stdlib", "pythia-70m-h100", 134_400, False),
    ],
)
def test_whoever_brings_a_model_is_told_that_the_clock_is_another_models(
    task: str, profile: Any, size_bytes: int, warns: bool
) -> None:
    recipe = parse_recipe({"method": "halos", "task": task, "profile": profile})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_size(recipe, size_bytes)
    assert ["messages are timed as 281,706,496 bytes" in str(one.message) for one in said] == (
        [True] if warns else []
    )
