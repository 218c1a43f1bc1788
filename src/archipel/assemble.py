"""From a recipe to what every engine needs of it: its pipeline, its actors, its inner steps.

What belongs here: what follows from a recipe on any clock, and what is refused or warned of before
anything runs. What does not: putting an engine together (`simulation.py`, `live/launch.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from archipel import methods
from archipel.actor import Actor, Vector, WorkerSpec, World
from archipel.disk.checkpoint import Every
from archipel.errors import UserError
from archipel.recipe import DEFAULT_PROFILE, Recipe
from archipel.recipe.sections import DEFAULT_STEPS
from archipel.sim.schedule import make_faults
from archipel.sim.topology import PROFILES
from archipel.theory import moments
from archipel.train.configs import CausalLmTask, NoTask, UserTask
from archipel.train.pipeline import Pipeline, split
from archipel.vector import Layout


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
    method = methods.load(recipe.method)
    workers = recipe.topology.workers
    seed = recipe.run.seed
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


def _world(workers: Sequence[WorkerSpec], layout: Sequence[Layout], seed: int) -> World:
    """What a method is told; `layout` is empty where nothing is trained."""
    parameters = layout[0].parameters if layout else 0
    return World(tuple(workers), parameters, seed, layout[0].blocks if layout else ())


def check_reachable(recipe: Recipe) -> None:
    """Raise a `UserError` if a node of the recipe's method cannot reach another that it talks to,
    or if a fault speaks of a node or a region that is not there.
    """
    pipeline = pipeline_of(recipe)
    with methods.blaming(recipe.method):
        actors = build_actors(recipe, pipeline, torch.empty(0), ())
        recipe.topology.check_reachable((actor.me, actor.peers()) for actor in actors)
    if recipe.faults is not None:
        make_faults(recipe.faults, recipe.topology, [actor.me for actor in actors], recipe.run.seed)
    if pipeline:
        recipe.topology.check_reachable(pipeline.neighbours())


def warn_of_divergence(recipe: Recipe) -> None:
    """Warn if NoLoCo's averaging strength lies outside the window in which its replicas stay
    together (see `theory/moments.py`).

    A network has flat directions, so the window is that of vanishing curvature.
    """
    config = recipe.config
    workers = recipe.replicas
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


def warn_of_size(recipe: Recipe, model_bytes: int) -> None:
    """Warn if the clock takes the user's own model for the default profile's, which has another
    size: who brings a model may well take the times for its own.
    """
    profile = PROFILES[DEFAULT_PROFILE]
    named, own = recipe.profile == profile, model_bytes == profile.model_bytes
    if isinstance(recipe.task, CausalLmTask | UserTask) and named and not own:
        warnings.warn(
            f"profile {profile.name}: messages are timed as {profile.model_bytes:,} bytes and "
            f"inner steps as {profile.step_time_s:.3g} s, whatever the task, whose model has "
            f"{model_bytes:,} bytes; for its own times give `profile: measured`, or `profile: "
            f"{{model_bytes: {model_bytes}, step_time_s: …}}`",
            stacklevel=2,
        )


def warn_of_precision(autocast: torch.dtype | None) -> None:
    """Warn if the CPU, which is to compute in the type `autocast`, has no arithmetic for it."""
    if autocast == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        warnings.warn(
            "this CPU has no bf16 arithmetic and emulates it; precision fp32 is many times faster",
            stacklevel=2,
        )


def planned_steps(recipe: Recipe, tokens_per_step: int | None) -> int:
    """Inner steps that the run is planned for.

    Raises:
        UserError: the plan is in tokens and the task has none, or the run is to end at a loss and
            nothing is trained.
    """
    check_has_loss(recipe, "run.target_loss =", recipe.run.target_loss)
    if recipe.run.tokens is None:
        return recipe.run.steps or DEFAULT_STEPS
    if tokens_per_step is None:
        raise UserError(f"run.tokens = {recipe.run.tokens}: {no_tokens(recipe)}; give steps")
    return math.ceil(recipe.run.tokens / tokens_per_step)


def check_has_loss(recipe: Recipe, place: str, target_loss: float | None) -> None:
    """Raise a `UserError` if a target is given at `place` for a recipe that has no loss."""
    if target_loss is not None and isinstance(recipe.task, NoTask):
        raise UserError(
            f"{place} {target_loss:g}: task none trains nothing and has no loss; leave it out, or "
            "choose a task"
        )


def check_saved_by_tokens(every: Every | None, recipe: Recipe, tokens_per_step: int | None) -> None:
    """Raise a `UserError` if checkpoints are to be saved after so many tokens, and there are none
    in an inner step.
    """
    if every and every.tokens is not None and tokens_per_step is None:
        raise UserError(
            f"--checkpoint-every {every.tokens}: {no_tokens(recipe)}; give seconds on this "
            "machine, such as 600s"
        )


def no_tokens(recipe: Recipe) -> str:
    """Why a recipe cannot be counted in tokens."""
    name = recipe.task.name
    why = "" if isinstance(recipe.task, NoTask) else ", for its Task states no tokens_per_step"
    return f"task {name} has no tokens{why}"
