"""Figures while a run goes on: `metrics.jsonl` grows, and trackers are told the same as the
finished run's file says, on both clocks and over an interruption.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_recipes import TASK, TWO

import archipel as package
from archipel.actor import NodeId
from archipel.errors import TrainingError, UserError
from archipel.recipe import load_recipe
from archipel.run.journal import Journal
from archipel.run.metrics import Evaluation, Recorder, Training

METHOD = {"name": "diloco", "inner_steps": 4}
OWN = """
    heard = []

    class Own:
        def begin(self, run):
            heard.append(("begin", run))

        def log(self, figures, step):
            heard.append(("log", dict(figures), step))

        def end(self, summary):
            heard.append(("end", summary))

    def make():
        return Own()
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[str]:
    """A tracker of the user's own that keeps what it is told."""
    path = tmp_path / "own_tracker.py"
    path.write_text(textwrap.dedent(OWN))
    yield f"{path}:make"
    sys.modules.pop("archipel_user_own_tracker", None)


def heard() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = sys.modules["archipel_user_own_tracker"].heard
    return found


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "method": METHOD,
        **TWO,
        "task": TASK,
        "profile": {"model_bytes": 10**5, "step_time_s": 0.1},
        "run": {"steps": 80, "evaluations": 4},
        **changes,
    }


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# What a tracker is told


def check_told(told: list[tuple[Any, ...]], directory: Path, clock: str) -> None:
    """It is what the finished run's own files say."""
    evaluations = [line for line in lines(directory) if line["kind"] == "eval"]
    (_, run), *logs, (_, summary) = told
    assert (run.name, run.directory, run.clock) == (directory.name, directory, clock)
    assert run.recipe["method"]["name"] == "diloco"
    assert summary == json.loads((directory / "summary.json").read_text())
    assert [step for _, _, step in logs] == [line["inner_steps"] for line in evaluations]
    for (_, figures, _), line in zip(logs, evaluations, strict=True):
        for name, value in figures.items():
            if name not in ("train_loss", "learning_rate"):
                assert value == line[name]
        assert {"loss", "time_s", "tokens", "sent_bytes", "learning_rate"} <= figures.keys()


def test_a_tracker_of_ones_own_is_told_what_the_files_say(own: str, tmp_path: Path) -> None:
    result = package.simulate(recipe(track=own), processes=1, out=tmp_path / "out")
    told = heard()
    check_told(told, result.directory, "modelled")
    trainings = [line for line in lines(result.directory) if line["kind"] == "train"]
    times_s = [figures["time_s"] for _, figures, _ in told[1:-1]]
    for before_s, (_, figures, _) in zip([-1.0, *times_s], told[1:-1], strict=False):
        losses = [t["loss"] for t in trainings if before_s < t["time_s"] <= figures["time_s"]]
        expected = sum(losses) / len(losses) if losses else None
        assert figures.get("train_loss") == pytest.approx(expected)


def test_the_learning_rate_is_that_of_the_schedule(own: str, tmp_path: Path) -> None:
    """Linear warm-up to the peak, then half a cosine (`train/task.py`), each by its formula."""
    task = {**TASK, "lr": 0.02, "warmup": 0.5}
    package.simulate(recipe(track=own, task=task), processes=1, out=tmp_path / "out")
    rates = {step: figures["learning_rate"] for _, figures, step in heard()[1:-1]}
    schedule = package.Schedule(warmup=0.5)
    assert rates[80] == pytest.approx(0.02 * schedule.factor(40, 40))
    assert rates[40] == pytest.approx(0.02 * schedule.factor(20, 40))
    assert rates[40] > rates[80]
    [directory] = (tmp_path / "out").glob("diloco-*")
    for line in lines(directory):
        if line["kind"] == "train":
            factor = schedule.factor(line["progress"] / 2, 40)
            assert line["learning_rate"] == pytest.approx(0.02 * factor)


def test_the_run_is_the_same_with_a_tracker(own: str, tmp_path: Path) -> None:
    one = package.simulate(recipe(), processes=1, out=tmp_path / "one")
    other = package.simulate(recipe(track=own), processes=1, out=tmp_path / "other")
    for name in ("metrics.jsonl", "weights.safetensors", "trace.json"):
        assert (one.directory / name).read_bytes() == (other.directory / name).read_bytes()


def test_nothing_is_trained_and_bytes_are_told(own: str, tmp_path: Path) -> None:
    package.simulate(recipe(track=own, task="none"), out=tmp_path / "out")
    figures = heard()[-2][1]
    assert figures["sent_bytes"] > 0
    assert not figures.keys() & {"loss", "learning_rate", "tokens", "train_loss"}


@pytest.mark.live
@pytest.mark.slow
def test_a_live_run_tells_the_same(own: str, tmp_path: Path) -> None:
    result = package.launch(recipe(track=own), out=tmp_path / "out")
    check_told(heard(), result.directory, "measured")


@pytest.mark.live
@pytest.mark.slow
def test_a_live_runs_mean_of_replicas_is_told_at_the_end(own: str, tmp_path: Path) -> None:
    method = {"name": "noloco", "inner_steps": 4}
    result = package.launch(recipe(track=own, method=method), out=tmp_path / "out")
    _, *logs, _ = heard()
    assert logs[-1][1]["loss"] == result.summary["final_loss"]
    assert logs[1][1].keys() & {"loss", "replica_loss"} == {"replica_loss"}  # until then


# While it goes on


def test_metrics_are_on_disk_while_a_run_goes_on(tmp_path: Path) -> None:
    """And each line of the finished file has been there."""
    seen: list[set[str]] = []
    path = tmp_path / "out" / "diloco-seed0" / "metrics.jsonl"

    def look(*_: object) -> None:
        if path.is_file():
            seen.append(set(path.read_text().splitlines()))

    package.simulate(recipe(), processes=1, out=tmp_path / "out", progress=look)
    final = set(path.read_text().splitlines())
    assert all(early <= final for early in seen)
    sizes = [len(early) for early in seen]
    assert sizes == sorted(sizes)
    assert sizes[-1] > len(final) / 2


def test_a_journal_waits_for_losses_and_keeps_their_order(tmp_path: Path) -> None:
    told: list[tuple[dict[str, float], int]] = []

    class Listener:
        def log(self, figures: Any, step: int) -> None:
            told.append((dict(figures), step))

        def end(self, summary: Any) -> None:
            told.append(({}, -1))

    def evaluation(time_s: float, steps: int, loss: float | None) -> Evaluation:
        return Evaluation(time_s, steps, None, steps, 0, 0, 0, loss)

    recorder, node = Recorder(), NodeId("east", "w0")
    journal = Journal(tmp_path / "metrics.jsonl", True, lambda steps: steps / 10, Listener())
    late, early = evaluation(1.0, 10, None), evaluation(2.0, 20, 5.0)
    recorder.evaluations += [late, early]
    recorder.trainings += [Training(t, node, 1, loss, 0) for t, loss in ((0.5, 8.0), (1.5, 6.0))]
    journal.look(recorder)
    assert told == []
    late.loss = 7.0
    journal.look(recorder)
    journal.look(recorder)
    assert [(step, f["loss"], f["train_loss"], f["learning_rate"]) for f, step in told] == [
        (10, 7.0, 8.0, 1.0),
        (20, 5.0, 6.0, 2.0),
    ]
    journal.end(recorder, {})
    assert told[2:] == [({}, -1)]


def test_a_full_disk_ends_no_run_before_its_end(tmp_path: Path) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    class Nobody:
        def log(self, figures: Any, step: int) -> None:
            pass

        end = log

    recorder = Recorder(trainings=[Training(0.5, NodeId("east", "w0"), 1, 8.0, 0)])
    journal = Journal(tmp_path / "metrics.jsonl", True, None, Nobody())  # type: ignore[arg-type]
    assert journal.file is not None
    journal.file.close()
    journal.file = Full()
    with pytest.warns(UserWarning, match="metrics.jsonl: No space left on device; the run goes on"):
        journal.look(recorder)
    recorder.trainings *= 2
    journal.look(recorder)  # nothing more is said


def test_a_run_that_was_stopped_goes_on_and_nothing_is_told_twice(
    own: str, tmp_path: Path, archipel: Any
) -> None:
    fields = recipe(track=own, run={"steps": 400, "evaluations": 10})

    def stop(_: str, steps: int, *__: object) -> None:
        if 120 < steps < 200:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(package.Interrupted):
        package.simulate(fields, processes=1, out=tmp_path / "out", progress=stop)
    first = list(heard())
    assert first[-1][0] == "end"
    assert first[-1][1]["stopped"] == "interrupted"
    heard().clear()
    package.resume(tmp_path / "out", processes=1)
    second = heard()
    assert second[0][1].resumed
    whole = package.simulate(fields, processes=1, out=tmp_path / "whole").directory
    steps = [line["inner_steps"] for line in lines(whole) if line["kind"] == "eval"]
    logged = [told[2] for told in [*first, *second] if told[0] == "log"]
    assert logged == steps


@pytest.mark.parametrize("task", [TASK, "none"])
def test_a_tracker_that_cannot_begin_costs_a_stopped_run_nothing(
    task: Any, own: str, tmp_path: Path
) -> None:
    fields = recipe(task=task, track=own, run={"steps": 400, "evaluations": 10})

    def stop(_: str, steps: int, *__: object) -> None:
        if 120 < steps < 200:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(package.Interrupted):
        package.simulate(fields, processes=1, out=tmp_path / "out", progress=stop)
    before = [told[2] for told in heard() if told[0] == "log"]
    path = Path(own.removesuffix(":make"))
    text = path.read_text()
    path.write_text(text.replace('heard.append(("begin"', 'raise OSError("no server"); (("begin"'))
    with pytest.raises(UserError, match=r"cannot begin: .*OSError: no server"):
        package.resume(tmp_path / "out", processes=1)
    path.write_text(text)
    package.resume(tmp_path / "out", processes=1)
    after = [told[2] for told in heard() if told[0] == "log"]
    assert sorted(before + after) == sorted(set(before + after))
    assert after[-1] == 400


def test_of_two_trackers_the_one_that_has_begun_is_ended_if_the_other_cannot(
    own: str, tmp_path: Path
) -> None:
    other = tmp_path / "other_tracker.py"
    other.write_text(
        textwrap.dedent(OWN).replace('heard.append(("begin"', 'raise OSError("closed"); (("begin"')
    )
    with pytest.raises(UserError, match="cannot begin"):
        package.simulate(recipe(track=[own, f"{other}:make"]), out=tmp_path / "out")
    assert heard()[-1] == ("end", None)
    assert not (tmp_path / "out").exists()


# TensorBoard and Weights & Biases


def test_tensorboard_has_the_figures(tmp_path: Path) -> None:
    place = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = importlib.import_module(place)
    out = tmp_path / "out"
    result = package.simulate(recipe(track="tensorboard"), processes=1, out=out)
    events = accumulator.EventAccumulator(str(result.directory / "tensorboard")).Reload()
    evaluations = [line for line in lines(result.directory) if line["kind"] == "eval"]
    for name in ("loss", "time_s", "slow_link_bytes"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(e["inner_steps"], pytest.approx(e[name])) for e in evaluations]
    assert package.simulate(recipe(), processes=1, out=out)  # its folder is a run directory's own


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of LevelDB's log format: blocks of 32 KiB; in front of each piece its checksum,
    length, and whether it is the whole record (1), its first piece (2), a middle one, or the last.
    """
    data, at, pieces = path.read_bytes(), 7, b""  # behind the file's own head
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


def test_wandb_has_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: read from the file that `wandb sync` would send."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track = {"name": "wandb", "project": "isles"}
    result = package.simulate(recipe(track=track), processes=1, out=tmp_path / "out")
    [path] = (result.directory / "wandb").glob("offline-run-*/*.wandb")
    found, projects = [], set()
    for data in wandb_records(path):
        record = records.Record()
        record.ParseFromString(data)
        if record.run.project:
            projects.add(record.run.project)
        if record.history.item:
            items = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
            found.append((int(items["_step"]), float(items["loss"])))
    evaluations = [line for line in lines(result.directory) if line["kind"] == "eval"]
    assert found == [(e["inner_steps"], pytest.approx(e["loss"])) for e in evaluations]
    assert projects == {"isles"}


# Mistakes


@pytest.mark.parametrize(
    ("track", "said"),
    [
        (
            "tensorbord",
            "track: name = 'tensorbord': allowed are tensorboard, wandb and file.py:function "
            "(did you mean 'tensorboard'?)",
        ),
        (
            {"name": "tensorboard", "project": "x"},
            "track: project: only wandb has one, and this is tensorboard",
        ),
        ({"name": "wandb", "mode": "off"}, "track.mode"),
        ({"name": "wandb", "projekt": "x"}, "(did you mean 'project'?)"),
        ([3], "track = 3"),
        (["wandb", "wandb"], "track: wandb is named twice"),
    ],
)
def test_a_mistake_is_named(track: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(recipe(track=track))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def other(): ...", "has no function 'make'"),
        ("def make(): return object()", "what make() gives has no function 'begin'"),
        ("def make(): raise ValueError('closed')", "make() failed at"),
    ],
)
def test_a_tracker_that_is_none_is_refused(body: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(UserError) as error:
        package.simulate(recipe(track=f"{tmp_path}/mine.py:make"), out=tmp_path / "out")
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_fails_is_told_nothing_more(own: str, tmp_path: Path) -> None:
    path = Path(own.removesuffix(":make"))
    path.write_text(
        path.read_text().replace('heard.append(("log"', 'raise OSError("full"); (("log"')
    )
    with pytest.warns(UserWarning, match="failed, and the run goes on without it: .*OSError: full"):
        result = package.simulate(recipe(track=own), processes=1, out=tmp_path / "out")
    assert result.summary["stopped"] == "steps"
    assert [told[0] for told in heard()] == ["begin", "end"]


def test_a_run_that_fails_ends_without_a_summary(own: str, tmp_path: Path) -> None:
    task = tmp_path / "failing.py"
    task.write_text(
        textwrap.dedent(
            """
            import torch
            from archipel import Task

            def batches(shard, index):
                if index > 12 and shard.split == "train":
                    raise RuntimeError("no more data")
                return torch.randn(4, 8)

            def make():
                return Task(
                    model=lambda: torch.nn.Linear(8, 1),
                    loss=lambda model, batch: model(batch).square().mean(),
                    batches=batches,
                    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                )
            """
        )
    )
    fields = recipe(track=own, task=f"{task}:make")
    with pytest.raises((UserError, TrainingError)):
        package.simulate(fields, processes=1, out=tmp_path / "out")
    assert heard()[-1] == ("end", None)
