"""Speed as ratios, each measured in one run on this machine: `make bench`.

1. A simulated run of DiLoCo on 16 workers with one process ÷ a bare PyTorch loop over the same
inner steps (tokens per second).
2. The same run with two processes ÷ with one, and the same of HALoS, which has no barriers.
3. The default model, 128 wide: bf16 autocast ÷ fp32 (tokens per second of the bare loop).
4. An outer step on vectors of 40 MB ÷ memory bandwidth: the time that the rule takes, over the time
in which a copy would move as many bytes as the rule's vectors have, each read once and, if it
changes, written once.
5. Events that the simulator handles in a second of one core, where nothing is trained.

Each ratio is the median over rounds in which both sides are measured one after the other, so that a
machine that slows down slows both. The last two are in seconds of the processor's time, since they
keep one thread busy.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from archipel import outer, simulation
from archipel.recipe import Recipe, parse_recipe
from archipel.train.data import Shard
from archipel.train.pool import Pool
from archipel.train.task import make_task

WORKERS = 16
ENTRIES = 10**7
"""Of a vector of 40 MB."""


def recipe(steps: int, method: str = "diloco", **task: Any) -> Recipe:
    """A method on 16 equal workers; no evaluation but the first and the last."""
    return parse_recipe(
        {
            "method": {"name": method, "inner_steps": 16},
            "topology": {"regions": {"a": [1.0] * WORKERS}},
            "task": {"name": "stdlib", "valid_sequences": 1, **task},
            "run": {"steps": steps, "evaluations": 1},
        }
    )


def bare_loop(steps: int, **task_fields: Any) -> float:
    """Tokens per second of plain PyTorch on one thread: the same model, batches, AdamW, clipping
    and schedule.
    """
    task = make_task(recipe(steps, **task_fields).task)
    model = task.seeded_model(0)
    optimizer = task.optimizer(model)
    assert task.schedule is not None
    assert task.gradient_clip is not None
    started = 0.0
    warm_up = min(20, steps // 2)
    for step in range(-warm_up, steps):
        if step == 0:
            started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * task.schedule.factor(max(step, 0) / WORKERS, steps / WORKERS)
        batch = task.batches(Shard(step % WORKERS, WORKERS, 0, 1, 0), abs(step) // WORKERS)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if task.autocast else contextlib.nullcontext():
            loss = task.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.gradient_clip)
        optimizer.step()
        loss.item()
    return steps * task.tokens_per_step / (time.perf_counter() - started)


def simulated(pool: Pool, steps: int, folder: Path, method: str = "diloco") -> float:
    """Tokens per second of a whole simulated run, its two evaluations and its files among it; the
    processes are up already.
    """
    summary = simulation.simulate(recipe(steps, method), pool, folder / "run")
    return float(summary["tokens"] / summary["wall_s"])


def median_ms(action: Callable[[], object]) -> float:
    """Milliseconds of the processor's time: the median of seven calls, after one to warm up."""
    times = []
    action()
    for _ in range(7):
        started = time.process_time()
        action()
        times.append(1e3 * (time.process_time() - started))
    return statistics.median(times)


def outer_steps() -> dict[str, tuple[int, Callable[[], None]]]:
    """Each outer rule: how many vectors one step reads or writes once, and the step."""
    theta, gradient, velocity, *others = torch.randn(6, ENTRIES).unbind()
    step = outer.nesterov(0.7, 0.9, ENTRIES)
    delayed = outer.delayed_nesterov(1.6, 0.9, 32, ENTRIES)

    def gossip() -> None:
        members = [gradient, others[0]], [others[1], others[2]]
        outer.gossip(theta, velocity, *members, alpha=0.5, beta=0.7, gamma=0.7)

    return {
        "gossip of two": (8, gossip),  # reads φ, δ and what both members sent; writes φ and δ
        "nesterov": (5, lambda: step.step(theta, gradient)),  # reads θ, m, g; writes θ, m
        "delayed nesterov": (5, lambda: delayed.step(theta, gradient)),  # θ, A, g; θ, A
    }


def copied_ms(vectors: int) -> float:
    """Milliseconds in which a copy reads or writes so many vectors."""
    source, target = torch.ones(ENTRIES), torch.zeros(ENTRIES)
    return vectors / 2 * median_ms(lambda: target.copy_(source))


def events_per_s(method: str, topology: str, steps: int) -> float:
    """Events in a second of the processor's time, the making of the simulator not counted."""
    fields = {"method": method, "topology": topology, "task": "none", "run": {"steps": steps}}
    simulator = simulation.make_simulator(parse_recipe(fields), None)
    started = time.process_time()
    simulator.run()
    return simulator.state.events / (time.process_time() - started)


def paired(
    rounds: int, first: Callable[[], float], second: Callable[[], float]
) -> tuple[float, float, float, float]:
    """(median ratio first ÷ second, smallest, largest, median of second) over rounds in which the
    two take turns.
    """
    pairs = [(first(), second()) for _ in range(rounds)]
    ratios = [a / b for a, b in pairs]
    return (
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(b for _, b in pairs),
    )


def show(
    what: str, aim: float, measured: tuple[float, float, float, float], unit: str = "tokens/s"
) -> None:
    ratio, low, high, base = measured
    print(
        f"{what:<62} {ratio:5.2f}  ({low:.2f} to {high:.2f}; aim {aim:.2f}; base {base:,.0f} "
        f"{unit})",
        flush=True,
    )


def main() -> None:
    """Print the ratios, one a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2048, help="inner steps of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    arguments = parser.parse_args()
    steps, rounds = arguments.steps, arguments.rounds
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {rounds} rounds of "
        f"{steps} inner steps"
    )
    with (
        tempfile.TemporaryDirectory() as name,
        simulation.open_pool(recipe(steps), 1) as one,
        simulation.open_pool(recipe(steps), 2) as two,
    ):
        folder = Path(name)
        assert one is not None
        assert two is not None
        for pool in (one, two):
            simulated(pool, 256, folder)  # warm up
        show(
            "simulated run, 16 workers, 1 process ÷ bare loop, diloco",
            0.97,
            paired(rounds, lambda: simulated(one, steps, folder), lambda: bare_loop(steps)),
        )
        for method in ("diloco", "halos"):
            show(
                f"simulated run, 16 workers, 2 processes ÷ 1 process, {method}",
                1.85,
                paired(
                    rounds,
                    lambda method=method: simulated(two, steps, folder, method),  # type: ignore[misc]
                    lambda method=method: simulated(one, steps, folder, method),  # type: ignore[misc]
                ),
            )
    wide = {"layers": 4, "width": 128, "heads": 4, "sequence": 128, "batch_size": 8}
    show(
        "bf16 autocast ÷ fp32, bare loop, 4 x 128, sequence 128",
        1.3,
        paired(
            rounds, lambda: bare_loop(8, precision="bf16", **wide), lambda: bare_loop(8, **wide)
        ),
    )
    for name, (vectors, step) in outer_steps().items():
        show(
            f"outer step ÷ memory bandwidth, {name}",
            1.5,
            paired(
                rounds,
                lambda step=step: median_ms(step),  # type: ignore[misc]
                lambda vectors=vectors: copied_ms(vectors),  # type: ignore[misc]
            ),
            "ms",
        )
    for method, topology, planned in (
        ("noloco", "internet-1000", 500_000),
        ("halos", "halos-4x4", 98_304),
    ):
        measured = [events_per_s(method, topology, planned) for _ in range(rounds)]
        print(
            f"{f'events a second, {method} on {topology}':<62} "
            f"{statistics.median(measured):,.0f}  "
            f"({min(measured):,.0f} to {max(measured):,.0f}; aim 100,000)",
            flush=True,
        )


if __name__ == "__main__":
    main()
