"""Live runs over a link that is cut for some seconds: who goes on, who waits, and that all train
together afterwards; and one whose command is cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import network
import pytest
from live_network import LiveNetwork, recipe_of

REASON = network.why_not()
pytest.importorskip("ray")
pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

DEADLINE_S = 6.0
CUT_S = 11.0
H = 4


@pytest.fixture(scope="module")
def live() -> Iterator[LiveNetwork]:
    with LiveNetwork() as opened:
        yield opened


@pytest.mark.parametrize("method", ["halos", "noloco", "diloco"])
def test_a_run_survives_a_cut_between_its_regions(live: LiveNetwork, method: str) -> None:
    recipe = recipe_of(
        method,
        workers=2,
        inner_steps=H,
        step_time_s=0.1,
        run={"steps": 800, "evaluations": 4},
        live={"pace": "profile", "deadline_s": DEADLINE_S},
    )
    run = live.launch(recipe, method)
    run.until(lambda said: "steps, " in said, 200)
    live.network.set_up("east", "west", up=False)
    try:
        run.until(lambda said: "the link between east and west is cut" in said, 3 * DEADLINE_S)
        time.sleep(CUT_S - DEADLINE_S)
    finally:
        live.network.set_up("east", "west", up=True)
    summary = run.summary(200)
    happened = [(outage["what"], outage["who"]) for outage in summary["outages"]]
    assert happened == [("cut", "east – west"), ("mended", "east – west")]
    assert "east and west reach each other again" in run.said()
    apart_s = summary["outages"][1]["time_s"] - summary["outages"][0]["time_s"]
    # All train 0.1 s a step, and those who wait do nothing else.
    busy = 1 - summary["idle_fraction"]
    rate = summary["inner_steps"] / 4 * 0.1 / summary["time_s"]
    if method == "diloco":
        assert busy < 1 - (apart_s + DEADLINE_S / 2) / summary["time_s"]
        # Each round counts once: the inner steps of four workers.
        assert summary["absorbed_steps"] == summary["inner_steps"]
        assert summary["inner_steps"] == 4 * H * summary["outer_steps"]
    else:
        assert busy > 0.6
    assert rate <= busy + 0.05  # nothing is counted that nobody has trained
    assert summary["final_loss"] < 3.6  # at first 4.2


def test_a_detached_run_goes_on_when_the_machine_of_its_command_is_cut_off() -> None:
    with LiveNetwork(others=("desk",)) as live:
        recipe = recipe_of(
            "noloco",
            workers=1,
            inner_steps=H,
            step_time_s=0.1,
            run={"steps": 400, "evaluations": 2},
            live={"pace": "profile", "deadline_s": DEADLINE_S},
        )
        command = live.launch(recipe, "detached", "--detach", region="desk")
        command.until(lambda said: "is being started" in said, 60)
        wait_until(lambda: live.hosts("east") and live.hosts("west"), 60)
        for region in ("home", "east", "west"):
            live.network.set_up("desk", region, up=False)
        attached = live.archipel("detached", "attach", "noloco-seed0")
        summary = attached.summary(120)
        assert summary["inner_steps"] == 400
        assert summary["outages"] == []
        assert summary["restarts"] == {}


def wait_until(holds: Callable[[], object], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.1)
