"""Writing a first recipe: `archipel init`, the schema for editors, and the shell's completion."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from archipel import methods
from archipel.recipe import KEYS, load_recipe, parse_recipe
from archipel.recipe.schema import recipe_schema
from archipel.recipe.template import FILL_IN, template
from archipel.train.configs import CONFIGS
from archipel.yamlfile import inline, parse

ROOT = Path(__file__).parents[1]
REQUIRED = {"text": {"path": FILL_IN}, "causal_lm": {"model": FILL_IN, "data": FILL_IN}}
"""What a task cannot do without."""
VALIDATOR = Draft202012Validator(recipe_schema())


# init


@pytest.mark.parametrize("task", CONFIGS)
@pytest.mark.parametrize("method", methods.names())
def test_a_first_recipe_is_the_default_one(
    archipel: Any, tmp_path: Path, method: str, task: str
) -> None:
    file = tmp_path / "new" / "recipe.yaml"
    chosen = ("--method", method, "--topology", "two-regions", "--task", task)
    answer = archipel("init", file, *chosen)
    assert (answer.code, answer.err) == (0, "")
    first, *rest = answer.out.splitlines()
    assert first == f"{file}: `archipel check {file}` says what it would do"
    assert rest == (["First fill in what says FILL IN."] if task in REQUIRED else [])
    assert load_recipe(file) == parse_recipe(
        {
            "method": method,
            "topology": "two-regions",
            "task": {"name": task, **REQUIRED.get(task, {})},
        }
    )


def test_its_default_file_and_choices(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert archipel("init").code == 0
    assert load_recipe("recipe.yaml") == parse_recipe({"method": "halos"})
    assert "schema" not in Path("recipe.yaml").read_text()


def test_it_has_every_setting_in_the_words_of_list(archipel: Any) -> None:
    lines = template("recipe.yaml", "noloco", task="synthetic").splitlines()
    settings = {
        match[2]: (match[3], match[4])
        for line in lines
        if (match := re.fullmatch(r"(# )? {2}(?:# )?(\w+): (.*?) +# (.*)", line))
    }
    listed = [methods.load("noloco").Config, CONFIGS["synthetic"]]
    for config in listed:
        for key, field in config.model_fields.items():
            if key != "name":
                assert settings[key][1] == field.description
    assert settings["gamma"][0] == "0.7"
    assert {line.split(":")[0].removeprefix("# ") for line in lines if ":" in line} >= {*KEYS}


def test_what_is_commented_out_can_be_switched_on() -> None:
    text = template("recipe.yaml", "halos", task="synthetic")
    whole = re.sub(r"^( *)# (\w+:( .*)?)$", r"\1\2", text, flags=re.MULTILINE)
    whole = re.sub(r"^# ( +\w+: .*)$", r"\1", whole, flags=re.MULTILINE)
    assert whole.count("\n  # ") == 0
    recipe = parse_recipe(parse(whole))
    assert recipe.faults is not None
    assert recipe.bad_updates
    assert recipe.changed() == {}


def test_a_method_of_ones_own_has_a_first_recipe_too(archipel: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(Path(methods.__path__[0], "noloco.py").read_text())
    assert archipel("init", tmp_path / "recipe.yaml", "--method", own).code == 0
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.method, recipe.label, recipe.changed()) == (str(own), "own", {})


def test_no_file_is_overwritten(archipel: Any, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("method: diloco\n")
    told = f"archipel: {file} is there already, and is left as it is; name another file\n"
    assert archipel("init", file) == (2, "", told)
    assert file.read_text() == "method: diloco\n"


@pytest.mark.parametrize(
    ("option", "name", "told"),
    [
        (
            "--method",
            "halo",
            "method = 'halo': allowed are async_local_sgd, diloco, halos, noloco, sync_sgd and "
            "files such as my_method.py (did you mean 'halos'?)",
        ),
        (
            "--topology",
            "two-region",
            "topology 'two-region' is neither a preset (halos-4x4, halos-4x4-2x, uneven-2-6, "
            "two-regions, one-node, internet-N) nor a YAML file (did you mean 'two-regions'?)",
        ),
        (
            "--task",
            "stdlb",
            "task = 'stdlb': allowed are none, stdlib, synthetic, text, causal_lm and your own "
            "'file.py:function' (did you mean 'stdlib'?)",
        ),
    ],
)
def test_a_wrong_name_is_told_and_nothing_is_left(
    archipel: Any, tmp_path: Path, option: str, name: str, told: str
) -> None:
    file = tmp_path / "recipe.yaml"
    assert archipel("init", file, option, name) == (2, "", f"archipel: {told}\n")
    assert not file.exists()


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("text", f"task.path: there is no file or folder {FILL_IN!r} (relative to "),
        ("causal_lm", f"task.model = {FILL_IN!r}: allowed are pythia-14m, "),
    ],
)
def test_what_is_left_to_fill_in_is_told_by_run_and_check(
    archipel: Any, tmp_path: Path, task: str, told: str
) -> None:
    file = tmp_path / "recipe.yaml"
    archipel("init", file, "--task", task)
    ran = archipel("run", file, "--out", tmp_path / "out")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"archipel: {told}")
    assert archipel("check", file) == ran


# The schema


def test_the_schema_is_one_and_is_printed_alone(archipel: Any) -> None:
    answer = archipel("schema")
    assert (answer.code, answer.err) == (0, "")
    assert json.loads(answer.out) == recipe_schema()
    Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("task", CONFIGS)
@pytest.mark.parametrize("method", methods.names())
def test_recipes_of_all_methods_and_tasks_are_valid(method: str, task: str) -> None:
    fields = parse(template("recipe.yaml", method, "two-regions", task))
    VALIDATOR.validate(fields)
    VALIDATOR.validate(parse(parse_recipe(fields).to_yaml()))


def test_all_recipes_in_the_docs_are_valid() -> None:
    seen = 0
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for _, code in re.findall(r"^( *)```yaml\n(.*?)^ *```$", page.read_text(), re.S | re.M):
            fields = parse(textwrap.dedent(code))
            if not {"regions", "grid"} & fields.keys():  # neither a topology file nor a sweep
                VALIDATOR.validate({"method": "halos"} | fields)
                seen += 1
    assert seen >= 5


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "halos", "topology": {"name": "two-regions", "sharing": "fair"}},
        {"method": "halos", "topology": {"regions": {"a": [1.0]}}, "profile": "measured"},
        {"method": "halos", "profile": {"name": "pythia-70m-h100", "step_time_s": 1}},
        {"method": {"name": "my_method.py", "anything": 1}, "task": "mytask.py:make"},
        {"method": "halos", "task": {"width": 64}, "wire": {"name": "int8"}},
        {"method": "halos", "faults": None, "bad_updates": False},
        {
            "method": "halos",
            "faults": {"schedule": [{"kind": "crash", "node": "a/w0", "at_s": 3}]},
            "bad_updates": {"multiple": 10},
        },
    ],
)
def test_short_forms_are_valid(fields: dict[str, Any]) -> None:
    VALIDATOR.validate(fields)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({}, "$"),
        ({"method": "halos", "topolgy": "two-regions"}, "$"),
        ({"method": "halo"}, "$.method"),
        ({"method": {"name": "halos", "acumulate": 8}}, "$.method"),
        ({"method": {"name": "halos", "accumulate": "8"}}, "$.method.accumulate"),
        ({"method": {"name": "diloco", "accumulate": 8}}, "$.method"),
        ({"method": "halos", "task": {"widht": 64}}, "$.task"),
        ({"method": "halos", "task": {"name": "synthetic", "widht": 64}}, "$.task"),
        ({"method": "halos", "task": {"name": "text"}}, "$.task"),
        ({"method": "halos", "topology": {"sharing": "fair"}}, "$.topology"),
        ({"method": "halos", "profile": {"step_time_s": 1}}, "$.profile"),
        ({"method": "halos", "run": {"step": 10}}, "$.run"),
        ({"method": "halos", "pipeline": {"stages": 0}}, "$.pipeline.stages"),
        ({"method": "halos", "wire": "int9"}, "$.wire"),
        ({"method": "halos", "faults": {"schedule": [{"kind": "crush"}]}}, "$.faults"),
    ],
)
def test_a_mistake_is_seen_where_it_is(fields: dict[str, Any], where: str) -> None:
    assert [error.json_path for error in VALIDATOR.iter_errors(fields)] == [where]


def test_a_first_recipe_names_the_schema_that_lies_beside_it(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.schema.json").write_text(archipel("schema").out)
    archipel("init", tmp_path / "recipe.yaml")
    first, *_ = (tmp_path / "recipe.yaml").read_text().splitlines()
    assert first == "# yaml-language-server: $schema=recipe.schema.json"


@pytest.mark.parametrize(
    "value", [None, True, 3, 1e-8, "no", "1e3", "a: b", [0.9, 1], {}, "x" * 99]
)
def test_a_value_on_one_line_is_read_back(value: Any) -> None:
    assert "\n" not in inline(value)
    assert parse(f"key: {inline(value)}  # comment") == {"key": value}


# The shell


def test_the_shell_completes_commands(archipel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ARCHIPEL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "archipel che")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert archipel() == (0, "check\n", "")
