"""What the live runtime costs, as ratios each measured in one run on this machine: `make
bench-live`.

1. A live run of DiLoCo, one worker a core, ÷ the same inner steps as plain PyTorch loops in as many
processes (tokens per second).
2. A vector of 40 MB from one host to another, and an answer, ÷ the same between two plain Ray
actors with NumPy (MB per second).

Each ratio is the median over rounds in which both sides take turns. Start-up is in neither side.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ping
import ray
import torch

from archipel.live import cluster, launch
from archipel.recipe import Recipe, parse_recipe
from bench import paired

HERE = Path(__file__).parent
TASK = {
    "name": "stdlib",
    "layers": 4,
    "width": 128,
    "heads": 4,
    "sequence": 128,
    "batch_size": 8,
    "valid_sequences": 1,
}


def recipe(workers: int, steps: int, method: Any, task: Any) -> Recipe:
    return parse_recipe(
        {
            "method": method,
            "topology": {"regions": {"a": [1.0] * workers}},
            "task": task,
            "run": {"steps": steps, "evaluations": 1},
        }
    )


def live_tokens_per_s(workers: int, steps: int, folder: Path) -> float:
    chosen = recipe(workers, steps * workers, {"name": "diloco", "inner_steps": 32}, TASK)
    summary = launch.launch(chosen, folder / "run")
    return float(summary["tokens"] / summary["time_s"])


def bare_tokens_per_s(workers: int, steps: int) -> float:
    loop = (
        "import torch; torch.set_num_threads(1); from bench import bare_loop; "
        f"print(bare_loop({steps}, **{TASK!r}))"
    )
    command = [sys.executable, "-c", loop]
    loops = [
        subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
        for _ in range(workers)
    ]
    return sum(float(loop.communicate()[0]) for loop in loops)


def live_mb_per_s(messages: int, folder: Path) -> float:
    summary = launch.launch(recipe(2, messages, str(HERE / "ping.py"), "none"), folder / "run")
    return float(4e-6 * ping.NUMEL * summary["inner_steps"] / summary["time_s"])


@ray.remote(num_cpus=0)
class Plain:
    def take(self, array: np.ndarray) -> int:
        return len(array)

    def mb_per_s(self, other: Any, messages: int) -> float:
        array = np.ones(ping.NUMEL, np.float32)
        ray.get(other.take.remote(array))
        started = time.perf_counter()
        for _ in range(messages):
            ray.get(other.take.remote(array))
        return 1e-6 * array.nbytes * messages / (time.perf_counter() - started)


def ray_mb_per_s(messages: int) -> float:
    first, second = Plain.remote(), Plain.remote()
    rate = float(ray.get(first.mb_per_s.remote(second, messages)))
    for actor in (first, second):
        ray.kill(actor)
    return rate


def show(what: str, aim: float, measured: tuple[float, float, float, float], unit: str) -> None:
    ratio, low, high, base = measured
    print(
        f"{what:<58} {ratio:5.2f}  ({low:.2f} to {high:.2f}; aim {aim:.2f}; base {base:,.0f} "
        f"{unit})",
        flush=True,
    )


def main() -> None:
    """Print the ratios, one a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="live workers, and bare loops",
    )
    parser.add_argument("--steps", type=int, default=256, help="inner steps of each worker")
    parser.add_argument("--messages", type=int, default=100, help="of 40 MB each")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    arguments = parser.parse_args()
    workers, steps, messages, rounds = (
        arguments.workers,
        arguments.steps,
        arguments.messages,
        arguments.rounds,
    )
    print(f"torch {torch.__version__}, ray {ray.__version__}, {workers} workers, {rounds} rounds")
    with tempfile.TemporaryDirectory() as name, cluster.session(None):
        folder = Path(name)
        show(
            "live DiLoCo ÷ bare loops in as many processes",
            0.95,
            paired(
                rounds,
                lambda: live_tokens_per_s(workers, steps, folder),
                lambda: bare_tokens_per_s(workers, steps),
            ),
            "tokens/s",
        )
        show(
            "40 MB between hosts ÷ between plain Ray actors, NumPy",
            0.9,
            paired(rounds, lambda: live_mb_per_s(messages, folder), lambda: ray_mb_per_s(messages)),
            "MB/s",
        )


if __name__ == "__main__":
    main()
