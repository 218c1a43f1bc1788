"""From a recipe to a simulated run and what it leaves in its run directory.

What belongs here: putting a simulator together, when it is saved, and how it goes on from a
checkpoint. What does not: what the simulator does (`sim/`), what a run directory looks like
(`disk/rundir.py`), several runs (`series.py`).
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from archipel import methods
from archipel.assemble import (
    build_actors,
    check_reachable,
    check_saved_by_tokens,
    pipeline_of,
    planned_steps,
    warn_of_precision,
    warn_of_size,
)
from archipel.disk import checkpoint, rundir
from archipel.disk.checkpoint import Every
from archipel.disk.encoding import Surroundings
from archipel.disk.rundir import CHECKPOINTS, DIVERGED, INTERRUPTED, Ended
from archipel.errors import Diverged, TrainingError, UserError
from archipel.recipe import Recipe
from archipel.run.census import Plan
from archipel.run.invariants import Ledger
from archipel.run.journal import Journal
from archipel.run.metrics import Recorder
from archipel.run.observer import Observer
from archipel.sim.clock import Simulator
from archipel.sim.network import Network
from archipel.sim.schedule import make_faults
from archipel.sim.topology import Profile
from archipel.tracking import journal_of, trackers_of
from archipel.train.configs import NoTask
from archipel.train.cut import boundary_bytes, cut_of
from archipel.train.pool import Pool
from archipel.train.replica import Run
from archipel.train.trainer import NoTraining
from archipel.vector import Layout

Progress = Callable[[int, int, float], None]
"""Told (inner steps so far, inner steps planned, seconds on the virtual clock) while a run goes
on.
"""


@contextlib.contextmanager
def open_pool(recipe: Recipe, processes: int | None) -> Iterator[Pool | None]:
    """The pool for a recipe, and for all others with its task and workers; None if nothing is
    trained.
    """
    threads = torch.get_num_threads()
    if isinstance(recipe.task, NoTask):
        yield None
        return
    with Pool(
        recipe.task,
        [worker.id for worker in recipe.topology.workers],
        processes,
        pipeline_of(recipe),
    ) as pool:
        if "cpu" in pool.devices:
            warn_of_precision(pool.task.autocast)
        torch.set_num_threads(1)  # outer steps must not take the pool's cores
        try:
            yield pool
        finally:
            torch.set_num_threads(threads)


def measure_profile(pool: Pool | None) -> Profile:
    """The profile `measured`: the weights of this task, and the time of one of its inner steps on
    this machine.

    Raises:
        UserError: nothing is trained, so there is nothing to measure.
    """
    if pool is None:
        raise UserError("profile = 'measured': task none trains nothing that could be measured")
    pool.begin(Run(1, len(pool.rank), 0))
    pipeline = pool.pipeline
    return Profile(
        name="measured",
        model_bytes=4 * pool.replica.layout.numel,
        step_time_s=pool.measure_step_time_s(),
        activation_bytes=boundary_bytes(pool.task, pipeline.stages, pipeline.micro_batches)
        if pipeline
        else 0,
    )


def simulate(
    recipe: Recipe,
    pool: Pool | None,
    directory: Path,
    progress: Progress = lambda *_: None,
    *,
    every: Every | None = None,
    resume: bool = False,
    keep_diverged: bool = False,
) -> dict[str, Any]:
    """Run `recipe` on the virtual clock in the run directory `directory`; its summary, which is
    also the last file written there.

    A checkpoint is saved `every` so often and on Ctrl-C; then the directory also holds what
    happened until then, and `KeyboardInterrupt` goes on. A second Ctrl-C does not wait for the
    checkpoint. What fails leaves the directory with its checkpoints if it has any, and a run that
    would fail again none at all.

    Nobody else may use `directory` meanwhile, see `rundir.alone_in`.

    Args:
        resume: go on from the newest sound checkpoint in `directory`, if there are any.
        keep_diverged: a loss that is not finite ends the run with a warning, and the directory
            holds what happened until then, without weights.

    Raises:
        UserError: the recipe cannot run: an unreachable node, a loss that is not finite. None of
            the checkpoints is sound.
        TrainingError: see `Simulator.run` and `checkpoint.save`.
    """
    started = time.perf_counter()
    check_reachable(recipe)
    check_every(every, recipe)
    trackers = trackers_of(recipe.track)
    recipe = replace(recipe, profile=recipe.profile or measure_profile(pool))
    journal: Journal | None = None

    def tell(steps: int, planned: int, now_s: float) -> None:
        progress(steps, planned, now_s)
        if journal is not None:
            journal.look(simulator.recorder)

    def leave(stopped: str) -> dict[str, Any]:
        end, wall_s = ended(recipe, simulator, pool), time.perf_counter() - started
        summary = rundir.leave(directory, recipe, end, stopped, wall_s)
        if journal is not None:
            journal.end(simulator.recorder, summary)
        return summary

    simulator = make_simulator(recipe, pool, tell)
    check_saved_by_tokens(every, recipe, simulator.state.census.plan.tokens_per_step)
    if pool:
        warn_of_size(recipe, 4 * pool.replica.layout.numel)
    resumed = resume and bool(checkpoint.checkpoints(directory / CHECKPOINTS))
    if resumed:
        started -= load_checkpoint(directory, recipe, simulator)
    else:
        rundir.start(directory, recipe)
    try:
        journal = journal_of(
            trackers,
            recipe,
            directory,
            "modelled",
            replica=pool.replica if pool else None,
            told=simulator.recorder.evaluations,
            resumed=resumed,
        )
    except UserError:
        if not resumed:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    with interrupts() as interrupted:
        try:
            # A bar that shows the start.
            simulator.recorder.on_progress(simulator.inner_steps, simulator.now)
            while True:
                stopped = simulator.run(_when_to_save(every, simulator, interrupted))
                if stopped is not None:
                    break
                try:
                    save_checkpoint(
                        directory, recipe, simulator, time.perf_counter() - started, every
                    )
                except (UserError, TrainingError) as error:
                    if not interrupted():
                        raise
                    warnings.warn(f"{recipe.label}: {error}", stacklevel=2)
                if interrupted():
                    raise KeyboardInterrupt
            summary = leave(stopped)
        except KeyboardInterrupt:
            with contextlib.suppress(Diverged):  # it is Ctrl-C that ends this run
                simulator.state.evaluations.collect()  # those under way take a moment each
            leave(INTERRUPTED)
            raise
        except Exception as error:
            if isinstance(error, Diverged) and keep_diverged:
                warnings.warn(f"{directory.name}: {error}", stacklevel=2)
                return leave(DIVERGED)
            if journal is not None:
                journal.end(simulator.recorder, None)
            if isinstance(error, UserError) or not checkpoint.checkpoints(directory / CHECKPOINTS):
                shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, UserError):
                raise type(error)(f"{recipe.label}: {error}") from None
            raise
    if interrupted():
        raise KeyboardInterrupt
    return summary


def make_simulator(
    recipe: Recipe,
    pool: Pool | None,
    progress: Progress = lambda *_: None,
    observers: Sequence[Observer] = (),
) -> Simulator:
    """A simulator that is ready to run `recipe`, which has a profile, from its start.

    Args:
        pool: takes inner steps; None: nothing is trained.
        observers: are told of each event, beside those that a recipe with faults has.

    Raises:
        UserError: the recipe cannot run.
    """
    assert recipe.profile is not None
    tokens_per_step = pool.task.tokens_per_step if pool else None
    steps = planned_steps(recipe, tokens_per_step)
    seed = recipe.run.seed
    pipeline = pipeline_of(recipe)
    theta = torch.empty(0)
    layouts: list[Layout] = []
    if pool:
        pool.begin(Run(steps, recipe.replicas, seed))
        theta = pool.replica.first.clone()
        layouts = [replica.layout for replica in pool.stages]
    actors = build_actors(recipe, pipeline, theta, layouts)
    if pool and pipeline:
        pipeline = replace(
            pipeline,
            numels=tuple(layout.numel for layout in layouts),
            parameters=tuple(layout.parameters for layout in layouts),
            work=cut_of(pool.task, pipeline.stages, pipeline.micro_batches).work,
            clips=pool.task.gradient_clip is not None,
        )
    nodes = [actor.me for actor in actors]
    workers = recipe.topology.workers
    faulty = recipe.faults is not None
    return Simulator(
        actors,
        workers,
        Network(recipe.topology, np.random.default_rng((seed, 0x2E7))),
        recipe.profile,
        pool or NoTraining(),
        Recorder(on_progress=lambda trained, now: progress(min(trained, steps), steps, now)),
        Plan(
            steps,
            recipe.run.seconds,
            recipe.run.target_loss,
            evaluate_every=max(1, steps // recipe.run.evaluations),
            tokens_per_step=tokens_per_step,
            stages=recipe.pipeline.stages,
            strict=recipe.run.strict,
        ),
        numel=len(theta),
        parameters=pool.replica.layout.parameters if pool else 0,
        seed=seed,
        pipeline=pipeline,
        faults=make_faults(recipe.faults, recipe.topology, nodes, seed) if recipe.faults else None,
        screening=recipe.screening(live=False),
        wire=recipe.wire,
        observers=[
            *([Ledger(frozenset(worker.id for worker in workers))] if faulty else []),
            *observers,
        ],
    )


# Saving and going on


def check_every(every: Every | None, recipe: Recipe) -> None:
    """Raise a `UserError` if checkpoints are to be saved after so many tokens and nothing is
    trained.
    """
    if isinstance(recipe.task, NoTask):
        check_saved_by_tokens(every, recipe, None)


def _when_to_save(
    every: Every | None, simulator: Simulator, interrupted: Callable[[], bool]
) -> Callable[[], bool]:
    """Tells when the next checkpoint is due: on Ctrl-C, or the first of those `every` so often from
    now on.
    """
    match every:
        case Every(tokens=int(tokens)):
            per_step = simulator.state.census.plan.tokens_per_step
            assert per_step is not None
            mark = (simulator.inner_steps * per_step // tokens + 1) * tokens
            return lambda: interrupted() or simulator.inner_steps * per_step >= mark
        case Every(seconds=float(seconds)):
            end_s = time.monotonic() + seconds
            return lambda: interrupted() or time.monotonic() >= end_s
        case _:
            return interrupted


def save_checkpoint(
    directory: Path, recipe: Recipe, simulator: Simulator, wall_s: float, every: Every | None = None
) -> Path:
    """Save a run between two of its events, in its run directory; where. It has taken `wall_s` so
    far; `every` is noted.

    Raises:
        UserError, TrainingError: see `checkpoint.save`; and a process of the pool may have died.
    """
    trainer = (
        simulator.engine.setting.trainer.state()
    )  # first: it waits for all jobs, whose results are part of the simulator's state
    simulator.state.evaluations.collect_ready()  # so that nobody is told of them twice
    state = {"trainer": trainer, "simulator": simulator.state, "wall_s": wall_s}
    surroundings = _surroundings(recipe, simulator)
    return checkpoint.save(
        directory / CHECKPOINTS,
        simulator.state.events,
        state,
        surroundings,
        rundir.recipe_text(directory),
        every,
    )


def load_checkpoint(directory: Path, recipe: Recipe, simulator: Simulator) -> float:
    """Put a simulator that has not run where the newest sound checkpoint was saved; the seconds
    that the run had taken.

    Raises:
        UserError: there is none.
    """
    state = checkpoint.load(
        directory / CHECKPOINTS, _surroundings(recipe, simulator), rundir.recipe_text(directory)
    )
    simulator.engine.setting.trainer.restore(state["trainer"])
    simulator.restore(state["simulator"])
    return float(state["wall_s"])


def _surroundings(recipe: Recipe, simulator: Simulator) -> Surroundings:
    return Surroundings(simulator.fixed, [cast(ModuleType, methods.load(recipe.method))])


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Put Ctrl-C off, and tell whether it has been pressed. The second one is a `KeyboardInterrupt`
    at once, as ever.
    """
    pressed = threading.Event()

    def press(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # Only the main thread may; and a program that has its own way with Ctrl-C keeps it.
    usual = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if usual:
        signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def ended(recipe: Recipe, simulator: Simulator, pool: Pool | None) -> Ended:
    """What `simulator` hands over for the run directory, at its end or where it was stopped."""
    profile = recipe.profile
    faults = simulator.engine.setting.faults.faults
    assert profile is not None
    return Ended(
        time_s=simulator.now,
        inner_steps=simulator.inner_steps,
        absorbed_steps=simulator.absorbed_steps,
        outer_steps=simulator.holders()[0].outer_steps,
        local_updates=sum(actor.local_updates for actor in simulator.actors.values()),
        parts=simulator.parts(),
        nodes=list(simulator.actors),
        recorder=simulator.recorder,
        task=pool.task if pool else None,
        layout=pool.replica.layout if pool else None,
        integers=pool.integers() if pool else {},
        real=f"gradients of {pool.task.description}"
        if pool
        else "nothing: no gradients (task none)",
        modelled=f"the clock and the bytes: topology {recipe.topology.name}, "
        f"profile {profile.name} ({profile.model_bytes:,} bytes a model, "
        f"{profile.step_time_s * 1e3:.6g} ms an inner step at full speed)"
        + in_stages(recipe)
        + (f", {_faults(len(faults))} planned on purpose" if recipe.faults is not None else ""),
        clock="modelled",
        processes=len(pool.processes) if pool else 0,
        faults_planned=len(faults),
        faults_happened=sum(fault.at_s < simulator.now for fault in faults),
        learning_rate=pool.replica.learning_rate if pool else None,
    )


def _faults(count: int) -> str:
    return f"{count} fault{'s' * (count != 1)}"


def in_stages(recipe: Recipe) -> str:
    """What the model's stages add to the description of a run; empty without any."""
    pipeline = recipe.pipeline
    if pipeline.stages == 1:
        return ""
    return (
        f", {recipe.replicas} replicas in {pipeline.stages} stages (GPipe's schedule, "
        f"{pipeline.micro_batches} micro-batches)"
    )
