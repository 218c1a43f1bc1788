"""`pipeline.py`: cutting a model, routes, the schedule, and gradients along routes against ones
written out by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from worlds import linear_task

from archipel import assemble, report, simulation
from archipel.actor import NodeId
from archipel.errors import UserError
from archipel.recipe import Recipe, parse_recipe
from archipel.run.census import Plan
from archipel.run.metrics import Recorder
from archipel.sim.clock import Simulator
from archipel.sim.network import Network
from archipel.sim.verbs import NodeContext
from archipel.train.batch import micro
from archipel.train.cut import balanced, blocks_of, cut_of, look, parts, parts_of
from archipel.train.data import Shard, shards_of
from archipel.train.gpt import GPT, next_token_loss
from archipel.train.pipeline import Pipeline, Routing, join, norm_end_s, split, step_end_s
from archipel.train.replica import Replica, Run
from archipel.train.stages import Stages
from archipel.train.task import Task, make_task
from archipel.train.trainer import NoTraining
from archipel.vector import Layout

CPU = torch.device("cpu")


def pipe(
    stages: int, replicas: int, micro_batches: int = 4, routing: Routing = "random"
) -> Pipeline:
    return Pipeline.of(
        [NodeId("a", f"w{i}") for i in range(stages * replicas)], stages, micro_batches, routing
    )


# Cutting


def task_of(model: nn.Module, rows: int = 4) -> Task:
    """A task that trains `model` on its first layer's inputs."""
    features = next(model.parameters()).shape[-1]
    return Task(
        lambda: model,
        lambda module, batch: module(batch).square().mean(),
        lambda shard, index: torch.ones(rows, features),
        lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_the_largest_stage_is_as_small_as_it_can_be_then_the_next(
    given_blocks: list[tuple[int, bool]], stages: int
) -> None:
    """Against all ways to cut, written out."""
    work, trained = [one[0] for one in given_blocks], [one[1] for one in given_blocks]
    loads: dict[tuple[int, ...], list[int]] = {}
    for ends in itertools.combinations(range(1, len(work)), stages - 1):
        spans = list(itertools.pairwise((0, *ends, len(work))))
        if all(any(trained[a:b]) for a, b in spans):
            loads[ends] = sorted((sum(work[a:b]) for a, b in spans), reverse=True)
    if not loads:
        with pytest.raises(UserError, match="every stage needs a block with parameters"):
            balanced(work, trained, stages)
        return
    assert loads[balanced(work, trained, stages)] == min(loads.values())


def test_the_work_of_a_block_is_that_of_its_matrix_products() -> None:
    """2 operations for each weight and row; an activation has none."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    found = blocks_of(task_of(model, rows=8), 2, 2)
    assert [block.work for block in found] == [2 * 4 * 6 * 5, 0, 2 * 4 * 5 * 3]
    assert [block.weights for block in found] == [35, 0, 18]
    assert [tuple(block.out.shape) for block in found] == [(4, 5), (4, 5), (4, 3)]


def test_an_embedding_weighs_nothing_and_the_head_of_a_large_vocabulary_a_lot() -> None:
    """The published 125M shape with 128,002 tokens, in 4 stages. By hand, of a token: a block has
    12 width² weights, and attention takes 2 products with 1024 positions.
    """
    with torch.device("meta"):
        model = GPT(vocabulary=128_002, context=1024, layers=12, width=768, heads=12, tied=False)
    batch = torch.zeros(1, 1025, dtype=torch.long, device="meta")
    task = replace(task_of(nn.Linear(1, 1)), loss=next_token_loss)
    found = look(model, batch, task, nullcontext())
    block, head = 2 * 12 * 768**2 + 4 * 1024 * 768, 2 * 768 * 128_002
    assert [one.work for one in found] == [0, *[1024 * block] * 12, 1024 * head]
    ends = balanced([one.work for one in found], [True] * 14, 4)
    assert ends == (5, 9, 13)  # embedding and 4 blocks, 4 blocks, 4 blocks, head


def test_the_clock_gives_each_stage_its_share_of_the_step() -> None:
    """Two stages with a quarter and three quarters of the work, and links that cost nothing: a
    micro-batch's forward is 1/3 of its work, and the second stage never waits but at first.
    """
    local = {"regions": {"a": [1.0] * 2}, "local": {"bandwidth_gbit_s": 1e12}}
    run = timed(
        {
            "pipeline": {"stages": 2, "micro_batches": 2, "routing": "fixed"},
            "topology": local,
            "run": {"steps": 8},
        },
        work=(0.25, 0.75),
    )
    run.run()
    forward_s, backward_s = 1 / 3 / 2, 2 / 3 / 2  # of a whole micro-batch
    step_s = 0.25 * forward_s + 2 * 0.75 * (forward_s + backward_s) + 0.25 * backward_s
    assert run.now == pytest.approx(8 * step_s, rel=1e-9)
    busy_s = {node.name: seconds for node, seconds in run.recorder.compute_s.items()}
    assert busy_s["w1"] == pytest.approx(3 * busy_s["w0"])


def test_a_layer_that_is_there_twice_is_cut_into_both_stages() -> None:
    """An activation without weights may be shared."""
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 3), tanh, nn.Linear(3, 3), tanh, nn.Linear(3, 3))
    x = torch.ones(2, 3)
    expected = model(x)
    first, second = parts_of(task_of(model), 0, 2, 1)
    assert torch.equal(second(first(x)), expected)
    assert [name for part in (first, second) for name in part._modules] == list("01234")


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def tied() -> nn.Sequential:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            nn.Linear(2, 2),
            "pipeline.stages = 2: the model must be an nn.Sequential of blocks, and is a Linear",
        ),
        (
            Own(nn.Linear(2, 2), nn.Linear(2, 2)),
            "pipeline.stages = 2: the model must be an nn.Sequential of blocks, and is a Own",
        ),
        (
            nn.Sequential(nn.Linear(2, 1, bias=False), nn.Tanh()),
            "pipeline.stages = 2: every stage needs a block with parameters, and the model has 1",
        ),
        (
            tied(),
            "pipeline.stages = 2: '2.weight' of stage 1 is also in stage 0; untie them (built-in "
            "tasks: task.tied = false; causal_lm: task.config = {tie_word_embeddings: false})",
        ),
        (
            nn.Sequential(nn.Linear(2, 2), Pair(), nn.Linear(2, 2)),
            "pipeline: block Pair of the model gives a tuple; between stages passes one tensor",
        ),
    ],
)
def test_a_model_that_cannot_be_cut(model: nn.Module, text: str) -> None:
    with pytest.raises(UserError) as error:
        parts_of(task_of(model), 0, 2, 1)
    assert str(error.value) == text


@pytest.mark.parametrize("times", [0, 2])
def test_a_loss_that_does_not_call_the_model_once_cannot_be_cut(times: int) -> None:
    task = replace(
        task_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
        loss=lambda model, batch: sum((model(batch).sum() for _ in range(times)), batch.sum()),
    )
    with pytest.raises(UserError, match="the task's loss must call the model, once"):
        cut_of(task, 2, 1)


def test_a_loss_that_looks_at_values_is_cut_too() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return out.sum() * (2.0 if out.sum().item() > 0 else 1.0)

    task = replace(task_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), loss=loss)
    assert cut_of(task, 2, 1).ends == (1,)


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    )


def test_the_stages_vectors_are_the_models() -> None:
    model = normed()
    whole = Layout.of(model)
    stages = parts(model, [2])
    layouts = [Layout.of(part) for part in stages]
    theta = torch.arange(whole.numel, dtype=torch.float32)
    whole.write(model, theta)
    thetas = split(theta, layouts)
    for part, layout, vector in zip(stages, layouts, thetas, strict=True):
        assert torch.equal(layout.read(part), vector)
    assert torch.equal(join(thetas, [layout.parameters for layout in layouts]), theta)


# Routes


@given(
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99), st.integers(0, 99)
)
def test_a_route_visits_every_replica_of_every_stage_once(
    stages: int, replicas: int, parts: int, seed: int, step: int
) -> None:
    routes = pipe(stages, replicas, parts).routes(seed, step)
    assert routes.shape == (parts, stages, replicas)
    assert (np.sort(routes, axis=2) == np.arange(replicas)).all()
    assert (routes[:, 0] == np.arange(replicas)).all()
    assert (routes == pipe(stages, replicas, parts).routes(seed, step)).all()
    assert (pipe(stages, replicas, parts, "fixed").routes(seed, step) == np.arange(replicas)).all()


def test_boundaries_have_permutations_that_are_uniform_and_independent() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for step in range(3000):
        routes = pipe(3, 3, 1).routes(7, step)[0]
        after = np.empty(3, int)
        after[routes[1]] = routes[
            2
        ]  # where the second boundary sends what replica i of stage 1 has computed
        key = (*routes[1].tolist(), *after.tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 36
    expected = 3000 / 36
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 66.6  # the 99.9 % quantile at 35 degrees of freedom


def test_neighbours_hold_neighbouring_stages() -> None:
    one = pipe(2, 3)
    assert [[node.name for node in stage] for stage in one.nodes] == [
        ["w0", "w2", "w4"],
        ["w1", "w3", "w5"],
    ]
    assert one.places[NodeId("a", "w5")] == (1, 2)
    assert one.ranks([0, 2]) == [0, 4, 1, 5]
    assert one.team(NodeId("a", "w3")) == (0, 1, 2)
    assert pipe(2, 3, routing="fixed").team(NodeId("a", "w3")) == (1,)
    before, after = one.nodes
    assert list(one.neighbours()) == [(node, after) for node in before]
    fixed = pipe(2, 3, routing="fixed")
    assert list(fixed.neighbours()) == [(a, (b,)) for a, b in zip(*fixed.nodes, strict=True)]


# The schedule


def no_transfer(k: int, a: int, to: int, b: int) -> float:
    return 0.0


@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.sampled_from(["random", "fixed"])
)
def test_equal_nodes_without_transfers_take_gpipes_time(
    stages: int, parts: int, replicas: int, routing: Routing
) -> None:
    routes = pipe(stages, replicas, parts, routing).routes(0, 0)
    step_s = 3.0
    forward_s = np.full((stages, replicas), step_s / (3 * parts * stages))
    end_s = step_end_s(routes, np.zeros((stages, replicas)), forward_s, no_transfer)
    assert end_s.max() == pytest.approx(step_s / stages * (parts + stages - 1) / parts, rel=1e-12)
    assert end_s[0] == pytest.approx(
        np.full(replicas, end_s.max())
    )  # the gradient ends where the batch began


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_the_schedule_is_the_longest_path(
    stages: int, replicas: int, parts: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    routes = pipe(stages, replicas, parts).routes(seed, 0)
    forward_s, start_s = rng.random((stages, replicas)), rng.random((stages, replicas))
    table_s = rng.random((stages, replicas, stages, replicas))
    who = {
        (j, k, int(routes[j, k, q])): q
        for j in range(parts)
        for k in range(stages)
        for q in range(replicas)
    }

    @cache
    def done(direction: str, j: int, k: int, node: int) -> float:
        """When the node has done micro-batch j in one direction: after all that it needs, by
        definition.
        """
        q = who[j, k, node]
        needs = [float(start_s[k, node])]
        if direction == "forward":
            if j:
                needs.append(done("forward", j - 1, k, node))
            if k:
                before = int(routes[j, k - 1, q])
                needs.append(done("forward", j, k - 1, before) + table_s[k - 1, before, k, node])
            return max(needs) + float(forward_s[k, node])
        needs.append(done("backward", j - 1, k, node) if j else done("forward", parts - 1, k, node))
        if k + 1 < stages:
            after = int(routes[j, k + 1, q])
            needs.append(done("backward", j, k + 1, after) + table_s[k + 1, after, k, node])
        return max(needs) + 2 * float(forward_s[k, node])

    expected = [
        [done("backward", parts - 1, k, node) for node in range(replicas)] for k in range(stages)
    ]
    np.testing.assert_allclose(
        step_end_s(routes, start_s, forward_s, lambda *at: table_s[at]), expected, rtol=1e-12
    )


def test_the_norm_goes_to_the_first_stage_and_its_sum_comes_back() -> None:
    end_s = np.array([[1.0, 9.0], [2.0, 1.0], [6.0, 1.0]])
    known_s = norm_end_s(end_s, lambda k, a, to, b: 0.5)
    assert known_s.tolist() == [[7.0, 9.0], [7.5, 9.5], [8.0, 10.0]]


def timed(
    fields: dict[str, Any],
    steps: int = 8,
    activation_bytes: int = 0,
    work: tuple[float, ...] = (),
) -> Simulator:
    recipe = parse_recipe(
        {
            "method": {"name": "noloco", "inner_steps": steps},
            "topology": {
                "regions": {"a": [1.0] * 4, "b": [1.0] * 4},
                "default": {"bandwidth_gbit_s": 8e-9, "latency_ms": 500},
            },
            "profile": {"model_bytes": 1, "step_time_s": 1.0, "activation_bytes": activation_bytes},
            "task": "none",
            "run": {"steps": steps},
            **fields,
        }
    )
    one = assemble.pipeline_of(recipe)
    assert recipe.profile is not None
    return Simulator(
        assemble.build_actors(recipe, one, torch.empty(0), ()),
        recipe.topology.workers,
        Network(recipe.topology, np.random.default_rng(0)),
        recipe.profile,
        NoTraining(),
        Recorder(),
        Plan(recipe.run.steps, stages=recipe.pipeline.stages),
        numel=0,
        parameters=0,
        seed=0,
        pipeline=replace(one, work=work) if one else None,
    )


@pytest.mark.parametrize("routing", ["random", "fixed"])
@pytest.mark.parametrize(("stages", "parts"), [(2, 4), (4, 2), (8, 1)])
def test_the_clock_of_a_run_has_the_bubble(stages: int, parts: int, routing: str) -> None:
    replicas = 8 // stages
    local = {"regions": {"a": [1.0] * 8}, "local": {"bandwidth_gbit_s": 1e12}}
    run = timed(
        {
            "pipeline": {"stages": stages, "micro_batches": parts, "routing": routing},
            "topology": local,
            "run": {"steps": replicas * 8},
        }
    )
    assert run.run() == "steps"
    assert run.inner_steps == replicas * 8
    assert run.now == pytest.approx(8 / stages * (parts + stages - 1) / parts, rel=1e-9)
    busy = parts / (parts + stages - 1)
    assert run.recorder.idle_fraction(list(run.actors), run.now) == pytest.approx(
        1 - busy, rel=1e-6
    )


def test_transfers_cost_what_the_topology_says() -> None:
    # Eight stages, 2 micro-batches, 4 steps; between w3 and w4 lies the sea: 0.5 s and 1 byte a
    # second, 3 bytes a micro-batch.
    run = timed(
        {"pipeline": {"stages": 8, "micro_batches": 2}, "run": {"steps": 4}},
        steps=4,
        activation_bytes=6,
    )
    run.run()
    forward_s = 1 / (3 * 2 * 8)
    # The second micro-batch follows the first through a link that is not shared: everything shifts
    # by one crossing each way.
    step_s = 3 * forward_s * (2 + 8 - 1) + 2 * (0.5 + 3.0) + 12 * 3 * 8 / 100e9
    assert run.now == pytest.approx(4 * step_s, rel=1e-6)
    assert run.recorder.messages == 4 * 2 * 2 * 7
    assert run.recorder.sent_bytes == 4 * 2 * 2 * 7 * 3
    assert run.recorder.slow_link_bytes == 4 * 2 * 2 * 1 * 3


def test_an_outer_step_sends_stages_and_not_models() -> None:
    run = timed(
        {
            "pipeline": {"stages": 2},
            "profile": {"model_bytes": 1000, "step_time_s": 1.0},
            "run": {"steps": 32},
        }
    )
    run.run()
    # 4 replicas in pairs, 2 stages, each message with two vectors of half a model.
    outer_step = 8 * 2 * 500
    assert run.recorder.sent_bytes == outer_step


# Numerics


def stages_of(
    task: Task, shape: Pipeline, total: int = 40
) -> tuple[Stages, list[list[Tensor]], list[Tensor]]:
    """A pipeline's stages, the states of its nodes, and their weights, by stage, then replica."""
    stages = Stages(task, Run(total, shape.replicas, 3), CPU, shape)
    nodes = [node for row in stages.replicas for node in row]
    states = [
        [torch.zeros(spec.shape, dtype=spec.dtype) for spec in node.state_specs] for node in nodes
    ]
    for node, state in zip(nodes, states, strict=True):
        node.reset(state)
    return stages, states, [node.layout.read(node.module) for node in nodes]


def gpt_task(**fields: Any) -> Task:
    sizes = {
        "layers": 2,
        "width": 16,
        "heads": 2,
        "sequence": 16,
        "batch_size": 4,
        "valid_sequences": 8,
        "vocabulary": 16,
    }
    recipe = parse_recipe(
        {"method": "noloco", "task": {"name": "synthetic", "tied": False, **sizes, **fields}}
    )
    return make_task(recipe.task)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_one_replica_in_stages_is_the_model_that_is_not_split(stages: int, parts: int) -> None:
    task, run, [shard] = gpt_task(), Run(40, 1, 3), shards_of(["a"], 3)
    whole = Replica(task, run, CPU)
    theta = whole.layout.read(whole.module)
    state = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in whole.state_specs]
    expected = whole.train(state, theta, shard, 20, 0, 0)

    staged, states, thetas = stages_of(task, pipe(stages, 1, parts))
    first = staged.train([0], states, thetas, [shard], 12, [0] * stages, 0)
    second = staged.train([0], states, thetas, [shard], 8, [12] * stages, 12)
    counts = [row[0].layout.parameters for row in staged.replicas]
    torch.testing.assert_close(join(thetas, counts), theta, rtol=2e-4, atol=2e-6)
    assert first[0] + second[0] == pytest.approx(expected, rel=1e-5)


def moved_apart(thetas: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    for theta in thetas:
        theta += 0.3 * torch.randn(theta.shape, generator=generator)


def gradients(
    stages: Stages,
    states: list[list[Tensor]],
    thetas: list[Tensor],
    shards: tuple[Shard, ...],
    step: int,
) -> list[Tensor]:
    """Every node's gradient in one inner step, by stage, then replica."""
    nodes = [node for row in stages.replicas for node in row]
    for node, theta in zip(nodes, thetas, strict=True):
        node._load(theta)
    stages._gradients(range(stages.pipeline.replicas), shards, step)
    return [node.grad.clone() for node in nodes]


def test_identical_replicas_have_the_same_gradient_summed_over_a_stage_whatever_the_routes() -> (
    None
):
    sums: dict[str, list[Tensor]] = {}
    alone: dict[str, Tensor] = {}
    for routing in ("random", "fixed"):
        stages, states, thetas = stages_of(linear_task(), pipe(2, 4, 4, routing))  # type: ignore[arg-type]
        found = gradients(stages, states, thetas, shards_of(["a"] * 4, 3), 0)
        sums[routing] = [torch.stack(found[k * 4 : k * 4 + 4]).sum(dim=0) for k in range(2)]
        alone[routing] = found[4]
    for one, other in zip(sums["random"], sums["fixed"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(alone["random"], alone["fixed"], rtol=1e-2)  # the routes did differ


@pytest.mark.parametrize("routing", ["random", "fixed"])
def test_a_stages_gradient_is_the_sum_over_the_micro_batches_that_it_saw(routing: Routing) -> None:
    task, shape, parts, step = linear_task(), pipe(2, 3, 4, routing), 4, 11
    stages, states, thetas = stages_of(task, shape)
    moved_apart(thetas)
    shards = shards_of(["a"] * 3, 3)
    found = gradients(stages, states, thetas, shards, step)

    # By hand: the model's two linear layers, with tanh in the first stage or the second, as
    # functions of the nodes' weights.
    modules = parts_of(task, 0, 2, 4)
    layouts = [Layout.of(module) for module in modules]
    weights = [theta.clone().requires_grad_() for theta in thetas]
    routes = shape.routes(3, step)
    total = torch.zeros(())
    for q in range(3):
        x, y = task.batches(shards[q], step)
        for j in range(parts):
            rows = slice(2 * j, 2 * j + 2)
            out = x[rows]
            for k in range(2):
                out = functional_call(
                    modules[k], layouts[k].named(weights[3 * k + routes[j, k, q]]), (out,)
                )
            total = total + (out.squeeze(1) - y[rows]).square().mean() / parts
    expected = torch.autograd.grad(total, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_by_the_norm_of_the_whole_replica() -> None:
    task = linear_task()
    task = Task(
        **{
            **task.__dict__,
            "gradient_clip": 0.1,
            "optimizer": lambda m: torch.optim.SGD(m.parameters(), 1.0),
            "schedule": None,
        }
    )
    stages, states, thetas = stages_of(task, pipe(2, 1, 2))
    before = [theta.clone() for theta in thetas]
    stages.train([0], states, thetas, shards_of(["a"], 3), 1, [0, 0], 0)
    moved = torch.cat([b - t for b, t in zip(before, thetas, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.1, rel=1e-4)


def test_buffers_travel_with_their_stage() -> None:
    task = linear_task()
    task = Task(**{**task.__dict__, "model": normed})
    stages, states, thetas = stages_of(task, pipe(2, 2, 2, "fixed"))
    stages.train([1], states[1::2], thetas[1::2], shards_of(["a"] * 2, 3), 3, [0, 0], 0)
    for q, batches in ((0, 0), (1, 6)):
        counters = [
            int(tensor)
            for k in range(2)
            for tensor in states[2 * k + q][1 : 1 + len(stages.replicas[k][q].first_integers)]
        ]
        assert counters == [batches] * 2  # one BatchNorm's counter in each stage
    fresh = [
        row[0].layout.read(row[0].module)
        for row in Stages(task, Run(40, 2, 3), CPU, pipe(2, 2)).replicas
    ]
    for k in range(2):
        parameters = stages.replicas[k][1].layout.parameters
        assert torch.equal(thetas[2 * k], fresh[k])
        assert not torch.allclose(thetas[2 * k + 1][parameters:], fresh[k][parameters:])


def test_a_batch_is_cut_along_its_first_dimension() -> None:
    batch = {
        "x": torch.arange(6).view(6, 1),
        "pair": (torch.arange(6), [torch.ones(6)]),
        "name": "b",
    }
    first, second = micro(batch, 2)
    assert first["x"].flatten().tolist() == [0, 1, 2]
    assert second["pair"][0].tolist() == [3, 4, 5]
    assert second["pair"][1][0].tolist() == [1.0] * 3
    assert second["name"] == "b"
    with pytest.raises(UserError, match=r"4 equal parts cannot be made of a batch of shape \(6,\)"):
        micro(torch.ones(6), 4)


# Runs


SMALL = {
    "name": "synthetic",
    "layers": 2,
    "width": 8,
    "heads": 2,
    "sequence": 8,
    "valid_sequences": 8,
    "vocabulary": 16,
}


def staged_recipe(**fields: Any) -> Recipe:
    return parse_recipe(
        {
            "method": {"name": "noloco", "inner_steps": 5},
            "topology": {
                "regions": {"a": [1.0, 0.8, 0.6, 0.9], "b": [1.0, 0.5, 1.0, 1.0]},
                "default": {"bandwidth_gbit_s": 1.0},
            },
            "task": SMALL,
            "pipeline": {"stages": 2, "micro_batches": 2},
            "run": {"steps": 60, "evaluations": 2},
        }
        | fields
    )


@pytest.fixture
def run(pools: Any) -> Callable[..., dict[str, Any]]:
    def call(recipe: Recipe, out: Path, processes: int = 1) -> dict[str, Any]:
        assemble.check_reachable(recipe)
        return simulation.simulate(recipe, pools(recipe, processes), out)

    return call


@pytest.mark.parametrize("routing", ["random", "fixed"])
def test_one_process_and_two_leave_the_same_files(run: Any, routing: str, tmp_path: Path) -> None:
    recipe = staged_recipe(pipeline={"stages": 2, "micro_batches": 2, "routing": routing})
    for processes in (1, 2):
        run(recipe, tmp_path / str(processes), processes)
    for name in ("metrics.jsonl", "weights.safetensors", "trace.json", "recipe.yaml"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_a_noloco_run_has_no_collective(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced: list[Any] = []
    collective = NodeContext.all_reduce

    def counted(*arguments: Any, **named: Any) -> None:
        reduced.append(arguments)
        collective(*arguments, **named)

    monkeypatch.setattr(NodeContext, "all_reduce", counted)
    summary = run(staged_recipe(), tmp_path / "noloco")
    assert summary["outer_steps"] == 3
    assert summary["inner_steps"] == 60
    assert summary["final_loss"] < 2.78  # log(16) = 2.77 is where it starts
    assert len(reduced) == 0
    run(staged_recipe(method={"name": "diloco", "inner_steps": 5}), tmp_path / "diloco")
    assert len(reduced) == 3 * 8  # the counter counts


def test_routes_bring_replicas_nearer_to_each_other(run: Any, tmp_path: Path) -> None:
    alone = {
        "name": "noloco",
        "inner_steps": 5,
        "group_size": 1,
        "alpha": 0.0,
        "beta": 1.0,
        "gamma": 0.0,
    }
    spread = {
        routing: run(
            staged_recipe(
                method=alone, pipeline={"stages": 2, "micro_batches": 2, "routing": routing}
            ),
            tmp_path / routing,
        )["replica_std"]
        for routing in ("random", "fixed")
    }
    assert 0 < spread["random"] < spread["fixed"]


def test_a_single_replica_without_outer_step_is_plain_training_in_any_number_of_stages(
    run: Any, tmp_path: Path
) -> None:
    losses = []
    for stages in (1, 2, 4):
        recipe = staged_recipe(
            method={"name": "noloco", "inner_steps": 5, "alpha": 0.0, "beta": 1.0},
            topology={"regions": {"a": [1.0] * stages}},
            task={**SMALL, "tied": False},
            pipeline={"stages": stages, "micro_batches": 2},
            run={"steps": 40, "evaluations": 4},
        )
        run(recipe, tmp_path / str(stages))
        losses.append([line["loss"] for line in report.load(tmp_path / str(stages)).evals])
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_a_default_model_in_stages_is_not_tied() -> None:
    assert staged_recipe().task.tied is False  # type: ignore[attr-defined]
    assert staged_recipe(pipeline={"stages": 1}).task.tied is True  # type: ignore[attr-defined]
    assert staged_recipe(task={**SMALL, "tied": True}).task.tied is True  # type: ignore[attr-defined]


def test_the_measured_profile_has_the_activations_of_a_batch(pools: Any) -> None:
    pool = pools(staged_recipe(profile="measured"))
    assert (
        simulation.measure_profile(pool).activation_bytes == 4 * 8 * 8 * 4
    )  # batch, sequence, width, fp32


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (
            {"pipeline": {"stages": 3}},
            UserError,
            "pipeline.stages = 3: topology 'custom' has 8 workers, which is no multiple of that",
        ),
        (
            {"pipeline": {"stages": 0}},
            UserError,
            "pipeline.stages = 0: should be greater than or equal to 1",
        ),
        (
            {"pipeline": {"routing": "fix"}},
            UserError,
            "pipeline.routing = 'fix': should be 'random' or 'fixed'",
        ),
        ({"pipeline": 2}, UserError, "pipeline = 2: expected keys such as `stages: 2`"),
        (
            {"method": "halos"},
            UserError,
            "pipeline.stages = 2: halos cannot run in stages, for it has nodes that are no "
            "workers: ",
        ),
        (
            {"method": "sync_sgd"},
            UserError,
            "sync_sgd: pipeline: this method asks for single gradients, which a model in stages "
            "does not give",
        ),
        (
            {"method": {"name": "noloco", "dynamic_steps": True, "inner_steps": 9}},
            UserError,
            "pipeline.stages = 2: noloco cannot run in stages with dynamic_steps, for all nodes of "
            "a pipeline take equally many",
        ),
        (
            {"task": {**SMALL, "tied": True}},
            UserError,
            "'head.logits.weight' of stage 1 is also in stage 0; untie them",
        ),
        (
            {"pipeline": {"stages": 2, "micro_batches": 3}},
            UserError,
            "pipeline.micro_batches = 3: 3 equal parts cannot be made of a batch of shape (4, 9)",
        ),
    ],
)
def test_pipelines_that_cannot_run(
    run: Any, fields: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as raised:
        run(staged_recipe(**fields), tmp_path / "run")
    assert text in str(raised.value)


def test_a_pipeline_needs_links_between_neighbouring_stages() -> None:
    with pytest.raises(
        UserError, match="a/w0 cannot reach b/w0"
    ):  # one replica: no outer step crosses, but its activations do
        assemble.check_reachable(staged_recipe(topology={"regions": {"a": [1.0], "b": [1.0]}}))
