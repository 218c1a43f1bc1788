"""What a run leaves behind, and its folder.

What belongs here: the files of a run directory; how a directory is made, kept from other processes,
and found; and how one tells whether its run has ended. What does not: running anything, and what a
checkpoint holds (`checkpoint.py`).

A run directory is whole or absent: each file is written under another name and then renamed, and
`summary.json` comes last. A run's own directory is replaced by the next run of its name, so its
lock is a file beside it, `.NAME.lock`. The operating system frees a lock when its process ends,
however that happens, and the next one takes over a file that was left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from archipel import outer
from archipel.actor import NodeId, Vector
from archipel.disk import checkpoint
from archipel.errors import UserError
from archipel.recipe import Recipe, load_recipe
from archipel.recipe.sections import TRACKERS
from archipel.run.metrics import LearningRate, Recorder
from archipel.train.task import Task
from archipel.vector import Layout
from archipel.yamlfile import parse, read_mapping

CHECKPOINTS = "checkpoint"
"""The folder of a run directory that holds its checkpoints, until the run has ended."""
LIVE = "live"
"""The folder, in that one, in which each node of a live run has one of its own."""
MODEL = "model"
"""The folder of a run directory that holds the model as its task exports it."""
LEFT = {
    "recipe.yaml",
    "metrics.jsonl",
    "trace.json",
    "weights.safetensors",
    MODEL,
    "summary.json",
    CHECKPOINTS,
    *TRACKERS,
}
"""What can be in a run directory."""
UNHEEDED = {"live", "track"}
"""Sections of a recipe on which nothing depends that a simulation does."""
INTERRUPTED = "interrupted"
"""What a summary says under `stopped` if Ctrl-C did it."""
DIVERGED = "diverged"
"""What it says there if a loss was not finite, of a run that leaves something all the same."""

# Folders, and who may use them


def name_of(recipe: Recipe) -> str:
    """The name of the recipe's run directory: its label and its seed."""
    return f"{recipe.label}-seed{recipe.run.seed}"


def dated_name(command: str) -> str:
    """`COMMAND-DATE-TIME`."""
    return f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"


def dated(command: str) -> Path:
    """A new, empty folder `runs/COMMAND-DATE-TIME` that no other process is given too."""
    name = dated_name(command)
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):  # of a command that started in this second
            folder.mkdir(parents=True)
            break
    return folder


@contextlib.contextmanager
def claimed(
    out: Path, names: Sequence[str], goes_on: Callable[[Path], bool] = lambda _: False
) -> Iterator[None]:
    """Make the folder `out` and keep the run directories `names` in it from all other processes
    meanwhile; earlier runs of those names may be replaced. At the end `out` goes if it is empty.

    Args:
        goes_on: tells of a run directory whose run has not ended whether the caller goes on with
            it.

    Raises:
        UserError: it cannot be made or written to; another process uses one of the names, or it is
            taken by something that is not a run directory, or by a run that has not ended and
            could.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    try:
        with alone_in(*(out / name for name in names)):
            for name in names:
                if not goes_on(out / name):
                    _check_free(out, out / name)
            yield
    finally:
        with contextlib.suppress(OSError):
            out.rmdir()  # unless something is in it


def _check_free(out: Path, taken: Path) -> None:
    if taken.exists() and not is_run_directory(taken):
        raise UserError(f"--out {out}: {taken} is there already and is not a run directory")
    if checkpoints_of(taken) and not is_finished(taken):
        raise UserError(
            f"--out {out}: {taken} is a run that has not ended; `archipel resume {taken}` goes on "
            "with it; to start anew, remove it or choose another --out"
        )


@contextlib.contextmanager
def alone_in(*directories: Path) -> Iterator[None]:
    """No other process uses these run directories meanwhile. They need not be there yet.

    Raises:
        UserError: another process does.
    """
    with contextlib.ExitStack() as held:
        for directory in directories:
            held.enter_context(_locked(directory))
        yield


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    place = directory.resolve()
    path = place.with_name(f".{place.name}.lock")
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # somebody has just removed the empty folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"{directory} is in use: its run is going on in another process"
            ) from None
        except OSError:  # a file system without locks
            break
        if _is_open_as(descriptor, path):
            break
        # Its last owner removed the file after we had opened it: ours locks nobody out.
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is free, so that it is our own
        os.close(descriptor)


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


# What is in a run directory


def is_run_directory(directory: Path) -> bool:
    """A run has left its summary in it, or has been saved in it, or has begun in it and nobody has
    put anything else there.
    """
    names = (
        {path.name.removeprefix(".") for path in directory.iterdir()}
        if directory.is_dir()
        else set()
    )
    begun = "recipe.yaml" in names and (names <= LEFT or CHECKPOINTS in names)
    return "summary.json" in names or begun


def is_live(directory: Path) -> bool:
    """The run in a run directory has been launched, not simulated, and its nodes saved their parts
    there.
    """
    return (directory / CHECKPOINTS / LIVE).is_dir()


def is_finished(directory: Path) -> bool:
    """A run directory's run has ended, and not by Ctrl-C; or it was a live one that nobody has
    saved.
    """
    try:
        summary = json.loads((directory / "summary.json").read_text())
        return bool(
            summary["stopped"] != INTERRUPTED
            or (summary.get("clock") == "measured" and not is_live(directory))
        )
    except FileNotFoundError:
        return False
    except (ValueError, LookupError, TypeError):
        return True  # by some other hand: not ours to go on with


def has_run(directory: Path, recipe: Recipe) -> bool:
    """A simulated run of this very recipe has ended in a run directory."""
    if is_finished(directory) and is_of(directory, recipe):
        with contextlib.suppress(ValueError, LookupError, TypeError):  # by some other hand
            return bool(json.loads((directory / "summary.json").read_text())["clock"] == "modelled")
    return False


def goes_on(directory: Path, recipe: Recipe) -> bool:
    """A simulated run of this very recipe has not ended in a run directory, and its checkpoints are
    there.
    """
    stopped = not is_finished(directory) and not is_live(directory)
    return stopped and bool(checkpoints_of(directory)) and is_of(directory, recipe)


def is_of(directory: Path, recipe: Recipe) -> bool:
    """A run directory's recipe is this one, but for what no simulation heeds. A setting that is
    younger than the run has its default there.
    """
    path = directory / "recipe.yaml"
    try:
        before, now = (parse(one.to_yaml()) for one in (load_recipe(path), recipe))
    except UserError:  # there is none, or what it names is gone
        return False
    return all(before.get(key) == now.get(key) for key in {*before, *now} - UNHEEDED)


def unfinished(directory: Path) -> list[Path]:
    """The run directories right in a folder whose runs have not ended, by name; or the folder
    itself if it is one.
    """
    found = (
        [directory]
        if (directory / "recipe.yaml").is_file()
        else sorted(p.parent for p in directory.glob("*/recipe.yaml"))
    )
    return [path for path in found if is_run_directory(path) and not is_finished(path)]


def check_resumable(directory: Path, recipe: Recipe) -> None:
    """Raise a `UserError` if `directory` has no checkpoint and its `recipe.yaml` is one that the
    user wrote, not a run's.
    """
    if not checkpoints_of(directory) and recipe_text(directory) != recipe.to_yaml():
        path = directory / "recipe.yaml"
        raise UserError(
            f"{path} is not as a run leaves it, so there is nothing to resume; `archipel run "
            f"{path}` starts a run"
        )


def recipe_text(directory: Path) -> str:
    """The recipe of a run directory, as it was written."""
    return (directory / "recipe.yaml").read_text()


def target_loss(directory: Path) -> float | None:
    """The loss at which the run of a run directory was to end, if its recipe is there and has
    one.
    """
    recipe = directory / "recipe.yaml"
    run = read_mapping(recipe, "recipe").get("run") if recipe.is_file() else None
    return run.get("target_loss") if isinstance(run, dict) else None


def checkpoints_of(directory: Path) -> list[Path]:
    """The checkpoints in a run directory, of a simulated run or a live one."""
    folder = directory / CHECKPOINTS
    return checkpoint.checkpoints(folder) or checkpoint.checkpoints(folder / LIVE)


def remove_unbegun(directories: Iterable[Path]) -> None:
    """Remove run directories that have neither a checkpoint nor a summary."""
    for directory in directories:
        if not (directory / "summary.json").is_file() and not checkpoints_of(directory):
            shutil.rmtree(directory, ignore_errors=True)


def start(directory: Path, recipe: Recipe) -> None:
    """Make a run directory that holds `recipe.yaml` alone; a run directory that was there before is
    gone.

    Raises:
        UserError: there is something else.
    """
    if directory.exists():
        if not is_run_directory(directory):
            raise UserError(f"{directory} is there already and is not a run directory")
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    try:
        with _replacing(directory / "recipe.yaml") as path:
            path.write_text(recipe.to_yaml())
    except OSError:
        directory.rmdir()
        raise


# What a run leaves


@dataclass(frozen=True)
class Ended:
    """What an engine hands over when a run has ended, for its run directory.

    Attributes:
        time_s: length of the run, on the engine's clock.
        inner_steps: inner steps that were trained; see `actor.Actor`.
        absorbed_steps: inner steps that are in the model to take home.
        outer_steps, local_updates: see `actor.Actor`.
        parts: those whose mean is the model to take home.
        nodes: all nodes of the run.
        recorder: what happened.
        learning_rate: of the run's inner steps; None: nothing was trained.
        task, layout: what was trained, and where its weights lie in a vector; None if nothing was.
        integers: the model's integer buffers by name.
        real, modelled: what took place, and what formulas stand for.
        clock: what the engine's clock is, `modelled` or `measured`.
        processes: how many processes took inner steps.
        taken_home_bytes: bytes of the model's parts on their way to the command, which no other
            total includes; None where nothing travels.
        faults_planned, faults_happened: faults on purpose, and those of them that began before the
            run ended.
    """

    time_s: float
    inner_steps: int
    absorbed_steps: int
    outer_steps: int
    local_updates: int
    parts: Sequence[Vector]
    nodes: Sequence[NodeId]
    recorder: Recorder
    task: Task | None
    layout: Layout | None
    integers: dict[str, Tensor]
    real: str
    modelled: str
    clock: Literal["modelled", "measured"]
    processes: int
    taken_home_bytes: int | None = None
    faults_planned: int = 0
    faults_happened: int = 0
    learning_rate: LearningRate | None = None


def summarize(recipe: Recipe, ended: Ended, stopped: str, wall_s: float) -> dict[str, Any]:
    """What `summary.json` holds: the run in one object, with units in the names."""
    recorder, task = ended.recorder, ended.task
    workers = [worker.id for worker in recipe.topology.workers]
    losses = [evaluation.loss for evaluation in recorder.evaluations if evaluation.loss is not None]
    last = recorder.evaluations[-1] if losses else None
    return {
        "method": recipe.method,
        "label": recipe.label,
        "seed": recipe.run.seed,
        "time_s": ended.time_s,
        "inner_steps": ended.inner_steps,
        "tokens": ended.inner_steps * task.tokens_per_step
        if task and task.tokens_per_step
        else None,
        "absorbed_steps": ended.absorbed_steps,
        "unreported_fraction": 1 - ended.absorbed_steps / ended.inner_steps
        if ended.inner_steps
        else None,
        "outer_steps": ended.outer_steps or None,
        "local_updates": ended.local_updates or None,
        "messages": recorder.messages,
        "sent_bytes": round(recorder.sent_bytes),
        "slow_link_bytes": round(recorder.slow_link_bytes),
        "taken_home_bytes": ended.taken_home_bytes,
        "idle_fraction": recorder.idle_fraction(workers, ended.time_s),
        "final_loss": losses[-1] if losses and stopped != DIVERGED else None,
        "best_loss": min(losses) if losses else None,
        "replica_loss": last and last.replica_loss,
        "replica_std": last and last.replica_std,
        "stopped": stopped,
        "refused_updates": {str(node): count for node, count in sorted(recorder.refused.items())},
        "faults_planned": ended.faults_planned,
        "faults_happened": ended.faults_happened,
        "restarts": {str(node): count for node, count in sorted(recorder.restarted.items())},
        "outages": [asdict(outage) for outage in recorder.outages],
        "workers": len(workers),
        "real": ended.real,
        "modelled": ended.modelled,
        "clock": ended.clock,
        "wire": recipe.wire,
        "settings": recipe.config.model_dump(mode="json")
        | (recipe.pipeline.model_dump(mode="json") if recipe.pipeline.stages > 1 else {}),
        "changed": {name: list(pair) for name, pair in recipe.changed().items()},
        "loss_name": task and task.loss_name,
        "entropy_rate": task and task.entropy_rate,
        "wall_s": wall_s,
        "processes": ended.processes,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} "
        "GPUs",
        "versions": checkpoint.versions(),
    }


def leave(
    directory: Path, recipe: Recipe, ended: Ended, stopped: str, wall_s: float
) -> dict[str, Any]:
    """Write what a run leaves into its directory: each file whole or not at all, and the summary
    last.
    """
    summary = summarize(recipe, ended, stopped, wall_s)
    recorder = ended.recorder
    with _replacing(directory / "metrics.jsonl") as path:
        recorder.write_metrics(path, ended.learning_rate)
    with _replacing(directory / "trace.json") as path:
        recorder.write_trace(path, ended.nodes, ended.time_s)
    if ended.layout is not None and stopped != DIVERGED:
        model = ended.layout.state_dict(outer.mean(ended.parts), ended.integers)
        weights = {
            # One memory for each name, as the format wants it; a tied tensor has several names.
            name: tensor.cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in model.items()
        }
        with _replacing(directory / "weights.safetensors") as path:
            try:
                save_file(weights, path)
            except SafetensorError as error:
                raise OSError(
                    errno.EIO, str(error), str(directory / "weights.safetensors")
                ) from None
        if ended.task is not None and ended.task.export is not None:
            with _replacing_folder(directory / MODEL) as folder:
                ended.task.export(weights, folder)
    with _replacing(directory / "summary.json") as path:
        path.write_text(json.dumps(summary, indent=2) + "\n")
    if stopped != INTERRUPTED:
        checkpoint.flush(directory)
        shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)  # the weights are there
    return summary


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Another name to write a file under; when that is done and on disk, it takes the name `path`,
    and an older file's place.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        yield temporary
        checkpoint.flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _replacing_folder(folder: Path) -> Iterator[Path]:
    """Another folder to write files in; when that is done, it takes the place of `folder`."""
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            checkpoint.flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
