"""Live runs in which processes die and stand still and a link is cut, at random moments.

Three events with one method; `make wan` (ARCHIPEL_LONG=1) has twenty events with each method, which
takes twenty minutes. The log of what happened is printed.
"""

from __future__ import annotations

import os

import network
import pytest
from chaos import Chaos
from live_network import LiveNetwork

REASON = network.why_not()
pytest.importorskip("ray")
pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
LONG = os.environ.get("ARCHIPEL_LONG") == "1"
METHODS = ["halos", "noloco", "async_local_sgd", "diloco", "sync_sgd"] if LONG else ["halos"]


@pytest.mark.parametrize("method", METHODS)
def test_whatever_dies_stands_still_or_is_cut_off_the_loss_goes_down(method: str) -> None:
    chaos = Chaos(method, seed=7, events=20 if LONG else 3)
    with LiveNetwork() as live:
        try:
            chaos.run(live)
        finally:
            print(f"{method}, seed {chaos.seed}:\n{chaos}")
