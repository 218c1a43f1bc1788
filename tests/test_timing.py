"""The virtual clock against the published formulas, and against an independent event simulation of
the published rules.
"""

from __future__ import annotations

import heapq
import json
import math
import sys

import pytest

from archipel import cli

MODEL_BITS = 281_706_496 * 8
STEP_S = 0.238391
SPEEDS = [
    [0.232, 0.907, 0.828, 0.347],
    [0.574, 0.531, 0.722, 0.194],
    [0.852, 0.132, 0.896, 0.107],
    [0.827, 0.515, 0.527, 0.788],
]
GBIT_S = [
    [100.0, 0.537, 0.935, 0.202],
    [0.537, 100.0, 0.386, 0.117],
    [0.935, 0.386, 100.0, 0.127],
    [0.202, 0.117, 0.127, 100.0],
]
PLAN = 98_304
RING_S = 2 * 15 / 16 * MODEL_BITS / 0.127e9
REL = 1e-9


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """`archipel compare --task none` with the published settings, as a user runs it."""
    out = tmp_path_factory.mktemp("timing")
    command = (
        "compare --task none --topology halos-4x4 --profile pythia-70m-h100 --steps 98304 "
        "--json --out"
    )
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr(sys, "argv", ["archipel", *command.split(), str(out)])
        patch.setattr("builtins.print", lambda text: printed.append(text))
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 0
    answer = json.loads("\n".join(printed))
    assert set(answer) == {"runs", "target_loss", "real", "modelled"}
    return {run["label"]: run for run in answer["runs"]}


def steps_of(h: int, speed: float) -> int:
    return max(1, math.ceil(h * speed / 0.907))


def transfer_s(a: int, b: int) -> float:
    return MODEL_BITS / (GBIT_S[a][b] * 1e9)


def async_reference(h: int) -> tuple[float, int, int]:
    """(seconds, server updates, inner steps) by the published rule: a round trip is one event of 2
    transfers and the training.
    """
    heap, sequence = [], 0
    for region, speeds in enumerate(SPEEDS):
        for speed in speeds:
            steps = steps_of(h, speed)
            seconds = 2 * transfer_s(0, region) + steps * STEP_S * 0.907 / speed
            heapq.heappush(heap, (seconds, sequence, steps, seconds))
            sequence += 1
    absorbed = updates = 0
    while True:
        now, _, steps, seconds = heapq.heappop(heap)
        absorbed, updates, sequence = absorbed + steps, updates + 1, sequence + 1
        if absorbed >= PLAN:
            return now, updates, absorbed
        heapq.heappush(heap, (now + seconds, sequence, steps, seconds))


def halos_reference(h: int, k: int) -> tuple[float, int, int, int]:
    """(seconds, global updates, local updates, inner steps) by the published rule; one report of a
    server in flight at a time.
    """
    heap: list = []
    sequence = 0

    def push(time: float, *event: object) -> None:
        nonlocal sequence
        heapq.heappush(heap, (time, sequence, *event))
        sequence += 1

    for region, speeds in enumerate(SPEEDS):
        for speed in speeds:
            steps = steps_of(h, speed)
            seconds = 2 * transfer_s(region, region) + steps * STEP_S * 0.907 / speed
            push(seconds, "worker", region, steps, seconds)
    version, merged, unreported = [0] * 4, [0] * 4, [0] * 4
    absorbed = updates = 0
    while True:
        now, _, kind, region, *rest = heapq.heappop(heap)
        if kind == "worker":
            steps, seconds = rest
            version[region] += 1
            unreported[region] += steps
            if version[region] == merged[region] + k:
                push(now + transfer_s(region, 0), "report", region, unreported[region])
                unreported[region] = 0
            push(now + seconds, "worker", region, steps, seconds)
        elif kind == "report":
            absorbed, updates = absorbed + rest[0], updates + 1
            if absorbed >= PLAN:
                return now, updates, sum(version), absorbed
            push(now + transfer_s(0, region), "merge", region)
        else:
            merged[region] = version[region]


def test_synchronous_sgd_waits_for_the_slowest_worker_and_the_ring(runs: dict[str, dict]) -> None:
    step_s = STEP_S * 0.907 / 0.107 + RING_S
    assert step_s == pytest.approx(35.2931744, rel=REL)
    assert runs["sync_sgd"]["time_s"] == pytest.approx(6144 * step_s, rel=REL)
    assert runs["sync_sgd"]["inner_steps"] == PLAN


def test_diloco_takes_192_rounds(runs: dict[str, dict]) -> None:
    assert runs["diloco"]["outer_steps"] == 192
    assert runs["diloco"]["time_s"] / 192 == pytest.approx(97.93653652571933, rel=REL)
    assert runs["diloco"]["time_s"] == pytest.approx(18_803.815, abs=5e-4)
    assert runs["diloco"]["inner_steps"] == PLAN


def test_diloco_with_dynamic_steps_takes_303_rounds(runs: dict[str, dict]) -> None:
    run = runs["diloco+dynamic_steps"]
    assert run["outer_steps"] == 303
    assert run["time_s"] / 303 == pytest.approx(41.660290326194676, rel=REL)
    assert run["inner_steps"] == 303 * sum(
        steps_of(32, speed) for speeds in SPEEDS for speed in speeds
    )


def test_async_local_sgd_follows_the_published_events(runs: dict[str, dict]) -> None:
    run, (seconds, updates, steps) = runs["async_local_sgd"], async_reference(32)
    assert (run["outer_steps"], run["inner_steps"]) == (updates, steps)
    assert run["time_s"] == pytest.approx(seconds, rel=REL)


def test_halos_follows_the_published_events(runs: dict[str, dict]) -> None:
    run, (seconds, global_updates, local_updates, steps) = runs["halos"], halos_reference(32, 32)
    assert (run["outer_steps"], run["local_updates"], run["inner_steps"]) == (
        global_updates,
        local_updates,
        steps,
    )
    assert run["time_s"] == pytest.approx(seconds, rel=REL)


def test_bytes_of_the_ring(runs: dict[str, dict]) -> None:
    """Each of n workers sends 2(n − 1)/n of a model in a round; a ring through 4 regions has 4
    links of 16 between them.
    """
    sent = 192 * 2 * 15 * MODEL_BITS // 8
    assert runs["diloco"]["sent_bytes"] == sent
    assert runs["diloco"]["slow_link_bytes"] == sent // 4


def test_bytes_of_messages(runs: dict[str, dict]) -> None:
    """Every message of HALoS carries one model, and those that leave a region are reports and
    merges of regions 1 to 3.
    """
    assert runs["halos"]["sent_bytes"] == runs["halos"]["messages"] * MODEL_BITS // 8
    assert runs["halos"]["slow_link_bytes"] < 0.03 * runs["halos"]["sent_bytes"]


def test_what_does_not_apply_is_null(runs: dict[str, dict]) -> None:
    for run in runs.values():
        nothing = ("tokens", "final_loss", "best_loss", "time_to_target_s")
        assert [run[key] for key in nothing] == [None] * 4
    assert runs["sync_sgd"]["outer_steps"] is None
    assert runs["diloco"]["local_updates"] is None


def test_idle_time_is_what_is_not_computing(runs: dict[str, dict]) -> None:
    busy = sum(32 * STEP_S * 0.907 / speed for speeds in SPEEDS for speed in speeds)
    assert runs["diloco"]["idle_fraction"] == pytest.approx(
        1 - busy / (16 * 97.93653652571933), rel=REL
    )
