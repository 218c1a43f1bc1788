"""Run directories: one process each, also when several commands begin at the same instant."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from archipel.disk import rundir
from archipel.errors import UserError

SHORT = "method: diloco\ntask: none\nrun: {steps: 2000}\n"
ENDLESS = "method: async_local_sgd\ntask: none\nrun: {steps: 1000000000}\n"
LIVE = """
method: async_local_sgd
task: none
topology: {regions: {a: [1.0, 1.0]}}
run: {steps: 20000}
live: {pace: profile}  # takes 40 minutes
"""
NAME = "async_local_sgd-seed0"


def started(*arguments: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "archipel.cli", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def going_on(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A command whose run has begun and ends with this context, by Ctrl-C, and not before."""
    process = started(*arguments)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert line.startswith(f"{NAME}: "), line + process.communicate()[1]
        yield process
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder with three recipes."""
    (tmp_path / "live.yaml").write_text(LIVE)
    (tmp_path / "short.yaml").write_text(SHORT)
    (tmp_path / "endless.yaml").write_text(ENDLESS)
    return tmp_path


def in_use(run: Path) -> tuple[int, str, str]:
    """Exit code, and what is printed on stdout and stderr."""
    return 2, "", f"archipel: {run} is in use: its run is going on in another process\n"


def everything(folder: Path) -> dict[Path, bytes]:
    """All files but `metrics.jsonl`, which a run that goes on writes itself."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    return {path: path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "compare"])
def test_of_three_commands_at_one_instant_one_runs_and_the_others_are_refused(
    command: str, recipes: Path
) -> None:
    out = recipes / "c"
    arguments: tuple[object, ...] = ("run", recipes / "endless.yaml")
    if command == "compare":
        arguments = ("compare", "--methods", "async_local_sgd", "--task", "none")
        arguments += ("--steps", 10**9)
    processes = [started(*arguments, "--out", out) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        ends = {threads.submit(process.communicate): process for process in processes}
        ended = as_completed(ends)
        for end in (next(ended), next(ended)):
            assert (ends[end].returncode, *end.result()) == in_use(out / NAME)
        [winner] = [process for process in processes if process.poll() is None]
        assert (out / NAME / "recipe.yaml").is_file()
        winner.send_signal(signal.SIGINT)
        last = next(ended)
    assert (winner.returncode, last.result()[0]) == (130, "")
    assert json.loads((out / NAME / "summary.json").read_text())["stopped"] == "interrupted"
    assert [path.name for path in out.iterdir()] == [NAME]  # no lock is left


@pytest.mark.slow
def test_nobody_touches_a_run_that_is_going_on(archipel: Any, recipes: Path) -> None:
    """By whatever command, and through another name of the folder."""
    out, recipe = recipes / "c", recipes / "endless.yaml"
    (recipes / "link").symlink_to(out)
    with going_on("run", recipe, "--out", out):
        before = everything(out)
        assert archipel("run", recipe, "--out", out) == in_use(out / NAME)
        comparison = ("--methods", "diloco,async_local_sgd", "--task", "none")
        assert archipel("compare", *comparison, "--out", out) == in_use(out / NAME)
        assert archipel("launch", recipe, "--out", out) == in_use(out / NAME)
        assert archipel("resume", out) == in_use(out / NAME)
        assert archipel("resume", out / NAME) == in_use(out / NAME)
        linked = recipes / "link" / NAME
        assert archipel("run", recipe, "--out", recipes / "link") == in_use(linked)
        assert everything(out) == before
        assert archipel("run", recipes / "short.yaml", "--out", out).code == 0  # another run


@pytest.mark.slow
@pytest.mark.live
def test_a_launched_run_is_left_alone_too(archipel: Any, recipes: Path) -> None:
    out, recipe = recipes / "c", recipes / "live.yaml"
    with going_on("launch", recipe, "--out", out):
        before = everything(out)
        assert archipel("launch", recipe, "--out", out) == in_use(out / NAME)
        assert archipel("run", recipe, "--out", out) == in_use(out / NAME)
        assert everything(out).items() >= before.items()
    assert json.loads((out / NAME / "summary.json").read_text())["stopped"] == "interrupted"


@pytest.mark.slow
def test_the_lock_of_a_process_that_was_killed_is_taken_over(archipel: Any, recipes: Path) -> None:
    out = recipes / "c"
    process = started("run", recipes / "endless.yaml", "--out", out)
    assert process.stderr is not None
    process.stderr.readline()
    process.kill()
    process.communicate()
    assert (out / f".{NAME}.lock").is_file()
    shutil.rmtree(out / NAME)
    settings = ("--methods", "async_local_sgd", "--task", "none", "--steps", 500)
    assert archipel("compare", *settings, "--out", out).code == 0
    assert not (out / f".{NAME}.lock").exists()


def test_a_run_directory_can_be_claimed_before_it_is_there_and_only_once(tmp_path: Path) -> None:
    out, run = tmp_path / "new" / "c", tmp_path / "new" / "c" / "a"
    with rundir.claimed(out, ["a", "b"]):
        with (
            pytest.raises(UserError, match=rf"^{run} is in use: its run is going on in another"),
            rundir.claimed(out, ["a"]),
        ):
            raise AssertionError("two own it")
        with rundir.claimed(out, ["c"]):
            assert [path.name for path in sorted(out.iterdir())] == [f".{n}.lock" for n in "abc"]
    assert not out.exists()
    with rundir.claimed(out, ["a"]):
        pass


def test_a_lock_file_that_its_owner_removed_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner goes between our opening the file and our locking it."""
    flock, calls = rundir.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / ".a.lock").unlink()
        flock(descriptor, how)

    monkeypatch.setattr(rundir.fcntl, "flock", late)
    with rundir.alone_in(tmp_path / "a"):
        assert len(calls) == 2
        with pytest.raises(UserError, match="is in use"), rundir.alone_in(tmp_path / "a"):
            raise AssertionError("two own it")


def test_folders_named_by_date_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rundir.time, "strftime", lambda _: "20261202-101500")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run-20261202-101500-2").write_text("mine")
    assert [str(rundir.dated(command)) for command in ("run", "run", "compare")] == [
        "runs/run-20261202-101500",
        "runs/run-20261202-101500-3",
        "runs/compare-20261202-101500",
    ]


@pytest.mark.slow
def test_commands_that_begin_together_each_have_a_folder(recipes: Path) -> None:
    processes = [started("run", recipes / "short.yaml", cwd=recipes) for _ in range(3)]
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert len(list((recipes / "runs").glob("run-*/diloco-seed0/summary.json"))) == 3


def test_a_run_that_has_been_saved_is_one_whatever_a_tracker_has_put_there(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("method: halos\n")
    (tmp_path / "mine.csv").write_text("1,2\n")
    assert not rundir.is_run_directory(tmp_path)
    (tmp_path / rundir.CHECKPOINTS).mkdir()
    assert rundir.is_run_directory(tmp_path)
