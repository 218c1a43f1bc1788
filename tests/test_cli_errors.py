"""A user's mistake on the command line: one line on stderr, exit code 2, no traceback, and nothing
left behind.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from archipel.disk import rundir

TOO_LITTLE = (
    "are too little: training, and validation on about a twentieth of them, each need 65 bytes "
    "(task.sequence and one more); "
    "give more text or a shorter sequence"
)
COMPARE = ("compare", "--task", "none", "--steps", "2000", "--methods")


@pytest.fixture
def refused(archipel: Any, tmp_path: Path) -> Any:
    """Calls the command line with `--out` and gives back the one line of its refusal, without its
    first word.

    `DIR` in the arguments is the test's own folder.
    """

    def call(*arguments: str) -> str:
        out = tmp_path / "out"
        given = [argument.replace("DIR", str(tmp_path)) for argument in arguments]
        code, printed, complaint = archipel(*given, "--out", out)
        assert (code, printed) == (2, "")
        assert not list(out.rglob("*"))
        line, end, rest = complaint.partition("\n")
        assert (end, rest) == ("\n", "")
        first, _, text = line.partition(" ")
        assert first == "archipel:"
        return text.replace(str(tmp_path), "DIR")

    return call


def test_what_is_right_is_not_refused(archipel: Any, tmp_path: Path) -> None:
    """The arguments that most of these tests spoil."""
    assert archipel(*COMPARE, "halos", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "halos-seed0" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        (
            "halso",
            "method = 'halso': allowed are async_local_sgd, diloco, halos, noloco, sync_sgd and "
            "files such as my_method.py "
            "(did you mean 'halos'?)",
        ),
        ("halos,dilocco", "method = 'dilocco': allowed are async_local_sgd, diloco, halos, noloco, "
                          "sync_sgd and files such as "
                          "my_method.py (did you mean 'diloco'?)"),
        ("", "--methods '': name at least one of async_local_sgd, diloco, halos, noloco, sync_sgd"),
        ("halos, halos", "--methods: halos is named twice"),
        ("diloco+dynamic", "--methods diloco+dynamic: diloco has no flag 'dynamic' (did you mean "
                           "'dynamic_steps'?); "
                           "its flags: dynamic_steps"),
        ("sync_sgd+fast", "--methods sync_sgd+fast: sync_sgd has no flag 'fast'; its flags: none"),
        ("no/own.py", "method = 'no/own.py': there is no file 'no/own.py' (relative to "
                      f"{Path.cwd()})"),
    ],
)  # fmt: skip
def test_methods_that_cannot_be_compared(refused: Any, methods: str, text: str) -> None:
    assert refused(*COMPARE, methods) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--topology", "halos-4x3"),
            "topology 'halos-4x3' is neither a preset (halos-4x4, halos-4x4-2x, uneven-2-6, "
            "two-regions, one-node, internet-N) "
            "nor a YAML file (did you mean 'halos-4x4'?)",
        ),
        (
            ("--topology", "internet-0"),
            "topology 'internet-0': the number of nodes must be from 1 to 10000",
        ),
        (("--topology", "DIR/no.yaml"), "topology file DIR/no.yaml: No such file or directory"),
        (
            ("--profile", "pythia"),
            "profile = 'pythia': allowed are pythia-70m-h100, measured (did you mean "
            "'pythia-70m-h100'?)",
        ),
        (
            ("--profile", "measured"),
            "profile = 'measured': task none trains nothing that could be measured",
        ),
        (
            ("--tokens", "640"),
            "run: steps = 2000 and tokens = 640 are both given; give one of them",
        ),
    ],
)
def test_choices_that_cannot_be_had(refused: Any, arguments: tuple[str, ...], text: str) -> None:
    assert refused(*COMPARE, "halos", *arguments) == text


def test_tokens_need_a_task(refused: Any) -> None:
    text = refused("compare", "--methods", "halos", "--task", "none", "--tokens", "640")
    assert text == "run.tokens = 640: task none has no tokens; give steps"


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (
            "sdtlib",
            "task = 'sdtlib': allowed are none, stdlib, synthetic, text, causal_lm and your own "
            "'file.py:function' (did you mean 'stdlib'?)",
        ),
        ("text", "task.path: this key is required"),
        ("DIR/no.py:make", "task.name = 'DIR/no.py:make': there is no file 'DIR/no.py'"),
        (
            "DIR/own.py:mak",
            "task.name = 'DIR/own.py:mak': 'DIR/own.py' has no function 'mak' (did you mean "
            "'make'?)",
        ),
        (
            "DIR/own.py:make",
            "task.name = 'DIR/own.py:make': make() returned int, not an archipel.Task",
        ),
    ],
)
def test_tasks_that_cannot_be_made(refused: Any, tmp_path: Path, task: str, text: str) -> None:
    (tmp_path / "own.py").write_text("def make():\n    return 1\n")
    assert refused("compare", "--methods", "halos", "--task", task) == text


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("task.path=DIR/nowhere", "task.path: there is no file or folder 'DIR/nowhere'"),
        ("task.path=DIR/short", f"DIR/short: 1 files with 5 bytes {TOO_LITTLE}"),
        ("task.path=DIR/nothing", f"DIR/nothing: 1 files with 0 bytes {TOO_LITTLE}"),
        ("task.path=DIR/empty", f"DIR/empty: 0 files with 0 bytes {TOO_LITTLE}"),
        ("task.path=DIR/to-nothing", "task.path: there is no file or folder 'DIR/to-nothing'"),
        ("task.path=DIR/linked", "DIR/linked: cannot read DIR/linked/gone: No such file or "
                                 "directory"),
        ("task.path=DIR/one-class\ntask.dirichlet=0.5", "task.dirichlet: DIR/one-class (2 files, "
                                                        "0.0 MB, sha256 afa8b858) has one "
                                                        "class of documents only, so regions "
                                                        "cannot differ"),
        ("task.path=nowhere", "task.path: there is no file or folder 'nowhere' (relative to "
                              f"{Path.cwd()})"),
        ("task.path=", "task.path = None: should be a valid string"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_had(refused: Any, texts: Path, override: str, text: str) -> None:
    sets = [part for line in override.splitlines() for part in ("--set", line)]
    assert refused("compare", "--methods", "halos", "--task", "text", *sets) == text


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts of which there is nothing to be made, in a folder."""
    (tmp_path / "short").write_text("short")
    (tmp_path / "nothing").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "to-nothing").symlink_to("nowhere")
    for folder in ("linked", "one-class/a", "one-class/b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "linked" / "gone").symlink_to("nowhere")
    (tmp_path / "one-class" / "a" / "empty").touch()
    (tmp_path / "one-class" / "b" / "long").write_text("long enough " * 200)
    return tmp_path


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize(
    ("locked", "named"), [("linked/locked", "linked/locked"), ("linked", "linked")]
)
def test_texts_that_may_not_be_read(refused: Any, texts: Path, locked: str, named: str) -> None:
    (texts / "linked" / "gone").unlink()
    (texts / "linked" / "locked").touch()
    (texts / locked).chmod(0)
    try:
        text = refused(
            "compare", "--methods", "halos", "--task", "text", "--set", "task.path=DIR/linked"
        )
    finally:
        (texts / locked).chmod(0o700)
    assert text == f"DIR/linked: cannot read DIR/{named}: Permission denied"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"def make(:", "SyntaxError: invalid syntax"),
        (
            b"x = '\xff'",
            "SyntaxError: (unicode error) 'utf-8' codec can't decode byte 0xff in position 0: "
            "invalid start byte",
        ),
        (b"import nonsuch", "ModuleNotFoundError: No module named 'nonsuch'"),
        (b"x = 1 // 0", "ZeroDivisionError: integer division or modulo by zero"),
    ],
    ids=["no Python", "no UTF-8", "no such module", "an exception"],
)
def test_files_of_the_users_that_cannot_be_imported(
    refused: Any, tmp_path: Path, content: bytes, text: str
) -> None:
    (tmp_path / "own.py").write_bytes(content)
    why = f"importing it failed at DIR/own.py:1: {text}"
    assert (
        refused("compare", "--methods", "halos", "--task", "DIR/own.py:make")
        == f"task.name = 'DIR/own.py:make': {why}"
    )
    assert refused(*COMPARE, "DIR/own.py") == f"method = 'DIR/own.py': {why}"


@pytest.mark.parametrize(
    "command", [("run",), (*COMPARE, "halos", "--topology")], ids=["recipe", "topology file"]
)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, ": No such file or directory"),
        (lambda path: path.mkdir(), ": Is a directory"),
        (lambda path: path.symlink_to("nowhere"), ": No such file or directory"),
        (
            lambda path: path.write_bytes(b"\xff"),
            " is not YAML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
    ],
    ids=["missing", "a folder", "a link to nothing", "no UTF-8"],
)
def test_files_that_cannot_be_read(
    refused: Any, tmp_path: Path, command: Any, make: Any, text: str
) -> None:
    make(tmp_path / "x.yaml")
    what = "recipe" if command == ("run",) else "topology file"
    assert refused(*command, "DIR/x.yaml") == f"{what} DIR/x.yaml{text}"


def test_heads_that_do_not_divide_the_width(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("long enough " * 200)
    sets = ("--set", "task.path=DIR/text", "--set", "task.width=30", "--set", "task.heads=4")
    assert (
        refused("compare", "--methods", "halos", "--task", "text", *sets)
        == "task.width = 30: must be divisible by task.heads = 4"
    )


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("run.steps", "--set run.steps: expected section.key=value, for example "
                      "halos.inner_steps=16 or task.width=64"),
        ("steps=3", "--set steps=3: expected section.key=value, for example halos.inner_steps=16 "
                    "or task.width=64"),
        ("run.seconds=[1", "--set run.seconds=[1: '[1' is not a value that YAML can read"),
        (
            "diloco.inner_steps=3",
            "--set diloco.inner_steps=3: 'diloco' is none of halos, topology, profile, task, "
            "pipeline, wire, track, run, faults, bad_updates",
        ),
        (
            "runs.seed=3",
            "--set runs.seed=3: 'runs' is none of halos, topology, profile, task, pipeline, wire, "
            "track, run, faults, bad_updates (did you mean 'run'?)",
        ),
        ("halos.accumulate=0", "halos.accumulate = 0: should be greater than or equal to 1"),
        ("halos.inner_steps=0", "halos.inner_steps = 0: should be greater than or equal to 1"),
        ("halos.inner_steps=many", "halos.inner_steps = 'many': should be a valid integer"),
        ("halos.inner_steps=1.5", "halos.inner_steps = 1.5: should be a valid integer"),
        ("task.width=64", "task.width: unknown key 'width'; allowed: name"),
        (
            "run.seeds=3",
            "run.seeds: unknown key 'seeds' (did you mean 'seed'?); "
            "allowed: steps, tokens, seconds, target_loss, seed, evaluations, strict",
        ),
        ("run.seed=one", "run.seed = 'one': should be a valid integer"),
        ("topology.sharing=fairly", "topology.sharing = 'fairly': should be 'none' or 'fair'"),
        ("topology.regions={a: []}", "topology.regions: there are no workers: "
                                     "give at least one region a list of speeds such as [1.0, "
                                     "0.5]"),
        ("profile.step_time_s=0", "profile.step_time_s = 0: should be greater than 0"),
    ],
)  # fmt: skip
def test_settings_that_are_wrong(refused: Any, override: str, text: str) -> None:
    assert refused(*COMPARE, "halos", "--set", override) == text


def test_an_unknown_setting_of_a_method_names_the_nearest_and_all(refused: Any) -> None:
    assert refused(*COMPARE, "diloco", "--set", "diloco.inner_step=3") == (
        "diloco.inner_step: unknown key 'inner_step' (did you mean 'inner_steps'?); "
        "allowed: inner_steps, dynamic_steps, outer_lr, outer_momentum"
    )


def test_a_setting_that_looks_like_an_impossible_date(refused: Any) -> None:
    text = refused(*COMPARE, "halos", "--set", "run.seconds=2024-13-45")
    assert text == "--set run.seconds=2024-13-45: '2024-13-45' is not a value that YAML can read"


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ((*COMPARE, "halos", "--target-loss", "2.5"), "--target-loss"),
        ((*COMPARE, "halos", "--set", "run.target_loss=2.5"), "run.target_loss ="),
        (("run", "DIR/recipe.yaml"), "run.target_loss ="),
    ],
)
def test_what_has_no_loss_has_no_target(
    refused: Any, tmp_path: Path, arguments: tuple[str, ...], place: str
) -> None:
    recipe = "{method: halos, task: none, run: {steps: 2000, target_loss: 2.5}}"
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert refused(*arguments) == (
        f"{place} 2.5: task none trains nothing and has no loss; leave it out, or choose a task"
    )


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_a_target_loss_must_be_a_number(refused: Any, json: tuple[str, ...]) -> None:
    assert "nan" in refused(*COMPARE, "halos", "--target-loss", "nan", *json)


@pytest.mark.parametrize(
    ("method", "pair"),
    [("sync_sgd", "north/w0 cannot reach "
                  "south/w0"), ("halos", "north/global cannot reach south/server0"),
     ("async_local_sgd", "north/server cannot reach "
                         "south/w0"), ("noloco", "north/w0 cannot reach south/w0")],
)  # fmt: skip
def test_nodes_that_cannot_reach_each_other(
    refused: Any, tmp_path: Path, method: str, pair: str
) -> None:
    (tmp_path / "split.yaml").write_text("regions: {north: [1.0], south: [1.0]}")
    assert refused(*COMPARE, method, "--topology", "DIR/split.yaml") == (
        f"topology 'split': {pair}: there is no link between regions 'north' and 'south'; "
        "add one under `links`, or give a `default` link"
    )


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (None, "recipe DIR/recipe.yaml: No such file or directory"),
        ("", "recipe DIR/recipe.yaml: expected `key: value` lines, found nothing"),
        ("task: none", "recipe: `method` is required, for example `method: halos`; "
                       "methods: async_local_sgd, diloco, halos, noloco, sync_sgd"),
        ("metod: halos", "recipe: unknown key 'metod' (did you mean 'method'?); "
                         "allowed: method, topology, profile, task, pipeline, run, live, wire, "
                         "track, faults, bad_updates, label"),
        ("{method: halos, run: {steps: 5, tokens: "
         "6}}", "run: steps = 5 and tokens = 6 are both given; give one of them"),
        ("{method: {name: diloco, inner_steps: "
         "0}}", "diloco.inner_steps = 0: should be greater than or equal to 1"),
        ("{method: {name: diloco, outer_lr: "
         "fast}}", "diloco.outer_lr = 'fast': should be a valid number"),
        ("{method: halos, topology: {regions: {a: [1]}, local: {bandwidth_gbit_s: 0}}}",
         "topology.local.bandwidth_gbit_s = 0: should be greater than 0"),
        ("{method: halos, label: ../elsewhere}",
         "label = '../elsewhere': it names a folder; use letters, digits, '.', '_', '+', '=', ',' "
         "and '-'"),
        ("{method: halos, run: {steps: ten}}", "run.steps = 'ten': should be a valid integer"),
    ],
)  # fmt: skip
def test_recipes_that_are_wrong(
    refused: Any, tmp_path: Path, recipe: str | None, text: str
) -> None:
    if recipe is not None:
        (tmp_path / "recipe.yaml").write_text(recipe)
    assert refused("run", "DIR/recipe.yaml") == text


def test_a_recipe_that_is_not_yaml(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("method: halos\nrun: {steps: 10\nlabel: [")
    assert refused("run", "DIR/recipe.yaml").startswith(
        "recipe DIR/recipe.yaml is not YAML: while parsing a flow mapping in"
    )


def test_a_recipe_with_an_override_that_is_wrong(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("method: halos")
    assert refused("run", "DIR/recipe.yaml", "--set", "method.accumulate=0") == (
        "halos.accumulate = 0: should be greater than or equal to 1"
    )


def test_a_report_of_nothing(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (
        refused("report", "DIR/empty")
        == "no run directory (a folder with summary.json) in DIR/empty"
    )


def test_an_output_that_is_a_file(archipel: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    told = archipel(*COMPARE, "halos", "--out", out)
    assert told == (2, "", f"archipel: --out {out}: File exists\n")
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ((*COMPARE, "halos", "--out", ""), "--out"),
        (("run", ""), "RECIPE.yaml"),
        (("run", "recipe.yaml", "--out", " "), "--out"),
        (("launch", "recipe.yaml", "--out", ""), "--out"),
        (("resume", ""), "DIR"),
        (("report", "runs", ""), "DIR…"),
        (("report", "runs", "--out", ""), "--out"),
        (("study", "noloco-spread", "--out", ""), "--out"),
        (("latency", "--out", ""), "--out"),
        (("theory", "noloco", "--plots", ""), "--plots"),
    ],
)
def test_a_path_that_is_empty_is_not_the_folder_where_the_command_runs(
    archipel: Any,
    arguments: tuple[str, ...],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is where a shell variable is not set."""
    monkeypatch.chdir(tmp_path)
    given = " " if " " in arguments else ""
    code, printed, complaint = archipel(*arguments)
    assert (code, printed) == (2, "")
    assert complaint.splitlines()[-1] == (
        f"archipel: Invalid value for '{place}': {given!r} is no name of a file or folder; '.' is "
        "the folder where the command runs."
    )
    assert not list(tmp_path.iterdir())


def test_a_dot_is_the_folder_where_the_command_runs(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert archipel(*COMPARE, "halos", "--out", ".").code == 0
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_an_output_that_cannot_be_written_to(
    refused: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A folder that is read-only is noticed before anything runs. Root may write anywhere, so the
    system's answer is made up.
    """

    def refuse(dir: Path) -> None:
        raise OSError(code, os.strerror(code), str(dir))

    monkeypatch.setattr(rundir.tempfile, "TemporaryFile", refuse)
    assert refused(*COMPARE, "halos") == f"--out DIR/out: {os.strerror(code)}"


def test_a_long_line_is_not_wrapped(refused: Any) -> None:
    name = "x" * 200
    assert refused(*COMPARE, "halos", "--topology", name).startswith(
        f"topology '{name}' is neither a preset"
    )


def test_markup_in_a_mistake_is_shown_as_it_is(refused: Any) -> None:
    assert refused(*COMPARE, "halos", "--profile", "[red]").startswith(
        "profile = '[red]': allowed are "
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", "0"),
        ("--steps", "many"),
        ("--seeds", "0"),
        ("--processes", "0"),
        ("--stpes", "3"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_options_that_are_wrong_are_told_without_a_traceback(
    archipel: Any, tmp_path: Path, arguments: tuple[str, str]
) -> None:
    """The option parser's own words take a few lines: how the command is used, then the error."""
    code, _, complaint = archipel(*COMPARE, "halos", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert " ".join(arguments) in complaint or arguments[0] == "--stpes"
    assert arguments[0] in complaint.splitlines()[-1]
    assert "Traceback" not in complaint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [("--steps", "0"), ("--steps=0",), ("--steps", "3", "--steps=0")])
def test_a_wrong_value_of_an_option_is_named(archipel: Any, given: tuple[str, ...]) -> None:
    code, printed, complaint = archipel("compare", "--task", "none", *given)
    assert (code, printed) == (2, "")
    assert complaint.startswith("archipel: --steps 0: ")
    assert "1" in complaint.removeprefix("archipel: --steps 0: ")
