"""The report: what it computes, how it words it, and that its page stands alone."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from archipel import report
from archipel.report import ReportError, plots, words

SUMMARY: dict[str, Any] = {
    "method": "halos",
    "label": "halos",
    "seed": 0,
    "time_s": 40.0,
    "inner_steps": 400,
    "tokens": 4_000_000,
    "outer_steps": 8,
    "local_updates": 80,
    "messages": 160,
    "sent_bytes": 9_000_000_000,
    "slow_link_bytes": 2_500_000_000,
    "idle_fraction": 0.125,
    "final_loss": 2.0,
    "best_loss": 2.0,
    "workers": 2,
    "real": "gradients: stdlib, GPT 2x64 (140,000 parameters)",
    "modelled": "clock: topology halos-4x4, profile pythia-70m-h100",
    "settings": {"inner_steps": 8, "outer_momentum": 0.5},
    "changed": {},
    "loss_name": "validation loss (nats per byte)",
    "entropy_rate": None,
    "wall_s": 1.5,
    "processes": 2,
    "machine": "x86_64, 2 cores",
    "versions": {"archipel": "0.1.0", "torch": "2.13.0"},
    "stopped": "steps",
}


def write_run(
    directory: Path,
    label: str,
    losses: Sequence[float | None],
    *,
    every_s: float = 10.0,
    spread: float | None = None,
    **changes: Any,
) -> report.Result:
    """A run directory whose evaluations are `every_s` apart, the first at time 0; what
    `report.load` makes of it.
    """
    directory.mkdir(parents=True)
    end_s = every_s * (len(losses) - 1)
    summary = SUMMARY | {"label": label, "time_s": end_s, "final_loss": losses[-1]} | changes
    evals = [
        {
            "kind": "eval",
            "time_s": every_s * n,
            "inner_steps": 100 * n,
            "tokens": None if loss is None else 1_000_000 * n,
            "outer_steps": 2 * n,
            "loss": loss,
            "replica_loss": None,
            "replica_std": spread,
            "sent_bytes": 0,
            "slow_link_bytes": 0,
        }
        for n, loss in enumerate(losses)
    ]
    lines = [
        *evals,
        {"kind": "train", "time_s": 1.0, "node": "r0/w0", "steps": 5, "loss": 2.2, "lr": 0.001},
    ]
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "r0"}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "r0/w0"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "r1/w0"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "r1/server"}},
    ]
    for n in range(5):
        start = n * end_s / 5 * 1e6
        events += [
            {"name": "compute", "ph": "X", "pid": 0, "tid": 0, "ts": start, "dur": end_s * 1e5},
            {"name": "compute", "ph": "X", "pid": 1, "tid": 1, "ts": start, "dur": end_s * 0.5e5},
            {"name": "send", "ph": "X", "pid": 1, "tid": 2, "ts": start, "dur": end_s * 0.5e5},
        ]
    (directory / "summary.json").write_text(json.dumps(summary))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return report.load(directory)


@pytest.fixture
def runs(tmp_path: Path) -> list[report.Result]:
    """Two seeds of a fast method, one of a slow one that ends worst, one of a method in between."""
    return [
        write_run(tmp_path / "slow", "slow", [3.0, 2.9, 2.7, 2.5, 2.2], every_s=100.0),
        write_run(tmp_path / "fast-0", "fast", [3.0, 2.4, 2.2, 2.1, 2.0], seed=0),
        write_run(tmp_path / "fast-1", "fast", [3.0, 2.6, 2.4, 2.2, 2.1], seed=1),
        write_run(tmp_path / "middle", "middle", [3.0, 2.5, 2.1, 2.0, 1.9], every_s=50.0),
    ]


def printed(runs: list[report.Result], target: float | None, width: int = 120) -> str:
    text = io.StringIO()
    Console(width=width, file=text, color_system=None).print(report.table(runs, target))
    return text.getvalue()


# Comparing


def test_the_target_is_what_the_worst_run_ends_at(runs: list[report.Result]) -> None:
    assert report.target_loss(runs) == 2.2


def test_a_run_without_a_final_loss_sets_no_target(
    runs: list[report.Result], tmp_path: Path
) -> None:
    blown_up = write_run(tmp_path / "nan", "nan", [3.0, float("nan")])
    assert blown_up.summary["final_loss"] is None
    assert report.target_loss([*runs, blown_up]) == 2.2
    assert report.target_loss([blown_up]) is None


def test_time_to_target_is_read_off_the_line_between_two_evaluations(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "run", [3.0, 2.5, 2.2, 2.3, 2.1])
    assert report.time_to_target_s(run, 2.2) == 20.0
    assert report.time_to_target_s(run, 2.35) == pytest.approx(10.0 + 10.0 * 0.15 / 0.3)
    assert report.time_to_target_s(run, 2.9) == pytest.approx(2.0)  # from the untrained model on
    assert report.time_to_target_s(run, 2.15) == pytest.approx(37.5)  # the last rise is in it
    assert report.time_to_target_s(run, 2.0) is None
    assert report.time_to_target_s(run, None) is None


HUNDREDTHS = st.integers(50, 500).map(lambda n: n / 100)  # no line is flat by rounding


@given(
    losses=st.lists(HUNDREDTHS, min_size=2, max_size=8),
    target=HUNDREDTHS,
    every_s=st.floats(0.1, 100.0),
)
def test_the_time_to_target_is_where_the_drawn_line_meets_it(
    losses: list[float], target: float, every_s: float
) -> None:
    """The reference walks along the line in small steps."""
    evals = [{"time_s": every_s * n, "loss": loss} for n, loss in enumerate(losses)]
    time_s = report.time_to_target_s(report.Result(Path(), {}, evals), target)
    grid = np.linspace(0.0, len(losses) - 1.0, 700 * (len(losses) - 1) + 1)
    below = np.interp(grid, np.arange(len(losses)), losses) <= target
    if losses[0] > target:
        expected = every_s * grid[below.argmax()] if below.any() else None
    else:  # the start does not count: the first evaluation after it at or below the target
        after = [n for n, loss in enumerate(losses) if n and loss <= target]
        if not after:
            expected = None
        elif after[0] == 1:
            expected = every_s
        else:
            expected = every_s * grid[np.flatnonzero(below & (grid > after[0] - 1))[0]]
    if expected is None:
        assert time_s is None
    else:
        assert time_s == pytest.approx(expected, abs=every_s / 600)


def test_runs_with_few_evaluations_are_as_fast_as_those_with_many(tmp_path: Path) -> None:
    """One loss, 4 - t/100, seen every 10 s or every 70 s."""
    often = write_run(tmp_path / "often", "often", [4.0 - n / 10 for n in range(29)])
    seldom = write_run(
        tmp_path / "seldom", "seldom", [4.0 - 7 * n / 10 for n in range(5)], every_s=70.0
    )
    rows = {row["label"]: row for row in report.rows([often, seldom], 2.55)}
    assert rows["often"]["time_to_target_s"] == pytest.approx(145.0)
    assert rows["seldom"]["time_to_target_s"] == pytest.approx(145.0)
    assert rows["often"]["time_to_target_s_grid"] == pytest.approx(5.0)
    assert rows["seldom"]["time_to_target_s_grid"] == pytest.approx(35.0)
    text = printed([often, seldom], 2.55)
    assert "145.0 s ±5.0 s" in text
    assert "145.0 s ±35.0 s" in text


def test_rows_are_ordered_by_time_to_target_and_name_both_ratios(runs: list[report.Result]) -> None:
    rows = report.rows(runs, 2.2)
    assert [row["label"] for row in rows] == ["fast", "middle", "slow"]
    assert [row["time_to_target_s"] for row in rows] == pytest.approx([25.0, 87.5, 400.0])
    assert [row["speed_up"] for row in rows] == pytest.approx([16.0, 400 / 87.5, 1.0])
    assert [row["times_slower"] for row in rows] == pytest.approx([1.0, 3.5, 16.0])


def test_seeds_give_mean_and_sample_standard_deviation(runs: list[report.Result]) -> None:
    fast, middle, _ = report.rows(runs, 2.2)
    assert fast["final_loss"] == pytest.approx(statistics.mean([2.0, 2.1]))
    assert fast["final_loss_sd"] == pytest.approx(statistics.stdev([2.0, 2.1]))
    assert fast["time_to_target_s_sd"] == pytest.approx(statistics.stdev([20.0, 30.0]))
    assert middle["final_loss_sd"] is None


def test_a_label_of_which_some_seeds_reach_the_target_gets_no_ratio(
    runs: list[report.Result],
) -> None:
    rows = report.rows(runs, 2.05)
    assert [(row["label"], row["reached"], row["seeds"]) for row in rows] == [
        ("middle", 1, 1),
        ("fast", 1, 2),
        ("slow", 0, 1),
    ]
    assert [row["time_to_target_s"] for row in rows] == [
        pytest.approx(125.0),
        pytest.approx(35.0),
        None,
    ]
    assert [row["speed_up"] for row in rows] == [1.0, None, None]
    text = printed(runs, 2.05)
    assert "35.0 s ±5.0 s (1/2 seeds)" in text
    assert "never" in text


def test_no_runs_and_unlike_losses_are_refused(runs: list[report.Result], tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"^no runs to report$"):
        report.rows([], 2.0)
    other = write_run(tmp_path / "bits", "bits", [3.0, 2.0], loss_name="bits per byte")
    message = (
        r"^runs with different losses cannot share a report: bits per byte, validation loss "
        r"\(nats per byte\)$"
    )
    with pytest.raises(ReportError, match=message):
        report.rows([*runs, other], 2.0)


def test_json_holds_the_runs(runs: list[report.Result]) -> None:
    content = json.loads(json.dumps(report.as_json(runs, 2.2), allow_nan=False))
    assert set(content) == {"runs", "target_loss", "real", "modelled"}
    assert content["target_loss"] == 2.2
    assert [run["diverged"] for run in content["runs"]] == [False] * 4
    assert [run["time_per_step_s"] for run in content["runs"]] == [1.0, 0.1, 0.1, 0.5]
    times = {(run["label"], run["seed"]): run["time_to_target_s"] for run in content["runs"]}
    assert times == {
        (run.summary["label"], run.summary["seed"]): report.time_to_target_s(run, 2.2)
        for run in runs
    }


def test_the_share_that_never_reached_the_model_is_shown_where_there_is_one(
    tmp_path: Path,
) -> None:
    halos = write_run(
        tmp_path / "halos", "halos", [3.0, 2.0], absorbed_steps=290, unreported_fraction=0.275
    )
    diloco = write_run(
        tmp_path / "diloco", "diloco", [3.0, 2.0], absorbed_steps=400, unreported_fraction=0.0
    )
    text = " ".join(printed([halos, diloco], 2.0).split())
    assert "tokens not in the model" in text
    assert "4.00 M 28% 2.50 GB" in text
    assert "4.00 M 0% 2.50 GB" in text
    assert "Not in the model: the share of all inner steps that were trained and never" in text
    assert report.record(halos, 2.0)["unreported_fraction"] == 0.275
    assert "not in the model" not in printed([diloco], 2.0)
    older = write_run(tmp_path / "older", "older", [3.0, 2.0])  # a version that did not say
    assert "4.00 M – 2.50 GB" in " ".join(printed([halos, older], 2.0).split())


# Words


def test_table_in_full(runs: list[report.Result]) -> None:
    lines = [" ".join(line.split()) for line in printed(runs, 2.2).splitlines()]
    assert lines[:4] == [
        "method time to loss 2.200 speed-up final loss tokens bytes over slow links idle",
        "fast 25.0 s ±7.1 s 16.0× 2.050 ±0.071 4.00 M 2.50 GB 12.5%",
        "middle 87.5 s ±25.0 s 4.57× 1.900 4.00 M 2.50 GB 12.5%",
        "slow 400.0 s ±50.0 s 1.00× 2.200 4.00 M 2.50 GB 12.5%",
    ]
    assert " ".join(lines[4:]) == (
        "Target: validation loss (nats per byte) 2.200, the loss that the worst of these runs ends "
        "at; "
        "its time is read off the straight line between the evaluations before and after it. "
        "Speed-up: times faster than the slowest method that reaches it. "
        "Tokens, bytes and idle time are of whole runs. "
        "± is one standard deviation over 1 to 2 seeds. "
        "± of the time of one seed is half the time between these two evaluations, and says "
        "nothing of other seeds. "
        "Evaluations are up to 100.0 s apart there."
    )


def test_table_keeps_names_and_figures_whole_at_80_columns(tmp_path: Path) -> None:
    seeds = [[3.0, 2.0], [3.0, 2.2]]
    made = [
        write_run(tmp_path / f"{n}", "diloco+dynamic_steps", losses, every_s=5000.0)
        for n, losses in enumerate(seeds)
    ]
    text = printed(made, 2.2, width=80)
    for whole in (
        "diloco+dynamic_steps",
        "1:23:20",
        "2.100",
        "±0.141",
        "4.00 M",
        "2.50 GB",
        "12.5%",
    ):
        assert whole in text


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_999, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (3.2e12, "3.20 TB"),
        (5e18, "5,000 PB"),
    ],
)
def test_bytes_have_three_digits(tmp_path: Path, count: float, shown: str) -> None:
    assert f" {shown} " in printed(
        [write_run(tmp_path / "run", "run", [3.0, 2.0], slow_link_bytes=count)], 2.0
    )


def timing(directory: Path, label: str, time_s: float, steps: int, **more: Any) -> report.Result:
    """A run in which nothing was trained."""
    return write_run(
        directory,
        label,
        [None, None],
        every_s=time_s,
        inner_steps=steps,
        loss_name=None,
        **more,
    )


def test_timing_only_runs_are_compared_by_time_per_inner_step(tmp_path: Path) -> None:
    """Each method stops at its own distance behind the plan: the run that ends first is not the
    fastest.
    """
    slow = timing(tmp_path / "slow", "slow", 3725.0, 1000)
    short = timing(tmp_path / "short", "short", 59.6, 1000)  # 59.6 ms a step
    further = timing(tmp_path / "further", "further", 60.4, 1100)  # 54.9 ms a step
    runs = [slow, short, further]
    assert report.target_loss(runs) is None
    rows = report.rows(runs, None)
    assert [row["label"] for row in rows] == ["further", "short", "slow"]
    assert [row["time_per_step_s"] for row in rows] == pytest.approx([60.4 / 1100, 0.0596, 3.725])
    lines = [" ".join(line.split()) for line in printed(runs, None).splitlines()]
    assert lines[:4] == [
        "method time per inner step time inner steps outer steps bytes over slow links idle",
        "further 54.9 ms 0:01:00 1,100 8 2.50 GB 12.5%",
        "short 59.6 ms 0:01:00 1,000 8 2.50 GB 12.5%",
        "slow 3.73 s 1:02:05 1,000 8 2.50 GB 12.5%",
    ]
    assert " ".join(lines[4:]) == (
        "All figures are of whole runs. A run ends when its model changes at or after the planned "
        "inner steps, and with some methods that is many steps later: compare times per inner "
        "step, by which the methods are ordered."
    )
    page = report.write(runs, tmp_path / "out").read_text()
    assert (
        "further takes the least time per inner step, 54.9 ms; slow takes 67.8× as long. No losses "
        "to compare: this is about time and bytes."
    ) in page
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.html",
        "timeline.png",
    ]


def test_the_time_per_inner_step_is_a_mean_over_seeds_of_runs_that_have_some(
    tmp_path: Path,
) -> None:
    seeds = [timing(tmp_path / f"{n}", "halos", 60.0, 1000 * n, seed=n) for n in (1, 2)]
    nothing = timing(tmp_path / "nothing", "nothing", 0.0, 0)
    last, first = report.rows([nothing, *seeds], None)[::-1]
    assert first["time_per_step_s"] == pytest.approx(0.045)
    assert first["time_per_step_s_sd"] == pytest.approx(statistics.stdev([0.06, 0.03]))
    assert (last["label"], last["time_per_step_s"]) == ("nothing", None)
    assert "60.0 ms" not in printed([nothing, *seeds], None)
    assert "45.0 ms ±21.2 ms" in printed([nothing, *seeds], None)


def test_headline_says_what_is_real_and_what_is_modelled(
    runs: list[report.Result], tmp_path: Path
) -> None:
    modelled = "Modelled: clock – topology halos-4x4, profile pythia-70m-h100."
    assert (
        report.headline(runs)
        == f"Real: gradients – stdlib, GPT 2x64 (140,000 parameters). {modelled} 1 to 2 seeds."
    )
    timing = write_run(tmp_path / "timing", "timing", [None, None], real="")
    assert report.headline([timing]) == f"Real: nothing was trained (task none). {modelled} 1 seed."
    live = write_run(
        tmp_path / "live", "live", [3.0, 2.0], real="gradients and clock: 2 machines", modelled=""
    )
    assert (
        report.headline([live])
        == "Real: gradients and clock – 2 machines. Modelled: nothing. 1 seed."
    )


def test_runs_of_different_worlds_are_not_compared_in_silence(
    runs: list[report.Result], tmp_path: Path
) -> None:
    differ = "These runs differ in what is real or what is modelled"
    assert differ not in words.notes(runs, 2.5)
    other = write_run(tmp_path / "other", "other", [3.0, 2.0], modelled="clock: topology b")
    assert differ in words.notes([*runs, other], 2.5)


@pytest.mark.parametrize(
    ("losses", "outer_steps", "absorbed_steps", "said"),
    [
        ([3.0, 2.0, 1.9, 1.8, 1.7], 4, 400, None),
        (
            [3.0, 2.0, 1.9, 1.8, 1.7],
            3,
            400,
            "one has 3 outer steps and 4 evaluations after the start: too few to judge it.",
        ),
        (
            [3.0, 2.0],
            9,
            400,
            "one has 9 outer steps and 1 evaluation after the start: too few to judge it.",
        ),
        # A method without outer steps, as synchronous SGD; and one that got to none.
        ([3.0, 2.0, 1.9, 1.8, 1.7], None, 400, None),
        ([3.0, 2.0], None, 400, "one has 1 evaluation after the start: too few to judge it."),
        (
            [3.0, 3.0, 3.0, 3.0, 3.0],
            None,
            0,
            "one has 0 outer steps and 4 evaluations after the start: too few to judge it.",
        ),
        ([None, None], 1, 400, None),  # nothing is trained
    ],
)
def test_a_method_that_hardly_took_a_step_is_named(
    losses: list[float | None],
    outer_steps: int | None,
    absorbed_steps: int,
    said: str | None,
    tmp_path: Path,
) -> None:
    counted = {"outer_steps": outer_steps, "absorbed_steps": absorbed_steps}
    run = write_run(tmp_path / "one", "one", losses, **counted)
    notes = words.notes([run], 2.0 if losses[0] else None)
    assert ("too few" in notes) == (said is not None)
    assert said is None or said in notes


def test_changes_name_the_published_setting(tmp_path: Path) -> None:
    changed = {"outer_momentum": [0.5, 0.9], "dynamic_steps": [True, False]}
    made = [
        write_run(tmp_path / f"{seed}", "diloco", [3.0, 2.0], seed=seed, changed=changed)
        for seed in range(2)
    ]
    made.append(write_run(tmp_path / "halos", "halos", [3.0, 2.0]))
    assert report.changes(made) == [
        "diloco: outer_momentum 0.5 (published: 0.9) · dynamic_steps True (published: False)"
    ]


# The page


class Page(HTMLParser):
    """Collects the tags, what they point to, and the text; fails on a tag that is not closed in
    order.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "action")
        ]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def test_page_stands_alone_and_says_what_it_must(runs: list[report.Result], tmp_path: Path) -> None:
    tuned = write_run(
        tmp_path / "t",
        "tuned",
        [3.0, 2.0],
        changed={"outer_momentum": [0.5, 0.9]},
        spread=0.01,
        entropy_rate=1.5,
    )
    out = tmp_path / "out"
    path = report.write([*runs, tuned], out, target=2.1)
    assert path == out / "report.html"
    names = [
        "loss_vs_time.png",
        "loss_vs_tokens.png",
        "replica_spread.png",
        "report.html",
        "timeline.png",
    ]
    assert sorted(path.name for path in out.iterdir()) == names
    for picture in out.glob("*.png"):
        height, width, _ = imread(picture).shape
        assert width == 1600
        assert height > 300
    assert "http" not in path.read_text()
    page = Page(path)
    assert {"script", "link", "iframe"}.isdisjoint(page.tags)
    assert len(page.targets) == 4
    assert all(target.startswith("data:image/png;base64,") for target in page.targets)
    text = " ".join(page.words)
    finding = "tuned reaches the target loss first, after 9.0 s; middle takes 11.1× as long."
    assert (
        text.index("Real: gradients – stdlib")
        < text.index(finding)
        < text.index("method time to loss 2.100")
    )
    assert "outer_momentum 0.5 (published: 0.9) inner_steps 8" in text
    assert "2.100, as asked for;" in text
    assert "times slower than the fastest" in text
    assert "mean ± one standard deviation over seeds, evaluation by evaluation" in text
    assert "tuned 0 steps 400 10.0 1.5 2 x86_64, 2 cores archipel 0.1.0, torch 2.13.0 t" in text


def test_strings_from_a_run_stay_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> & $x^2 [bold]"
    run = write_run(
        tmp_path / "run",
        evil,
        [3.0, 2.0],
        machine=evil,
        settings={evil: evil},
        changed={"a": ["<b>", "<i>"]},
        real=evil,
    )
    path = report.write([run], tmp_path / "out")
    assert "script" not in Page(path).tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x^2 [bold]" in path.read_text()
    assert evil in printed([run], 2.0, width=200)


def test_a_report_is_replaced_and_repeats_to_the_byte(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "run", [None, None])
    first = report.write([run], tmp_path / "out").read_bytes()
    assert report.write([run], tmp_path / "out").read_bytes() == first


def test_a_run_without_trace_is_named(tmp_path: Path) -> None:
    made = [write_run(tmp_path / label, label, [None, None]) for label in ("traced", "bare")]
    (tmp_path / "bare" / "trace.json").unlink()
    assert "No trace: bare." in report.write(made, tmp_path / "out").read_text()


def test_a_run_of_one_evaluation_can_be_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "run", [3.0], time_s=1.0)
    assert report.write([run], tmp_path / "out").exists()


@pytest.mark.parametrize("losses", [[3.0, None, None, 2.0], [None, None, 2.0], [3.0, None]])
def test_a_run_whose_loss_is_known_at_some_evaluations_only_is_shown(
    losses: list[float | None], tmp_path: Path
) -> None:
    """Live NoLoCo makes the mean of its replicas once, at the end."""
    run = write_run(tmp_path / "run", "run", losses, every_s=20.0, spread=0.1)
    whole = write_run(tmp_path / "whole", "whole", [3.0, 2.5, 2.0])
    page = report.write([run, whole], tmp_path / "out", 2.5)
    assert "whole reaches the target loss" in page.read_text()
    expected = {4: 30.0, 3: 40.0, 2: None}[len(losses)]
    assert report.time_to_target_s(run, 2.5) == expected


# Reading


def test_run_directories_are_found_by_name(runs: list[report.Result], tmp_path: Path) -> None:
    assert [path.name for path in report.find(tmp_path)] == ["fast-0", "fast-1", "middle", "slow"]
    assert report.find(tmp_path / "slow") == [tmp_path / "slow"]
    assert report.find(tmp_path / "nowhere") == []


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError) as error:
        report.load(tmp_path / "nowhere")
    path = tmp_path / "nowhere" / "summary.json"
    assert (
        str(error.value)
        == f"{path} is missing: the run has not finished, or this is not a run directory"
    )
    write_run(tmp_path / "run", "run", [3.0])
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(ReportError, match=r"run/metrics\.jsonl is missing: "):
        report.load(tmp_path / "run")


def test_corrupt_files_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    run = write_run(directory, "run", [3.0, 2.0])
    (directory / "trace.json").write_text('{"traceEvents": [')
    with pytest.raises(
        ReportError, match=r"run/trace\.json is not JSON: Expecting value: line 1 column 18"
    ):
        report.write([run], tmp_path / "out")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "ev')
    with pytest.raises(
        ReportError,
        match=r"run/metrics\.jsonl, line 4, is not JSON: Unterminated string starting at: line 1 "
        r"column 10",
    ):
        report.load(directory)
    (directory / "summary.json").write_text('{"label": "run"}')
    with pytest.raises(ReportError, match=r"run/summary\.json lacks seed, time_s, "):
        report.load(directory)
    (directory / "summary.json").write_text("[]")
    with pytest.raises(ReportError, match=r"run/summary\.json is not a JSON object$"):
        report.load(directory)
    (directory / "summary.json").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ReportError, match=r"run/summary\.json is not JSON: "):
        report.load(directory)


def test_names_that_the_font_cannot_draw_are_drawn_without_a_warning(tmp_path: Path) -> None:
    """Warnings are errors here."""
    run = write_run(tmp_path / "run", "方法", [3.0, 2.0], loss_name="損失", spread=0.1)
    trace = (tmp_path / "run" / "trace.json").read_text()
    (tmp_path / "run" / "trace.json").write_text(
        trace.replace("r0/", "zürich/").replace("r1/", "北京/")
    )
    page = report.write([run], tmp_path / "out")
    assert "方法" in page.read_text()
    assert plots.drawable("zürich-Ω_北京.1") == "zürich-Ω_??.1"


def test_faults_that_would_have_come_after_the_end_are_said_not_to_have_happened(
    tmp_path: Path,
) -> None:
    def run(label: str, seed: int, happened: int, planned: int) -> report.Result:
        counts = {"faults_happened": happened, "faults_planned": planned}
        return write_run(tmp_path / f"{label}{seed}", label, [3.0, 2.0], seed=seed, **counts)

    runs = [run("halos", 0, 1, 3), run("halos", 1, 2, 3), run("noloco", 0, 3, 3)]
    said = "halos: 3 of 6 planned faults happened; the run ended before the others"
    assert report.incidents(runs) == [said]
    assert said in words.notes(runs, 2.0)


def test_a_target_above_the_first_loss_is_reached_by_training_and_not_by_starting(
    tmp_path: Path,
) -> None:
    """It is met at the first evaluation after the start."""
    fast = write_run(tmp_path / "fast", "fast", [3.0, 1.0, 0.5])
    slow = write_run(tmp_path / "slow", "slow", [3.0, 2.0, 1.0], every_s=40.0)
    assert [row["speed_up"] for row in report.rows([fast, slow], 9.0)] == [4.0, 1.0]
    report.write([fast, slow], tmp_path / "out", 3.0)  # a target between the starts' losses


@pytest.mark.parametrize("losses", [[3.0, 1.0, 9.0], [3.0, 1.0, float("nan")], [3.0, 1.0, 3.01]])
def test_a_run_that_diverged_gets_no_speed_up_and_sets_no_target(
    losses: list[float], tmp_path: Path
) -> None:
    """It meets the target before the others do, and then its loss rises."""
    worse = write_run(tmp_path / "worse", "worse", losses)
    better = write_run(tmp_path / "better", "better", [3.0, 2.0, 1.0], every_s=40.0)
    third = write_run(tmp_path / "third", "third", [3.0, 2.5, 1.5], every_s=80.0)
    runs = [worse, better, third]
    target = report.target_loss(runs)
    assert target == 1.5
    rows = report.rows(runs, target)
    assert [row["label"] for row in rows] == ["better", "third", "worse"]
    assert [row["diverged"] for row in rows] == [0, 0, 1]
    assert [row["speed_up"] for row in rows] == pytest.approx([160 / 60, 1.0, None])
    assert [row["times_slower"] for row in rows] == pytest.approx([1.0, 160 / 60, None])
    page = report.write(runs, tmp_path / "out").read_text()
    assert "better reaches the target loss first, after 60.0 s; third takes 2.67×" in page
    assert "worse has diverged: it ends with a loss above the one that it began with, or" in page


def test_one_seed_that_diverges_takes_its_method_out_of_the_comparison(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{n}", "halos", losses, seed=n)
        for n, losses in enumerate([[3.0, 1.0, 0.5], [3.0, 1.0, 4.0]])
    ]
    assert report.target_loss(runs) == 0.5
    [row] = report.rows(runs, 2.0)
    assert (row["reached"], row["diverged"], row["speed_up"]) == (2, 1, None)
    assert "halos has diverged with 1 of 2 seeds: it ends" in words.notes(runs, 2.0)
    said = "No method reaches the target loss with all of its seeds and does not diverge."
    assert words.finding([row], 2.0) == said


def test_where_all_runs_diverged_the_worst_one_still_sets_the_target(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{end}", f"to-{end}", [3.0, 1.0, float(end)]) for end in (4, 5)]
    assert report.target_loss(runs) == 5.0
    assert [row["speed_up"] for row in report.rows(runs, 5.0)] == [None, None]


def test_a_run_that_is_stopped_right_after_its_start_has_not_diverged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "run", [3.0], stopped="interrupted")
    assert [row["diverged"] for row in report.rows([run], 3.0)] == [0]


# Runs that are not seeds of one experiment


def in_folder(folder: Path, label: str, seed: int, recipe: str) -> report.Result:
    run = write_run(folder / f"{label}-seed{seed}", label, [3.0, 2.0], seed=seed)
    (run.directory / "recipe.yaml").write_text(
        f"label: {label}\n{recipe}run:\n  steps: 100\n  seed: {seed}\n"
    )
    return run


def labels(runs: list[report.Result]) -> list[str]:
    return [run.summary["label"] for run in report.distinguish(runs)]


def test_seeds_of_one_experiment_keep_their_label_and_a_run_given_twice_counts_once(
    tmp_path: Path,
) -> None:
    runs = [
        in_folder(tmp_path / "a", "halos", seed, "method: {accumulate: 8}\n") for seed in (0, 1)
    ]
    assert labels([*runs, runs[0]]) == ["halos", "halos"]


def test_runs_of_other_settings_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    one = in_folder(tmp_path / "a", "halos", 0, "method: {accumulate: 8}\n")
    other = in_folder(tmp_path / "b", "halos", 1, "method: {accumulate: 32}\n")
    assert labels([one, other]) == ["halos (a)", "halos (b)"]


def test_one_seed_run_twice_is_told_apart_too(tmp_path: Path) -> None:
    assert labels([in_folder(tmp_path / name, "halos", 0, "") for name in "ab"]) == [
        "halos (a)",
        "halos (b)",
    ]


def test_runs_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    runs = [
        in_folder(tmp_path / name / "same", "halos", 0, f"method: {{accumulate: {i}}}\n")
        for i, name in enumerate("ab", 1)
    ]
    text = (
        r"^the runs called 'halos \(same\)' are not seeds of one experiment; put them in "
        r"folders of different names$"
    )
    with pytest.raises(ReportError, match=text):
        report.distinguish(runs)


def test_clocks_are_not_compared_and_interrupted_runs_set_no_target(tmp_path: Path) -> None:
    """A live run's seconds are measured, a simulated one's modelled: each is compared within its
    kind only.
    """
    slow = write_run(tmp_path / "sim" / "slow", "slow", [3.0, 2.0], clock="modelled")
    fast = write_run(tmp_path / "sim" / "fast", "fast", [3.0, 1.9], clock="modelled", every_s=5.0)
    live = write_run(tmp_path / "live" / "slow", "slow", [3.0, 2.0], clock="measured", modelled="")
    cut = write_run(
        tmp_path / "cut" / "slow",
        "slow",
        [3.0, 2.9],
        clock="measured",
        modelled="",
        stopped="interrupted",
    )
    runs = report.distinguish([slow, fast, live, cut])
    assert [run.summary["label"] for run in runs] == [
        "slow",
        "fast",
        "slow (live)",
        "slow (live, interrupted)",
    ]
    target = report.target_loss(runs)
    assert target == 2.0
    speed_up = {row["label"]: row["speed_up"] for row in report.rows(runs, target)}
    assert speed_up["slow (live)"] == 1.0
    assert speed_up["slow (live, interrupted)"] is None
    assert speed_up["fast"] > speed_up["slow"] == 1.0
    assert (
        report.as_json(runs, target)["modelled"]
        == "clock: topology halos-4x4, profile pythia-70m-h100"
    )
