"""A live run from its recipe to its run directory.

What belongs here: what goes before a live run and what comes after it. What does not: what happens
while it goes on (`watch.py`), what a host does (`host.py`), where hosts belong (`cluster.py`), and
what a method does.

A live run starts with a rehearsal (`rehearsal.py`), which says where the model is evaluated. A host
that dies or falls silent is lost: all others are told so. It is started again with what it saved
last, and they are told that too. From then on nothing is as rehearsed, and the model is evaluated
when the run is seen to have passed a mark. A whole run that was stopped goes on in the same way:
every host is started again.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from archipel.actor import NodeId, Vector
from archipel.assemble import check_saved_by_tokens
from archipel.disk import rundir
from archipel.disk.checkpoint import Every
from archipel.disk.rundir import CHECKPOINTS, INTERRUPTED, LIVE, Ended
from archipel.errors import Diverged, TrainingError, UserError
from archipel.live.beginning import meetings_of, start
from archipel.live.cluster import Machine, check_protected, machines, place, session
from archipel.live.course import Course
from archipel.live.ending import close, save_all
from archipel.live.evaluations import Evaluations
from archipel.live.fleet import Fleet
from archipel.live.health import Health, Now
from archipel.live.home import Home
from archipel.live.on_purpose import OnPurpose, deeds_of
from archipel.live.prepare import Parts, make_setups, prepare
from archipel.live.protocol import HostSetup
from archipel.live.restarts import Restarts
from archipel.live.saves import SaveSchedule, WatchState, load_watch
from archipel.live.watch import Watch
from archipel.recipe import Recipe
from archipel.run.census import Census
from archipel.run.journal import Journal
from archipel.run.metrics import Recorder, merged
from archipel.tracking import journal_of, trackers_of
from archipel.train.configs import NoTask
from archipel.vector import largest


def launch(
    recipe: Recipe,
    directory: Path,
    *,
    address: str | None = None,
    insecure: bool = False,
    every: Every | None = None,
    resume: bool = False,
    progress: Callable[[Now], None] = lambda _: None,
) -> dict[str, Any]:
    """Run `recipe` for real and leave a run directory like the simulator's, with measured times and
    bytes; its summary.

    After Ctrl-C the directory holds what happened until then, and `KeyboardInterrupt` goes on.
    After an error it holds what has been saved, if anything has. Nobody else may use the directory
    meanwhile, see `rundir.alone_in`.

    Args:
        address: of a running Ray cluster; None: a private one on this machine, for the time of the
            run.
        insecure: join a cluster without token or encryption.
        every: how often each node saves its part, and then on Ctrl-C too; None: never.
        resume: go on with the run that was stopped in `directory`.
        progress: is told about once a second how things stand.

    Raises:
        UserError: the recipe cannot run, a region has no machine, the cluster is not protected, or
            there is nothing to go on from.
        TrainingError: a node failed, or died or fell silent once too often; or a save cannot be
            written.
    """
    wall_s, threads = time.perf_counter(), torch.get_num_threads()
    check_launch(recipe, every)
    saved = WatchState(secrets.randbits(62))
    if resume:
        saved = load_watch(folder_of(directory), recipe.to_yaml())
    wall_s -= saved.time_s
    torch.set_num_threads(1)  # the workers need the cores
    try:
        trackers = trackers_of(recipe.track)
        parts = prepare(recipe, resume=resume)
        check_saved_by_tokens(every, recipe, parts.plan.tokens_per_step)
        with session(address):
            if address is not None and not insecure:
                check_protected(machines())
            journal: Journal | None = None
            summary: dict[str, Any] | None = None
            made = False  # the run directory, by this launch

            def tell(now: Now) -> None:
                progress(now)
                if journal is not None:
                    journal.look(watch.course.evaluations.recorder, now.loss)

            watch = make_watch(parts, directory, saved, address, every, tell)
            with _kept_if_saved(directory, recipe, resume=resume):
                try:
                    start(watch, meetings_of(watch, parts.pipeline, insecure=insecure))
                    if not resume:
                        rundir.start(directory, parts.recipe)
                        made = True
                    journal = journal_of(
                        trackers,
                        parts.recipe,
                        directory,
                        "measured",
                        replica=parts.replica,
                        told=saved.evaluations,
                        resumed=resume,
                    )
                    stopped = watch.run()
                    summary = _leave(directory, parts, watch, stopped, wall_s)
                    return summary
                except KeyboardInterrupt:
                    if watch.started_s is not None:
                        watch.ask(watch.fleet.waiting("run"))
                        watch.mark_now()
                        save_all(watch)
                    elif made:  # nothing has happened yet, and nothing could go on from there
                        shutil.rmtree(directory, ignore_errors=True)
                    if watch.course.taken is not None:
                        summary = _leave(directory, parts, watch, INTERRUPTED, wall_s)
                    raise
                finally:
                    watch.fleet.end()
                    if journal is not None:
                        journal.end(watch.course.evaluations.recorder, summary)
    finally:
        torch.set_num_threads(threads)


def check_launch(recipe: Recipe, every: Every | None) -> None:
    """Raise a `UserError` if a recipe that can be simulated cannot be launched, or cannot be
    saved.
    """
    stages, processes = recipe.pipeline.stages, recipe.live.processes
    if processes > 1 and stages > 1:
        raise UserError(
            f"live.processes = {processes}: a stage of a pipeline is one process; give processes = "
            "1 or stages = 1"
        )
    if every is not None and stages > 1:
        raise UserError(
            f"--checkpoint-every: live runs in stages (pipeline.stages = {stages}) cannot be saved "
            "yet"
        )
    if isinstance(recipe.task, NoTask):
        check_saved_by_tokens(every, recipe, None)


def folder_of(directory: Path) -> Path:
    """Where a live run in `directory` saves what no host knows; each host has a folder in there."""
    return directory.resolve() / CHECKPOINTS / LIVE


def saved(directory: Path) -> bool:
    """A host of the live run in `directory` has saved its part."""
    return any(folder_of(directory).glob("*/*/event-*"))


@contextmanager
def _kept_if_saved(directory: Path, recipe: Recipe, *, resume: bool) -> Iterator[None]:
    """Remove a run directory if an error ends the run and nothing can go on from there."""
    try:
        yield
    except (UserError, TrainingError, OSError) as error:
        if not resume and not saved(directory) and rundir.is_run_directory(directory):
            shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, Diverged):
            raise Diverged(f"{recipe.label}: {error}") from None
        raise


def make_watch(
    parts: Parts,
    directory: Path,
    saved: WatchState,
    address: str | None,
    every: Every | None,
    progress: Callable[[Now], None],
) -> Watch:
    """Give each host a machine, and put together what watches over all. `saved`: what the watch had
    saved when the run was stopped.
    """
    recipe = parts.recipe
    folder = folder_of(directory)
    setups = make_setups(parts, folder if every else None, saved.number, resume=saved.saves > 0)
    fleet = Fleet(recipe, _places(recipe, setups, address), parts.weights)
    health = Health(recipe.live.deadline_s, cut_s=recipe.live.cut_s)
    recorder = Recorder(evaluations=list(saved.evaluations), restarted=dict(saved.bad_losses))
    census = Census(parts.plan)
    for evaluation in saved.evaluations:  # totals go on from the last of them
        recorder.sent_bytes = max(recorder.sent_bytes, evaluation.sent_bytes)
        recorder.slow_link_bytes = max(recorder.slow_link_bytes, evaluation.slow_link_bytes)
        census.total = evaluation.inner_steps * parts.plan.stages
        census.passes_mark()

    def fetch(node: NodeId, number: int) -> Vector:
        return fleet.fetch(node, number, recipe.live.deadline_s)

    home = Home(fetch, parts.replica, parts.pipeline, list(setups))
    evaluations = Evaluations(recorder)
    return Watch(
        recipe=recipe,
        setups=setups,
        peers={actor.me: tuple(actor.peers()) for actor in parts.actors},
        fleet=fleet,
        health=health,
        course=Course(parts.marks, census, health, evaluations, home, as_rehearsed=not saved.saves),
        schedule=SaveSchedule(every),
        restarts=Restarts(recipe.live.max_restarts, dict(saved.restarts)),
        on_purpose=OnPurpose(fleet, deeds_of(parts.faults, saved.time_s) if parts.faults else []),
        progress=progress,
        folder=folder,
        saved=saved,
        address=address,
    )


def _places(
    recipe: Recipe, setups: dict[NodeId, HostSetup], address: str | None
) -> dict[NodeId, Machine]:
    workers = [node for node, setup in setups.items() if setup.shard is not None]
    gpus = recipe.live.gpu_fraction * recipe.live.processes
    return place(list(setups), workers, machines(), gpus, address)


def _leave(
    directory: Path, parts: Parts, watch: Watch, stopped: str, wall_s: float
) -> dict[str, Any]:
    """Stop the hosts, take the model home, and write the run directory."""
    records, recipe, course = close(watch), parts.recipe, watch.course
    taken = course.take_home()
    recorder = merged([record.recorder for record in records], taken.time_s)
    recorder.evaluations = course.evaluations.recorder.evaluations
    recorder.outages = course.evaluations.recorder.outages
    recorder.restarted = dict(
        Counter(watch.restarts.counts) + Counter(course.evaluations.recorder.restarted)
    )
    profile, used = recipe.profile, set(watch.fleet.places.values())
    assert profile is not None
    real = f"gradients of {parts.task.description}" if parts.task else "no gradients (task none)"
    pace = (
        f"the pace: an inner step takes at least {profile.step_time_s * 1e3:.6g} ms ÷ its worker's "
        f"speed (profile {profile.name}, topology {recipe.topology.name})"
    )
    planned = parts.faults.faults if parts.faults else ()
    ended = Ended(
        time_s=taken.time_s,
        inner_steps=taken.inner_steps,
        absorbed_steps=taken.absorbed_steps,
        outer_steps=taken.outer_steps,
        local_updates=sum(record.local_updates_at(taken.time_s) for record in records),
        parts=course.home.models(),
        nodes=list(watch.setups),
        recorder=recorder,
        task=parts.task,
        layout=parts.replica.layout if parts.replica else None,
        integers=largest(record.integers for record in records),
        real=f"{real}; the clock and the bytes, measured on {len(used)} "
        f"machine{'s' * (len(used) > 1)}",
        modelled=pace if recipe.live.pace == "profile" else "",
        clock="measured",
        processes=len(recipe.topology.workers) * recipe.live.processes,
        taken_home_bytes=course.home.received_bytes,
        faults_planned=len(planned),
        faults_happened=sum(fault.at_s < taken.time_s for fault in planned),
        learning_rate=parts.replica.learning_rate if parts.replica else None,
    )
    return rundir.leave(directory, recipe, ended, stopped, time.perf_counter() - wall_s)
