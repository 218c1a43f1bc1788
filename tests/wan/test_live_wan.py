"""Live runs over a link that is cut for some seconds: who goes on, who waits, and that all train
together afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import network
import pytest
from live_network import LiveNetwork, recipe_of

REASON = network.why_not()
pytest.importorskip("ray")
pytestmark = [
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
