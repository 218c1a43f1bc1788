"""What goes wrong on purpose in a live run: what is done when, and that both clocks then take the
same decisions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import archipel
from archipel.actor import NodeId
from archipel.errors import UserError
from archipel.live.on_purpose import Cut, Kill, OnPurpose, deeds_of, faults_of
from archipel.recipe import Recipe, parse_recipe

E0, E1, W0 = NodeId("east", "w0"), NodeId("east", "w1"), NodeId("west", "w0")
NODES = [E0, E1, W0]


def recipe(*faults: dict[str, Any], **more: Any) -> Recipe:
    return parse_recipe(
        {
            "method": {"name": "noloco"},
            "topology": {
                "regions": {"east": [1.0, 1.0], "west": [1.0]},
                "default": {"bandwidth_gbit_s": 1.0},
            },
            "faults": {"schedule": list(faults), **more},
        }
    )


SCHEDULE = (
    {"kind": "link_down", "between": ["west", "east"], "at_s": 4, "for_s": 3},
    {"kind": "crash", "node": "east/w0", "at_s": 5, "restart_after_s": 10},
    {"kind": "leave", "node": "east/w1", "at_s": 2},
)


class Hosts:
    """In the place of a fleet: notes what hosts are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self.places = self.addresses = dict.fromkeys(NODES)
        self.hosts = {node: self._host(str(node)) for node in NODES}

    def _host(self, name: str) -> Any:
        def note(what: str) -> Any:
            return SimpleNamespace(
                remote=lambda *off: self.told.append(
                    (name, what, *sorted(str(node) for nodes in off for node in nodes))
                )
            )

        return SimpleNamespace(die=note("die"), cut=note("cut"))

    def __contains__(self, node: NodeId) -> bool:
        return node in self.hosts


def purpose(*faults: dict[str, Any], since_s: float = 0.0) -> tuple[OnPurpose, Hosts]:
    found, hosts = faults_of(recipe(*faults), NODES), Hosts()
    assert found is not None
    return OnPurpose(cast(Any, hosts), deeds_of(found, since_s)), hosts


def test_deeds_come_in_the_order_of_time() -> None:
    made, _ = purpose(*SCHEDULE)
    assert made.deeds == [
        (2, Kill(E1, math.inf, leaves=True)),
        (4, Cut(("east", "west"))),
        (5, Kill(E0, 15)),
        (7, Cut(("east", "west"), mended=True)),
    ]


def test_hosts_are_told_what_is_due() -> None:
    made, hosts = purpose(*SCHEDULE)
    assert made.act(1.9) == []
    assert hosts.told == []
    assert made.act(3.0) == [E1]
    assert hosts.told == [("east/w1", "die")]
    hosts.told.clear()
    assert made.act(4.5) == []
    assert hosts.told == [
        ("east/w0", "cut", "west/w0"),
        ("east/w1", "cut", "west/w0"),
        ("west/w0", "cut", "east/w0", "east/w1"),
    ]
    hosts.told.clear()
    made.act(6.0)
    assert hosts.told == [("east/w0", "die")]
    assert made.is_away(E0, 14.9)
    assert not made.is_away(E0, 15.1)
    assert (made.returns(E0), made.returns(E1), made.returns(W0)) == (True, False, True)
    hosts.told.clear()
    made.act(8.0)
    assert [told[2:] for told in hosts.told] == [(), (), ()]


def test_a_run_that_goes_on_does_not_kill_again() -> None:
    made, _ = purpose(*SCHEDULE, since_s=6.0)
    assert [at_s for at_s, _ in made.deeds] == [2, 4, 7]  # one left for good; the link is mended


@pytest.mark.parametrize("kind", ["slow", "join", "loss", "delay", "duplicate"])
def test_what_only_the_virtual_clock_can_act_out_is_refused(kind: str) -> None:
    fields: dict[str, dict[str, Any]] = {
        "slow": {"node": "east/w0", "for_s": 1, "factor": 2},
        "join": {"node": "east/w0"},
        "loss": {"for_s": 1, "probability": 0.5},
        "delay": {"for_s": 1, "extra_s": 1},
        "duplicate": {"for_s": 1, "probability": 0.5},
    }
    with pytest.raises(
        UserError,
        match=rf"^faults: `archipel launch` cannot make '{kind}', `archipel run` can; live there "
        r"are crash, leave, link_down, partition$",
    ):
        faults_of(recipe({"kind": kind, "at_s": 1, **fields[kind]}), NODES)


def decisions(summary: dict[str, Any]) -> list[tuple[str, str]]:
    return [(outage["what"], outage["who"]) for outage in summary["outages"]]


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("method", ["noloco", "halos"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_clocks_take_the_same_decisions(method: str, tmp_path: Path) -> None:
    """Who is lost and who is back, in which order. A restart takes a live run some seconds more."""
    pytest.importorskip("ray")
    fields = {
        "method": {"name": method, "inner_steps": 4},
        "topology": {
            "regions": {"east": [1.0, 1.0], "west": [1.0, 1.0]},
            "default": {"bandwidth_gbit_s": 1.0},
        },
        "task": {"name": "synthetic", "width": 16, "layers": 1, "valid_sequences": 8},
        "profile": {"name": "here", "model_bytes": 20000, "step_time_s": 0.1},
        "run": {"steps": 10**6, "seconds": 45, "evaluations": 2},
        "live": {"pace": "profile", "deadline_s": 5},
        "faults": {
            "deadline_s": 5,
            "schedule": [
                {"kind": "crash", "node": "west/w1", "at_s": 2, "restart_after_s": 1},
                {"kind": "link_down", "between": ["east", "west"], "at_s": 22, "for_s": 10},
                {"kind": "leave", "node": "east/w1", "at_s": 39},
            ],
        },
    }
    simulated = archipel.simulate(fields, out=tmp_path / "simulated").summary
    live = archipel.launch(fields, out=tmp_path / "live").summary
    assert decisions(live) == decisions(simulated)
    assert decisions(live) == [
        ("lost", "west/w1"),
        ("joined", "west/w1"),
        ("cut", "east – west"),
        ("mended", "east – west"),
        ("lost", "east/w1"),
    ]
    assert live["restarts"] == {"west/w1": 1}
    assert (live["faults_planned"], live["faults_happened"]) == (3, 3)
    json.dumps(live["outages"])
