"""The command line as a user meets it: what is printed, what is left, and what can be asked of it
again.
"""

from __future__ import annotations

import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from archipel import __version__, methods

RUN_KEYS = {
    "method",
    "label",
    "seed",
    "time_s",
    "inner_steps",
    "tokens",
    "outer_steps",
    "messages",
    "sent_bytes",
    "slow_link_bytes",
    "idle_fraction",
    "final_loss",
    "best_loss",
    "time_to_target_s",
}
SMALL = [
    "--set",
    "task.layers=1",
    "--set",
    "task.width=16",
    "--set",
    "task.heads=2",
    "--set",
    "task.sequence=16",
]
SMALL += ["--set", "task.valid_sequences=8", "--set", "run.evaluations=4"]


@pytest.mark.slow
def test_compare_with_seeds_leaves_runs_and_a_report(archipel: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = archipel(
        "compare",
        "--methods",
        "halos,diloco+dynamic_steps",
        "--task",
        "synthetic",
        "--steps",
        300,
        "--seeds",
        2,
        "--set",
        "halos.accumulate=4",
        "--set",
        "diloco.inner_steps=8",
        "--processes",
        1,
        "--out",
        out,
        *SMALL,
    )
    assert answer.code == 0, answer.err
    assert sorted(path.name for path in out.iterdir()) == [
        "diloco+dynamic_steps-seed0",
        "diloco+dynamic_steps-seed1",
        "halos-seed0",
        "halos-seed1",
        "loss_vs_time.png",
        "loss_vs_tokens.png",
        "report.html",
        "timeline.png",
    ]
    for run in out.glob("*-seed*"):
        assert {path.name for path in run.iterdir()} == {
            "recipe.yaml",
            "metrics.jsonl",
            "summary.json",
            "trace.json",
            "weights.safetensors",
        }
    first = answer.out.splitlines()[0]
    assert first.startswith("Real: gradients of a GPT of 1 x 16")
    assert "Modelled: the clock" in first
    assert "2 seeds" in first
    assert "halos: accumulate 4 (published: 32)" in answer.out
    assert "±" in answer.out
    lines = answer.err.splitlines()
    assert all(
        re.match(r"^[\w+]+-seed\d: [\d,]+/300 steps, [\d,]+ s modelled, \d+ s here$", line)
        for line in lines
    ), lines

    again = archipel("report", out, "--json", "--target-loss", 99)
    assert json.loads(again.out)["target_loss"] == 99
    assert len(json.loads(again.out)["runs"]) == 4


@pytest.mark.slow
def test_a_recipe_runs_and_its_filled_in_copy_gives_the_same_run(
    archipel: Any, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "method: {name: noloco, inner_steps: 4}\ntopology: internet-4\nprofile: pythia-70m-h100\n"
        "task: {name: synthetic, layers: 1, width: 16, heads: 2, sequence: 16, valid_sequences: 8, "
        "lr: 1e-3}\n"
        "run: {steps: 100, seed: 3, evaluations: 2}\n"
    )
    first = archipel("run", recipe, "--processes", 1, "--out", tmp_path / "a", "--json")
    assert first.code == 0, first.err
    [run] = json.loads(first.out)["runs"]
    assert set(run) >= RUN_KEYS
    assert run["seed"] == 3
    assert run["replica_std"] > 0
    filled = tmp_path / "a" / "noloco-seed3" / "recipe.yaml"
    assert yaml.safe_load(filled.read_text())["method"]["gamma"] == 0.7
    assert archipel("run", filled, "--processes", 1, "--out", tmp_path / "b").code == 0
    for name in ("metrics.jsonl", "weights.safetensors", "recipe.yaml"):
        same = Path("noloco-seed3") / name
        assert (tmp_path / "a" / same).read_bytes() == (tmp_path / "b" / same).read_bytes()
    weights = load_file(filled.with_name("weights.safetensors"))
    once = {tensor.numpy().tobytes(): tensor.numel() for tensor in weights.values()}
    assert sum(once.values()) == 64 * 16 + 16 * 16 * 13 + 48
    assert len(weights) == len(once) + 1  # the tied table is there under both of its names


def test_tokens_are_steps_times_the_size_of_a_batch(archipel: Any, tmp_path: Path) -> None:
    answer = archipel(
        "compare",
        "--methods",
        "diloco",
        "--task",
        "synthetic",
        "--tokens",
        6400,
        "--topology",
        "one-node",
        "--processes",
        1,
        "--out",
        tmp_path / "out",
        "--json",
        "--set",
        "diloco.inner_steps=10",
        *SMALL,
    )
    [run] = json.loads(answer.out)["runs"]
    assert (run["inner_steps"], run["tokens"]) == (100, 6400)
    assert run["time_to_target_s"] == run["time_s"]


def test_overrides_reach_a_preset_topology_and_a_profile(archipel: Any, tmp_path: Path) -> None:
    def seconds(*overrides: str) -> float:
        sets = [part for override in overrides for part in ("--set", override)]
        answer = archipel(
            "compare",
            "--methods",
            "diloco",
            "--task",
            "none",
            "--steps",
            512,
            "--json",
            "--out",
            tmp_path / "out",
            *sets,
        )
        assert answer.code == 0, answer.err
        return json.loads(answer.out)["runs"][0]["time_s"]

    base = seconds()
    assert base == pytest.approx(97.93653652571933)
    assert seconds("profile.step_time_s=0.476782") == pytest.approx(
        base + 32 * 0.238391 * 0.907 / 0.107
    )
    assert seconds("topology.collective=tree") == pytest.approx(
        base - 2 * 15 / 16 * 281706496 * 8 / 0.127e9 + 8 * 281706496 * 8 / 0.117e9
    )


def test_a_method_of_ones_own_is_one_file(archipel: Any, tmp_path: Path) -> None:
    """The example in CONTRIBUTING.md, as it stands there."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "local_sgd.py").write_text(code)
    answer = archipel(
        "compare",
        "--methods",
        f"{tmp_path}/local_sgd.py,diloco",
        "--task",
        "none",
        "--steps",
        1024,
        "--json",
        "--out",
        tmp_path / "out",
    )
    assert answer.code == 0, answer.err
    runs = {run["label"]: run for run in json.loads(answer.out)["runs"]}
    assert runs["local_sgd"]["time_s"] == runs["diloco"]["time_s"]


def test_the_version_is_printed_alone(archipel: Any) -> None:
    answer = archipel("--version")
    assert (answer.code, answer.out, answer.err) == (0, f"archipel {__version__}\n", "")
    assert "Train one model over slow links" in archipel("--help").out


def test_list_shows_what_there_is_and_what_can_be_set(archipel: Any, tmp_path: Path) -> None:
    everything = archipel("list").out
    assert "noloco" in everything
    assert "uneven-2-6" in everything
    halos = " ".join(archipel("list", "halos").out.split())
    assert "accumulate 32 K: worker updates that a local server applies before it reports" in halos
    assert "path required" in " ".join(archipel("list", "text").out.split())
    assert yaml.safe_load(archipel("list", "two-regions").out)["links"][0]["latency_ms"] == 35
    assert "0.238391" in archipel("list", "pythia-70m-h100").out
    assert archipel("list", "halo").code == 2
    (tmp_path / "my-halos.yaml").write_text(
        "regions: {a: [1.0]}"
    )  # a file may be called nearly like a method
    assert "my-halos" in archipel("list", tmp_path / "my-halos.yaml").out


@pytest.mark.parametrize(
    ("one", "kind", "among"),
    [
        ("method", "methods", "halos"),
        ("task", "tasks", "stdlib"),
        ("topology", "topologies", "two-regions"),
        ("profile", "profiles", "measured"),
        ("section", "sections", "pipeline"),
        ("study", "studies", "noloco-spread"),
    ],
)
def test_list_knows_what_its_kinds_of_names_are_called(
    archipel: Any, one: str, kind: str, among: str
) -> None:
    listed = archipel("list", one)
    assert listed == archipel("list", kind)
    names, hint = listed.out.splitlines()
    assert names in archipel("list").out.splitlines()
    assert (names.split()[0], among in names) == (kind, True)
    assert hint == f"`archipel list NAME` says more of each {one}"


def test_every_name_that_list_shows_can_be_asked_for(archipel: Any) -> None:
    """Placeholders, written in capitals or as a function, stand for names of the user's."""
    shown = [line.split(maxsplit=1)[1].split(", ") for line in archipel("list").out.splitlines()]
    for name in itertools.chain(*shown):
        if name not in ("internet-N", "FILE.yaml", "file.py:function"):
            assert archipel("list", name).code == 0, name


def test_list_says_how_to_make_a_study(archipel: Any) -> None:
    assert archipel("list", "noloco-spread").out == (
        "noloco-spread is a study: Does the spread of NoLoCo's replicas follow the inner learning "
        "rate?\n`archipel study noloco-spread` makes it, `archipel study --help` has its options\n"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("topolgy", " (did you mean 'topology'?)"),
        ("noloco-spred", " (did you mean 'noloco-spread'?)"),
        ("gamma", "; it is a setting of noloco, see `archipel list noloco`"),
        ("run.seed", "; it is a setting of run, see `archipel list run`"),
        ("probability", "; it is a setting of loss, duplicate, see `archipel list loss`"),
        ("zzz", ""),
    ],
)
def test_list_says_what_may_be_meant(archipel: Any, name: str, meant: str) -> None:
    told = f"archipel: nothing is called {name!r}{meant}; `archipel list` shows all names\n"
    assert archipel("list", name) == (2, "", told)


@pytest.mark.parametrize("columns", [None, "80"], ids=["no width", "a narrow terminal's"])
def test_a_table_in_a_pipe_has_a_line_for_each_row(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    config = methods.load("noloco").Config
    lines = archipel("list", "noloco").out.splitlines()
    assert len(lines) == 1 + len(config.model_fields)
    for line, field in zip(lines[1:], config.model_fields.values(), strict=True):
        assert str(field.description) in line
    compared = archipel(
        *("compare", "--task", "none", "--steps", 2000, "--seeds", 2),
        *("--methods", "halos,diloco+dynamic_steps", "--out", tmp_path / "out"),
    )
    headers, halos, diloco = (
        next(line for line in compared.out.splitlines() if line.startswith(f"{first} "))
        for first in ("method", "halos", "diloco+dynamic_steps")
    )
    assert headers.split()[-5:] == ["bytes", "over", "slow", "links", "idle"]
    assert halos.rstrip().endswith("%")
    assert diloco.rstrip().endswith("%")


def test_list_shows_faults_their_kinds_and_what_each_one_takes(archipel: Any) -> None:
    assert "faults      slow, crash, leave, join, loss, " in archipel("list").out
    section = " ".join(archipel("list", "faults").out.split())
    assert "deadline_s 30.0 seconds of silence after which a node is taken for lost" in section
    assert "random.crashes_per_hour 0.0 servers and workers that crash, per hour" in section
    assert "partition All links between these regions and all other regions are down." in section
    crash = " ".join(archipel("list", "crash").out.split())
    assert "at_s required when the node dies, in seconds" in crash
    assert "restart_after_s None seconds until the node is back; null: it never comes back" in crash


def test_many_workers_and_few_steps_are_one_round(archipel: Any, tmp_path: Path) -> None:
    """A plan that is over before the first round is still one that can be compared."""
    arguments = ("--task", "none", "--steps", 64, "--methods", "sync_sgd", "--out", tmp_path)
    answer = archipel("compare", "--topology", "internet-1000", *arguments, "--json")
    assert answer.code == 0, answer.err
    [run] = json.loads(answer.out)["runs"]
    assert run["inner_steps"] == 1000
    assert (tmp_path / "report.html").is_file()


def test_the_theory_of_noloco(archipel: Any) -> None:
    unstable = archipel("theory", "noloco", "--alpha", 0.9, "--beta", 0.7, "--gamma", 0.7).out
    assert unstable.startswith(
        "unstable: α = 0.9, β = 0.7, γ = 0.7, groups of 2, many workers, in the small-curvature "
        "limit"
    )
    assert "0.00 < γ < 0.38" in unstable
    stable = archipel("theory", "noloco", "--alpha", 0.5).out
    assert stable.startswith("stable: ")
    assert "0.00 < γ < 1.50" in stable
    verdict = json.loads(
        archipel(
            "theory", "noloco", "--curvature", 0.01, "--workers", 4, "--inner-steps", 10, "--json"
        ).out
    )
    assert set(verdict) == {
        "stable",
        "spectral_radius_mean",
        "spectral_radius_spread",
        "gamma_min",
        "gamma_max",
        "gamma_max_limit",
        "gamma_best",
        "workers",
        "group_size",
        "curvature",
        "inner_steps",
    }
    assert (verdict["workers"], verdict["curvature"], verdict["inner_steps"]) == (4, 0.01, 10)


def test_the_theory_of_noloco_says_how_far_off_the_conjecture_is(archipel: Any) -> None:
    lines = archipel("theory", "noloco", "--curvature", 0.001, "--conjecture").out.splitlines()
    assert ["16", "0.5425", "0.5425"] in [line.split() for line in lines]
    assert (
        "one group of all"
        in archipel("theory", "noloco", "--curvature", 0.001, "--conjecture", "--group-size", 4).out
    )
    more = json.loads(
        archipel(
            "theory", "noloco", "--curvature", 0.01, "--conjecture", "--group-size", 4, "--json"
        ).out
    )
    assert more["conjecture"][-1] == {
        "workers": None,
        "exact_over_independent": 1.0,
        "exact_over_conjectured": pytest.approx(2 / 3),
    }
    refused = archipel("theory", "noloco", "--conjecture")
    assert refused.code == 2
    assert refused.err == (
        "archipel: --conjecture: a flat direction has no variance to compare; give a --curvature, "
        "such as 0.001\n"
    )


def test_the_theory_of_noloco_draws_figures(archipel: Any, tmp_path: Path) -> None:
    answer = archipel("theory", "noloco", "--alpha", 0.9, "--plots", tmp_path / "figures")
    assert answer.code == 0
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "theory_ellipse.png",
        "theory_factor.png",
        "theory_window.png",
    ]
    assert "theory_window.png" in answer.out.splitlines()[-1]
    assert (
        "theory_omega.png is not drawn: gamma is 0.7, not stable in a flat direction\n"
        in answer.err
    )


def test_latency_prints_what_pairs_save(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from archipel.theory import latency

    study = latency.study
    monkeypatch.setattr(
        latency, "study", lambda job, seed: study(job, seed, nodes=(2, 4), draws=256)
    )
    answer = archipel(
        "latency",
        "--workers",
        4,
        "--inner-steps",
        5,
        "--steps",
        50,
        "--out",
        tmp_path / "out",
        "--json",
    )
    assert answer.code == 0, answer.err
    assert len(json.loads(answer.out)["claims"]) == 3
    assert len(list((tmp_path / "out").glob("*.png"))) == 2
    assert (
        "tree"
        in archipel(
            "latency", "--workers", 4, "--inner-steps", 5, "--steps", 50, "--out", tmp_path / "out"
        ).out
    )
    assert archipel("latency", "--sigma", -1, "--out", tmp_path / "no").code == 2


def test_noloco_warns_before_its_replicas_drift_apart(archipel: Any, tmp_path: Path) -> None:
    def errors(*settings: str) -> str:
        sets = [part for setting in settings for part in ("--set", setting)]
        return archipel(
            "compare",
            "--methods",
            "noloco",
            "--task",
            "none",
            "--steps",
            800,
            "--out",
            tmp_path / "out",
            *sets,
        ).err

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        diverging = errors("noloco.alpha=0.9")
        converging = errors("noloco.alpha=0.9", "noloco.gamma=0.2") + errors()
    assert diverging.splitlines()[0] == (
        "archipel: warning: noloco: gamma = 0.7 will drive the replicas apart: with alpha = 0.9, "
        "groups of 2 and 16 workers "
        "they stay together for 0.00 < gamma < 0.40, and come together fastest with gamma = 0.01 "
        "(see: archipel theory noloco)"
    )
    assert "warning" not in converging


def test_a_run_directory_is_replaced_and_nothing_else_is_touched(
    archipel: Any, tmp_path: Path
) -> None:
    common = ("compare", "--methods", "diloco", "--task", "none", "--out", tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert archipel(*common, "--steps", 512).code == 0
    assert archipel(*common, "--steps", 1024).code == 0
    assert (
        json.loads((tmp_path / "diloco-seed0" / "summary.json").read_text())["inner_steps"] == 1024
    )
    assert (tmp_path / "notes.txt").read_text() == "mine"
    for file in ("summary.json", "recipe.yaml"):
        (tmp_path / "diloco-seed0" / file).unlink()
    refused = archipel(*common, "--steps", 512)
    assert refused.code == 2
    assert (
        refused.err
        == f"archipel: --out {tmp_path}: {tmp_path}/diloco-seed0 is there already and is not a run "
        "directory\n"
    )


def test_a_method_that_diverges_does_not_cost_the_others(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from archipel import simulation
    from archipel.errors import Diverged

    usual = simulation.simulate

    def diverging(recipe: Any, *arguments: Any, **options: Any) -> Any:
        if recipe.label == "diloco":
            raise Diverged("diloco: the validation loss is nan")
        return usual(recipe, *arguments, **options)

    monkeypatch.setattr(simulation, "simulate", diverging)
    answer = archipel(
        "compare",
        "--methods",
        "diloco,halos",
        "--task",
        "none",
        "--steps",
        500,
        "--json",
        "--out",
        tmp_path / "out",
    )
    assert answer.code == 2
    assert [run["label"] for run in json.loads(answer.out)["runs"]] == ["halos"]
    assert answer.err.splitlines()[-1] == "archipel: diloco: the validation loss is nan (seed 0)"


def test_a_full_disk_is_one_line_and_leaves_no_half_written_run(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    answer = archipel(
        "compare",
        "--methods",
        "diloco",
        "--task",
        "none",
        "--steps",
        512,
        "--out",
        tmp_path / "out",
    )
    assert answer.code == 1
    assert answer.err.splitlines()[-1].endswith("recipe.yaml: No space left on device")
    assert not (tmp_path / "out").exists()


def test_a_report_that_cannot_be_written_is_one_line(archipel: Any, tmp_path: Path) -> None:
    assert (
        archipel(
            "compare",
            "--methods",
            "diloco",
            "--task",
            "none",
            "--steps",
            512,
            "--out",
            tmp_path / "out",
        ).code
        == 0
    )
    (tmp_path / "file").write_text("")
    answer = archipel("report", tmp_path / "out", "--out", tmp_path / "file" / "folder")
    assert (answer.code, answer.err) == (1, f"archipel: {tmp_path}/file/folder: Not a directory\n")


def test_a_recipes_target_is_the_reports(archipel: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    task = "{name: synthetic, layers: 1, width: 8, heads: 2, sequence: 8, valid_sequences: 4}"
    recipe.write_text(f"method: diloco\ntask: {task}\nrun: {{steps: 512, target_loss: 1.5}}\n")
    answer = archipel("run", recipe, "--json", "--processes", 1, "--out", tmp_path / "out")
    assert json.loads(answer.out)["target_loss"] == 1.5


def test_ctrl_c_leaves_what_was_finished(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from archipel.sim.engine import Engine

    handle, count = Engine.handle, 0

    def interrupted(self: Engine, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 5000:
            raise KeyboardInterrupt
        handle(self, *arguments)

    monkeypatch.setattr(Engine, "handle", interrupted)
    answer = archipel(
        "compare",
        "--methods",
        "async_local_sgd",
        "--task",
        "none",
        "--out",
        tmp_path / "out",
        "--steps",
        10**6,
    )
    assert answer.code == 130
    assert answer.err.splitlines()[-1] == (
        f"archipel: interrupted; `archipel resume {tmp_path}/out` goes on from here; "
        f"`archipel report {tmp_path}/out` shows what happened until then"
    )
    assert (
        json.loads((tmp_path / "out" / "async_local_sgd-seed0" / "summary.json").read_text())[
            "stopped"
        ]
        == "interrupted"
    )
