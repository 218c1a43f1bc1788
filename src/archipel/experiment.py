"""From a recipe to a run directory. The only room that sees all others.

What belongs here: putting the parts together, progress while they run, and the files that a run
leaves. What does not: what any part does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import archipel
from archipel import checkpoint, methods, outer
from archipel.actor import Actor, NodeId, Vector, Worker, World
from archipel.checkpoint import Every, Surroundings
from archipel.errors import Diverged, TrainingError, UserError
from archipel.recipe import DEFAULT_STEPS, Recipe
from archipel.run.census import Plan
from archipel.run.invariants import Ledger
from archipel.run.metrics import Recorder
from archipel.sim.clock import Simulator
from archipel.sim.faults import make_faults
from archipel.sim.network import Network
from archipel.sim.topology import Profile
from archipel.theory import moments
from archipel.train.cut import boundary_bytes, cut_of
from archipel.train.pipeline import Pipeline, split
from archipel.train.pool import Pool
from archipel.train.replica import Run
from archipel.train.task import NoTask, Task
from archipel.train.trainer import NoTraining
from archipel.vector import Layout

Progress = Callable[[int, int, float], None]
"""Told (inner steps absorbed, inner steps planned, seconds on the engine's clock) while a run goes
on.
"""
CHECKPOINTS = "checkpoint"
"""The folder of a run directory that holds its checkpoints, until the run has ended."""
LIVE = "live"
"""The folder, in that one, in which each node of a live run has one of its own."""
LEFT = {
    "recipe.yaml",
    "metrics.jsonl",
    "trace.json",
    "weights.safetensors",
    "summary.json",
    CHECKPOINTS,
}
"""What can be in a run directory."""
INTERRUPTED = "interrupted"
"""What a summary says under `stopped` if Ctrl-C did it."""


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
        if (
            pool.task.autocast == torch.bfloat16
            and "cpu" in pool.devices
            and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            warnings.warn(
                "this CPU has no bf16 arithmetic and emulates it; precision fp32 is many times "
                "faster",
                stacklevel=2,
            )
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


def pipeline_of(recipe: Recipe) -> Pipeline | None:
    """How the recipe's workers share the stages of their replicas; None: each has a whole one."""
    workers, config = [worker.id for worker in recipe.topology.workers], recipe.pipeline
    return (
        Pipeline.of(workers, config.stages, config.micro_batches, config.routing)
        if config.stages > 1
        else None
    )


def build_actors(
    recipe: Recipe, pipeline: Pipeline | None, theta: Vector, layouts: Sequence[Layout]
) -> list[Actor]:
    """The recipe's actors; of a pipeline, the method's once for each stage, which does not know
    that there are others.

    Args:
        theta: the weights to start from.
        layouts: of the stages, one where there is no pipeline; empty where nothing is trained.

    Raises:
        UserError: the method has nodes that are not workers (servers), so that it cannot run once a
            stage.
    """
    method, workers, seed = methods.load(recipe.method), recipe.topology.workers, recipe.run.seed
    if pipeline is None:
        return list(method.build(recipe.config, _world(workers, layouts[:1], seed), theta))
    actors: list[Actor] = []
    thetas = split(theta, layouts) if layouts else [theta] * pipeline.stages
    for k, nodes in enumerate(pipeline.nodes):
        # Each stage draws its own random peers.
        stage_seed = int(np.random.default_rng((seed, 0x57A6E, k)).integers(2**31))
        world = _world(workers[k :: pipeline.stages], layouts[k : k + 1], stage_seed)
        built = method.build(recipe.config, world, thetas[k])
        if {actor.me for actor in built} != set(nodes):
            servers = ", ".join(str(actor.me) for actor in built if actor.me not in nodes)
            raise UserError(
                f"pipeline.stages = {pipeline.stages}: {recipe.label} cannot run in stages, for it "
                "has nodes that are no "
                f"workers: {servers}; noloco and diloco can"
            )
        actors += built
    if getattr(recipe.config, "dynamic_steps", False):
        raise UserError(
            f"pipeline.stages = {pipeline.stages}: {recipe.label} cannot run in stages with "
            "dynamic_steps, for all nodes of a "
            "pipeline take equally many inner steps"
        )
    return actors


def _world(workers: Sequence[Worker], layout: Sequence[Layout], seed: int) -> World:
    """What a method is told; `layout` is empty where nothing is trained."""
    parameters = layout[0].parameters if layout else 0
    return World(tuple(workers), parameters, seed, layout[0].blocks if layout else ())


def check_reachable(recipe: Recipe) -> None:
    """Raise a `UserError` if a node of the recipe's method cannot reach another that it talks
    to.
    """
    pipeline = pipeline_of(recipe)
    actors = build_actors(recipe, pipeline, torch.empty(0), ())
    recipe.topology.check_reachable((actor.me, peer) for actor in actors for peer in actor.peers())
    if pipeline:
        recipe.topology.check_reachable(pipeline.neighbours())


def warn_of_divergence(recipe: Recipe) -> None:
    """Warn if NoLoCo's averaging strength lies outside the window in which its replicas stay
    together (see `theory.py`).

    A network has flat directions, so the window is that of vanishing curvature.
    """
    config, workers = recipe.config, recipe.replicas
    if recipe.method != "noloco" or workers < 2:
        return
    alpha, beta, gamma, size = (
        getattr(config, name) for name in ("alpha", "beta", "gamma", "group_size")
    )
    if size == 1:  # nobody averages: replicas are meant to go their own ways
        return
    verdict = moments.verdict(moments.Setting(alpha, beta, gamma, workers=workers, group_size=size))
    if not verdict.stable:
        warnings.warn(
            f"{recipe.label}: gamma = {gamma} will drive the replicas apart: with alpha = {alpha}, "
            f"groups of {size} and "
            f"{workers} workers they stay together for {verdict.gamma_min:.2f} < gamma < "
            f"{verdict.gamma_max:.2f}, and come "
            f"together fastest with gamma = {verdict.gamma_best:.2f} (see: archipel theory noloco)",
            stacklevel=2,
        )


def planned_steps(recipe: Recipe, tokens_per_step: int | None) -> int:
    """Inner steps that the run is planned for.

    Raises:
        UserError: the plan is in tokens and nothing is trained.
    """
    if recipe.run.tokens is None:
        return recipe.run.steps or DEFAULT_STEPS
    if tokens_per_step is None:
        raise UserError(f"run.tokens = {recipe.run.tokens}: task none has no tokens; give steps")
    return math.ceil(recipe.run.tokens / tokens_per_step)


def simulate(
    recipe: Recipe,
    pool: Pool | None,
    directory: Path,
    progress: Progress = lambda *_: None,
    *,
    every: Every | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run `recipe` on the virtual clock in the run directory `directory`; its summary, which is
    also the last file written there.

    A checkpoint is saved `every` so often and on Ctrl-C; then the directory also holds what
    happened until then, and `KeyboardInterrupt` goes on. A second Ctrl-C does not wait for the
    checkpoint. What fails leaves the directory with its checkpoints if it has any, and a run that
    would fail again none at all.

    Args:
        resume: go on from the newest sound checkpoint in `directory`, if there are any.

    Raises:
        UserError: the recipe cannot run: an unreachable node, a loss that is not finite. None of
            the checkpoints is sound.
        TrainingError: see `Simulator.run` and `checkpoint.save`.
    """
    started = time.perf_counter()
    check_reachable(recipe)
    check_every(every, pool)
    if is_run_directory(directory):
        with alone_in(directory):
            pass
    recipe = replace(recipe, profile=recipe.profile or measure_profile(pool))
    simulator = make_simulator(recipe, pool, progress)
    if resume and checkpoint.checkpoints(directory / CHECKPOINTS):
        started -= load_checkpoint(directory, recipe, simulator)
    else:
        start_directory(directory, recipe)
    with alone_in(directory), interrupts() as interrupted:
        try:
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
            summary = leave(
                directory,
                recipe,
                _ended(recipe, simulator, pool),
                stopped,
                time.perf_counter() - started,
            )
        except KeyboardInterrupt:
            with contextlib.suppress(Diverged):  # it is Ctrl-C that ends this run
                simulator.state.evaluations.collect()  # those under way take a moment each
            leave(
                directory,
                recipe,
                _ended(recipe, simulator, pool),
                INTERRUPTED,
                time.perf_counter() - started,
            )
            raise
        except Exception as error:
            if isinstance(error, UserError) or not checkpoint.checkpoints(directory / CHECKPOINTS):
                shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, UserError):
                raise type(error)(f"{recipe.label}: {error}") from None
            raise
    if interrupted():
        raise KeyboardInterrupt
    return summary


def make_simulator(
    recipe: Recipe, pool: Pool | None, progress: Progress = lambda *_: None
) -> Simulator:
    """A simulator that is ready to run `recipe`, which has a profile, from its start.

    Raises:
        UserError: the recipe cannot run.
    """
    assert recipe.profile is not None
    tokens_per_step = pool.task.tokens_per_step if pool else None
    steps, seed = planned_steps(recipe, tokens_per_step), recipe.run.seed
    pipeline, theta, layouts = pipeline_of(recipe), torch.empty(0), list[Layout]()
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
        observers=[Ledger(frozenset(worker.id for worker in workers))] if faulty else [],
    )


# Saving and going on


def check_every(every: Every | None, pool: Pool | None) -> None:
    """Raise a `UserError` if checkpoints are to be saved after so many tokens and nothing is
    trained.
    """
    if every and every.tokens is not None and pool is None:
        raise UserError(
            f"--checkpoint-every {every.tokens}: task none has no tokens; give seconds on this "
            "machine, such as 600s"
        )


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
    state = {"trainer": trainer, "simulator": simulator.state, "wall_s": wall_s}
    surroundings = _surroundings(recipe, simulator)
    return checkpoint.save(
        directory / CHECKPOINTS,
        simulator.state.events,
        state,
        surroundings,
        _recipe_text(directory),
        every,
    )


def load_checkpoint(directory: Path, recipe: Recipe, simulator: Simulator) -> float:
    """Put a simulator that has not run where the newest sound checkpoint was saved; the seconds
    that the run had taken.

    Raises:
        UserError: there is none.
    """
    state = checkpoint.load(
        directory / CHECKPOINTS, _surroundings(recipe, simulator), _recipe_text(directory)
    )
    simulator.engine.setting.trainer.restore(state["trainer"])
    simulator.restore(state["simulator"])
    return float(state["wall_s"])


def _surroundings(recipe: Recipe, simulator: Simulator) -> Surroundings:
    return Surroundings(simulator.fixed, [cast(ModuleType, methods.load(recipe.method))])


def _recipe_text(directory: Path) -> str:
    return (directory / "recipe.yaml").read_text()


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


# What a run leaves


@dataclass(frozen=True)
class Ended:
    """What an engine hands over when a run has ended, for its run directory.

    Attributes:
        time_s: on the engine's clock.
        inner_steps: that have been trained; see `actor.Actor`.
        absorbed_steps: those of them that are in the model to take home.
        outer_steps, local_updates: see `actor.Actor`.
        parts: those whose mean is the model to take home.
        nodes: all of them.
        recorder: what happened.
        task, layout: what was trained, and where its weights lie in a vector; None if nothing was.
        integers: the model's integer buffers by name.
        real, modelled: what took place, and what formulas stand for.
        clock: the engine's, `modelled` or `measured`.
        processes: that took inner steps.
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


def _ended(recipe: Recipe, simulator: Simulator, pool: Pool | None) -> Ended:
    profile, faults = recipe.profile, simulator.engine.setting.faults.faults
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
        modelled=f"the clock: topology {recipe.topology.name}, profile {profile.name} "
        f"({profile.model_bytes:,} bytes a model, {profile.step_time_s * 1e3:.6g} ms an inner step "
        "at full speed)"
        + in_stages(recipe)
        + (f", {len(faults)} faults on purpose" if recipe.faults is not None else ""),
        clock="modelled",
        processes=len(pool.processes) if pool else 0,
    )


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
        "tokens": task and ended.inner_steps * task.tokens_per_step,
        "absorbed_steps": ended.absorbed_steps,
        "unreported_fraction": 1 - ended.absorbed_steps / ended.inner_steps
        if ended.inner_steps
        else None,
        "outer_steps": ended.outer_steps or None,
        "local_updates": ended.local_updates or None,
        "messages": recorder.messages,
        "sent_bytes": round(recorder.sent_bytes),
        "slow_link_bytes": round(recorder.slow_link_bytes),
        "idle_fraction": recorder.idle_fraction(workers, ended.time_s),
        "final_loss": losses[-1] if losses else None,
        "best_loss": min(losses) if losses else None,
        "replica_loss": last and last.replica_loss,
        "replica_std": last and last.replica_std,
        "stopped": stopped,
        "refused_updates": {str(node): count for node, count in sorted(recorder.refused.items())},
        "restarts": {str(node): count for node, count in sorted(recorder.restarted.items())},
        "workers": len(workers),
        "real": ended.real,
        "modelled": ended.modelled,
        "clock": ended.clock,
        "settings": recipe.config.model_dump(mode="json")
        | (recipe.pipeline.model_dump(mode="json") if recipe.pipeline.stages > 1 else {}),
        "changed": {name: list(pair) for name, pair in recipe.changed().items()},
        "loss_name": task and task.loss_name,
        "entropy_rate": task and task.entropy_rate,
        "wall_s": wall_s,
        "processes": ended.processes,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} "
        "GPUs",
        "versions": {
            "archipel": archipel.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def in_stages(recipe: Recipe) -> str:
    """What the model's stages add to the description of a run; empty without any."""
    pipeline = recipe.pipeline
    if pipeline.stages == 1:
        return ""
    return (
        f", {recipe.replicas} replicas in {pipeline.stages} stages (GPipe's schedule, "
        f"{pipeline.micro_batches} micro-batches)"
    )


def start_directory(directory: Path, recipe: Recipe) -> None:
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


def leave(
    directory: Path, recipe: Recipe, ended: Ended, stopped: str, wall_s: float
) -> dict[str, Any]:
    """Write what a run leaves into its directory: each file whole or not at all, and the summary
    last.
    """
    summary, recorder = summarize(recipe, ended, stopped, wall_s), ended.recorder
    with _replacing(directory / "metrics.jsonl") as path:
        recorder.write_metrics(path)
    with _replacing(directory / "trace.json") as path:
        recorder.write_trace(path, ended.nodes, ended.time_s)
    if ended.layout is not None:
        weights = {
            # One memory for each name, as the format wants it; a tied tensor has several names.
            name: tensor.cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in ended.layout.state_dict(
                outer.mean(ended.parts), ended.integers
            ).items()
        }
        with _replacing(directory / "weights.safetensors") as path:
            try:
                save_file(weights, path)
            except SafetensorError as error:
                raise OSError(
                    errno.EIO, str(error), str(directory / "weights.safetensors")
                ) from None
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
def alone_in(directory: Path) -> Iterator[None]:
    """Nobody else runs in a run directory meanwhile. If this process dies, the next one may.

    Raises:
        UserError: somebody does.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{directory} is in use: its run is going on in another process") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def is_run_directory(directory: Path) -> bool:
    """A run has left its summary in it, or has begun in it and nobody has put anything else
    there.
    """
    names = (
        {path.name.removeprefix(".") for path in directory.iterdir()}
        if directory.is_dir()
        else set()
    )
    return "summary.json" in names or ("recipe.yaml" in names and names <= LEFT)


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
    if not checkpoints_of(directory) and _recipe_text(directory) != recipe.to_yaml():
        path = directory / "recipe.yaml"
        raise UserError(
            f"{path} is not as a run leaves it, so there is nothing to resume; `archipel run "
            f"{path}` starts a run"
        )


def checkpoints_of(directory: Path) -> list[Path]:
    """The checkpoints in a run directory, of a simulated run or a live one."""
    folder = directory / CHECKPOINTS
    return checkpoint.checkpoints(folder) or checkpoint.checkpoints(folder / LIVE)


def remove_unbegun(directories: Iterable[Path]) -> None:
    """Remove run directories that have neither a checkpoint nor a summary."""
    for directory in directories:
        if not (directory / "summary.json").is_file() and not checkpoints_of(directory):
            shutil.rmtree(directory, ignore_errors=True)


def prepare_output(out: Path, names: list[str]) -> None:
    """Make the folder `out`, in which the run directories `names` will lie; earlier runs of those
    names will be replaced.

    Raises:
        UserError: it cannot be made or written to, a name is taken by something that is not a run
            directory, or by a run that has not ended and could.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    for name in names:
        taken = out / name
        if is_run_directory(taken):
            with alone_in(taken):
                pass
        if taken.exists() and not is_run_directory(taken):
            raise UserError(f"--out {out}: {taken} is there already and is not a run directory")
        if checkpoints_of(taken) and not is_finished(taken):
            raise UserError(
                f"--out {out}: {taken} is a run that has not ended; `archipel resume {taken}` goes "
                "on with it; "
                f"to start anew, remove it or choose another --out"
            )
