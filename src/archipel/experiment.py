"""From a recipe to a run directory. The only room that sees all others.

What belongs here: putting the parts together, progress while they run, and the files that a run leaves. What does not: what any
part does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import archipel
from archipel import methods, outer, theory
from archipel.actor import Actor, NodeId, Vector, World
from archipel.data import shards_of
from archipel.errors import Diverged, UserError
from archipel.metrics import Recorder
from archipel.network import Network
from archipel.pipeline import Pipeline, boundary_bytes, split
from archipel.pool import NoTraining, Pool, Trainer
from archipel.recipe import DEFAULT_STEPS, Recipe
from archipel.replica import Run
from archipel.simulator import Simulator, Stop
from archipel.task import NoTask, Task
from archipel.topology import Profile
from archipel.vector import Layout

Progress = Callable[[int, int, float], None]
"""Told (inner steps absorbed, inner steps planned, seconds on the engine's clock) while a run goes on."""


@contextlib.contextmanager
def open_pool(recipe: Recipe, processes: int | None) -> Iterator[Pool | None]:
    """The pool for a recipe, and for all others with its task and workers; None if nothing is trained."""
    threads = torch.get_num_threads()
    if isinstance(recipe.task, NoTask):
        yield None
        return
    with Pool(recipe.task, [worker.id for worker in recipe.topology.workers], processes, pipeline_of(recipe)) as pool:
        if pool.task.autocast == torch.bfloat16 and "cpu" in pool.devices and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            warnings.warn("this CPU has no bf16 arithmetic and emulates it; precision fp32 is many times faster", stacklevel=2)
        torch.set_num_threads(1)  # outer steps must not take the pool's cores
        try:
            yield pool
        finally:
            torch.set_num_threads(threads)


def measure_profile(pool: Pool | None) -> Profile:
    """The profile `measured`: the weights of this task, and the time of one of its inner steps on this machine.

    Raises:
        UserError: nothing is trained, so there is nothing to measure.
    """
    if pool is None:
        raise UserError("profile = 'measured': task none trains nothing that could be measured")
    pool.begin(Run(1, len(pool.rank), 0))
    modules = [replica.module for replica in pool.stages]
    return Profile(
        name="measured",
        model_bytes=4 * pool.replica.layout.numel,
        step_time_s=pool.measure_step_time_s(),
        activation_bytes=boundary_bytes(pool.task, modules, shards_of([""], 0)[0]),
    )


def pipeline_of(recipe: Recipe) -> Pipeline | None:
    """How the recipe's workers share the stages of their replicas; None: each has a whole one."""
    workers, config = [worker.id for worker in recipe.topology.workers], recipe.pipeline
    return Pipeline.of(workers, config.stages, config.micro_batches, config.routing) if config.stages > 1 else None


def build_actors(recipe: Recipe, pipeline: Pipeline | None, theta: Vector, layouts: Sequence[Layout]) -> list[Actor]:
    """The recipe's actors; of a pipeline, the method's once for each stage, which does not know that there are others.

    Args:
        theta: the weights to start from.
        layouts: of the stages, one where there is no pipeline; empty where nothing is trained.

    Raises:
        UserError: the method has nodes that are not workers (servers), so that it cannot run once a stage.
    """
    method, workers, seed = methods.load(recipe.method), recipe.topology.workers, recipe.run.seed
    if pipeline is None:
        return list(method.build(recipe.config, World(workers, layouts[0].parameters if layouts else 0, seed), theta))
    actors: list[Actor] = []
    thetas = split(theta, layouts) if layouts else [theta] * pipeline.stages
    for k, nodes in enumerate(pipeline.nodes):
        # Each stage draws its own random peers.
        stage_seed = int(np.random.default_rng((seed, 0x57A6E, k)).integers(2**31))
        world = World(workers[k :: pipeline.stages], layouts[k].parameters if layouts else 0, stage_seed)
        built = method.build(recipe.config, world, thetas[k])
        if {actor.me for actor in built} != set(nodes):
            servers = ", ".join(str(actor.me) for actor in built if actor.me not in nodes)
            raise UserError(
                f"pipeline.stages = {pipeline.stages}: {recipe.label} cannot run in stages, for it has nodes that are no "
                f"workers: {servers}; noloco and diloco can"
            )
        actors += built
    return actors


def check_reachable(recipe: Recipe) -> None:
    """Raise a `UserError` if a node of the recipe's method cannot reach another that it talks to."""
    pipeline = pipeline_of(recipe)
    actors = build_actors(recipe, pipeline, torch.empty(0), ())
    recipe.topology.check_reachable((actor.me, peer) for actor in actors for peer in actor.peers())
    if pipeline:
        recipe.topology.check_reachable(pipeline.neighbours())


def warn_of_divergence(recipe: Recipe) -> None:
    """Warn if NoLoCo's averaging strength lies outside the window in which its replicas stay together (see `theory.py`).

    A network has flat directions, so the window is that of vanishing curvature.
    """
    config, workers = recipe.config, recipe.replicas
    if recipe.method != "noloco" or workers < 2:
        return
    alpha, beta, gamma, size = (getattr(config, name) for name in ("alpha", "beta", "gamma", "group_size"))
    if size == 1:  # nobody averages: replicas are meant to go their own ways
        return
    verdict = theory.verdict(theory.Setting(alpha, beta, gamma, workers=workers, group_size=size))
    if not verdict.stable:
        warnings.warn(
            f"{recipe.label}: gamma = {gamma} will drive the replicas apart: with alpha = {alpha}, groups of {size} and "
            f"{workers} workers they stay together for {verdict.gamma_min:.2f} < gamma < {verdict.gamma_max:.2f}, and come "
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


def simulate(recipe: Recipe, pool: Pool | None, directory: Path, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Run `recipe` on the virtual clock and leave a run directory, whole or not at all; its summary.

    After Ctrl-C the directory holds what happened until then, and `KeyboardInterrupt` goes on.

    Raises:
        UserError: the recipe cannot run: an unreachable node, a loss that is not finite.
        TrainingError: see `Simulator.run`.
    """
    started = time.perf_counter()
    check_reachable(recipe)
    profile = recipe.profile or measure_profile(pool)
    recipe = replace(recipe, profile=profile)
    tokens_per_step = pool.task.tokens_per_step if pool else None
    steps, seed, workers = planned_steps(recipe, tokens_per_step), recipe.run.seed, recipe.topology.workers
    pipeline = pipeline_of(recipe)
    if pool:
        pool.begin(Run(steps, recipe.replicas, seed))
        layouts = [replica.layout for replica in pool.stages]
        theta, parameters = pool.replica.layout.read(pool.replica.module), pool.replica.layout.parameters
    else:
        theta, parameters, layouts = torch.empty(0), 0, []
    actors = build_actors(recipe, pipeline, theta, layouts)
    if pool and pipeline:
        pipeline = replace(
            pipeline,
            numels=tuple(layout.numel for layout in layouts),
            parameters=tuple(layout.parameters for layout in layouts),
            clips=pool.task.gradient_clip is not None,
        )
    recorder = Recorder(on_progress=lambda absorbed, now: progress(min(absorbed, steps), steps, now))
    trainer: Trainer = pool or NoTraining()
    simulator = Simulator(
        actors,
        workers,
        Network(recipe.topology, np.random.default_rng((seed, 0x2E7))),
        profile,
        trainer,
        recorder,
        Stop(steps, recipe.run.seconds, recipe.run.target_loss),
        evaluate_every=max(1, steps // recipe.run.evaluations),
        tokens_per_step=tokens_per_step,
        parameters=parameters,
        seed=seed,
        pipeline=pipeline,
    )
    try:
        stopped = simulator.run()
    except Diverged as error:
        raise Diverged(f"{recipe.label}: {error}") from None
    except KeyboardInterrupt:
        with contextlib.suppress(Diverged):  # it is Ctrl-C that ends this run
            simulator.collect_evaluations()  # those under way take a moment each
        leave(directory, recipe, _ended(recipe, simulator, pool), "interrupted", time.perf_counter() - started)
        raise
    return leave(directory, recipe, _ended(recipe, simulator, pool), stopped, time.perf_counter() - started)


@dataclass(frozen=True)
class Ended:
    """What an engine hands over when a run has ended, for its run directory.

    Attributes:
        time_s: on the engine's clock.
        inner_steps, outer_steps, local_updates: see `actor.Actor`.
        parts: those whose mean is the model to take home.
        nodes: all of them.
        recorder: what happened.
        task, layout: what was trained, and where its weights lie in a vector; None if nothing was.
        integers: the model's integer buffers by name.
        real, modelled: what took place, and what formulas stand for.
        processes: that took inner steps.
    """

    time_s: float
    inner_steps: int
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
    processes: int


def _ended(recipe: Recipe, simulator: Simulator, pool: Pool | None) -> Ended:
    profile = recipe.profile
    assert profile is not None
    return Ended(
        time_s=simulator.now,
        inner_steps=simulator.absorbed,
        outer_steps=simulator.outer_steps(),
        local_updates=simulator.local_updates(),
        parts=simulator.parts(),
        nodes=list(simulator.actors),
        recorder=simulator.recorder,
        task=pool.task if pool else None,
        layout=pool.replica.layout if pool else None,
        integers=pool.integers() if pool else {},
        real=f"gradients of {pool.task.description}" if pool else "nothing: no gradients (task none)",
        modelled=f"the clock: topology {recipe.topology.name}, profile {profile.name} "
        f"({profile.model_bytes:,} bytes a model, {profile.step_time_s * 1e3:.6g} ms an inner step at full speed)"
        + in_stages(recipe),
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
        "workers": len(workers),
        "real": ended.real,
        "modelled": ended.modelled,
        "settings": recipe.config.model_dump(mode="json")
        | (recipe.pipeline.model_dump(mode="json") if recipe.pipeline.stages > 1 else {}),
        "changed": {name: list(pair) for name, pair in recipe.changed().items()},
        "loss_name": task and task.loss_name,
        "entropy_rate": task and task.entropy_rate,
        "wall_s": wall_s,
        "processes": ended.processes,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs",
        "versions": {"archipel": archipel.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def in_stages(recipe: Recipe) -> str:
    """What the model's stages add to the description of a run; empty without any."""
    pipeline = recipe.pipeline
    if pipeline.stages == 1:
        return ""
    return f", {recipe.replicas} replicas in {pipeline.stages} stages (GPipe's schedule, {pipeline.micro_batches} micro-batches)"


def leave(directory: Path, recipe: Recipe, ended: Ended, stopped: str, wall_s: float) -> dict[str, Any]:
    """Write the run directory under another name, then give it its own; the summary."""
    summary = summarize(recipe, ended, stopped, wall_s)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as name:
        temporary = Path(name) / directory.name
        temporary.mkdir()
        (temporary / "recipe.yaml").write_text(recipe.to_yaml())
        (temporary / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        ended.recorder.write_metrics(temporary / "metrics.jsonl")
        ended.recorder.write_trace(temporary / "trace.json", ended.nodes, ended.time_s)
        if ended.layout is not None:
            weights = {name: tensor.clone() for name, tensor in ended.layout.named(outer.mean(ended.parts)).items()}
            try:
                save_file({**weights, **ended.integers}, temporary / "weights.safetensors")
            except SafetensorError as error:
                raise OSError(errno.EIO, str(error), str(directory / "weights.safetensors")) from None
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    return summary


def prepare_output(out: Path, names: list[str]) -> None:
    """Make the folder `out`, in which the run directories `names` will lie; earlier runs of those names are replaced.

    Raises:
        UserError: it cannot be made or written to, or a name is taken by something that is not a run directory.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    for name in names:
        taken = out / name
        if taken.exists() and not (taken / "summary.json").is_file():
            raise UserError(f"--out {out}: {taken} is there already and is not a run directory")
