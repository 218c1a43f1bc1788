"""`live/probe.py` and `fidelity.py`: what is measured of a cluster, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from live_recipes import PROFILE, TASK, TWO, recipe

from archipel import cli, fidelity
from archipel.actor import NodeId
from archipel.errors import UserError
from archipel.live.line import LineSetup
from archipel.live.probe import OVERHEAD, End, Measured, Probed, probe, rate
from archipel.report import Result
from archipel.sim.topology import load_topology
from archipel.transport.keys import Keys

live = pytest.importorskip("archipel.live.cluster")


def test_the_rate_is_that_behind_the_first_quarter() -> None:
    pace = [0.5] * 16 + [0.125] * 48  # a slow start, then 8 a second
    assert rate([*np.cumsum(pace)]) == pytest.approx(8.0)
    noise = np.random.default_rng(0).normal(0, 0.05, 64)
    assert rate([*(np.cumsum(pace) + noise)]) == pytest.approx(8.0, rel=0.02)


def test_two_ends_measure_what_is_between_them() -> None:
    keys = Keys.make()
    ends = [End(LineSetup(keys, "127.0.0.1", (), 10.0)) for _ in range(2)]
    try:
        trips = ends[0].ping(ends[1].address(), 5)
        assert len(trips) == 5
        assert all(0 < trip < 5 for trip in trips)
        # Something between a slow machine's loopback and the fastest memory.
        assert 1e6 < ends[0].push(ends[1].address(), 1 << 20) < 1e12
    finally:
        for end in ends:
            end.transport.close()


def test_an_end_that_nobody_answers_says_so() -> None:
    end = End(LineSetup(Keys.make(), "127.0.0.1", (), 10.0))
    end._failed(end.address(), "it has taken nothing for 10 s")
    with pytest.raises(Exception, match="it has taken nothing"):
        end.ping(end.address(), 1)
    end.transport.close()


def probed(**steps: float) -> Probed:
    link = Measured(2.5e6, 2.0e6, (2.4e6, 1.9e6), round_trip_s=0.1, jitter=0.01)
    times = {NodeId(*name.split("_")): each for name, each in steps.items()}
    return Probed({("east", "west"): link}, times)


def test_a_topology_has_what_was_measured() -> None:
    chosen = recipe("halos", **TWO)
    found = probed().topology(chosen)
    [link] = found.links
    # 2 MB a second of messages in the slower direction are 16.75 Mbit/s with their headers.
    assert link.bandwidth_gbit_s == pytest.approx(0.016 * (1 + OVERHEAD), rel=1e-3)
    assert link.bandwidth_bytes_per_s == pytest.approx(2.0e6, rel=1e-3)
    assert (link.latency_ms, link.jitter) == (50.0, 0.0)
    assert (found.sharing, found.collective, found.default) == ("fair", "chain", None)
    assert found.regions == {"east": [1.0], "west": [0.5]}  # as the recipe says
    found = probed(east_w0=0.03, west_w0=0.02).topology(chosen)
    assert found.regions == {"east": [0.6667], "west": [1.0]}
    assert probed(east_w0=0.03, west_w0=0.02).step_time_s(chosen) == 0.02
    assert probed().step_time_s(chosen) == PROFILE["step_time_s"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("abcd", "abcd", 1.0),
        ("abcd", "dcba", 0.0),
        ("abcd", "bacd", 5 / 6),
        ("abcd", "axcd", 1.0),
        ("a", "a", None),
        ("", "", None),
    ],
)
def test_the_order_of_events_is_a_part_of_pairs(one: str, other: str, same: float | None) -> None:
    assert fidelity.order([(x, 1) for x in one], [(x, 1) for x in other]) == same


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    def result(name: str, time_s: float, idle: float) -> Result:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(
            '{"kind": "eval"}\n{"kind": "train", "time_s": 1.0, "node": "a/w0"}\n'
        )
        summary: dict[str, Any] = {"time_s": time_s, "idle_fraction": idle, "outer_steps": 3}
        return Result(folder, {**summary, "local_updates": None}, [])

    both = fidelity.compared(result("live", 11.0, 0.4), result("simulated", 10.0, 0.2))
    assert [(row.name, row.simulated, row.live) for row in both.rows] == [
        ("time, s", 10.0, 11.0),
        ("computing, part of the time", 0.8, 0.6),
        ("outer steps", 3.0, 3.0),
    ]
    assert both.rows[0].off == pytest.approx(0.1)
    assert fidelity.Row("nothing", 0.0, 1.0).off is None


def test_a_run_that_sends_nothing_cannot_be_compared() -> None:
    with pytest.raises(UserError, match=r"^task none: a live run of it sends empty vectors"):
        fidelity.check(recipe("halos", task={"name": "none"}))


@pytest.mark.parametrize(
    ("pace", "profile"), [("none", "pythia-70m-h100"), ("profile", "measured")]
)
def test_a_topology_alone_does_not_say_how_long_an_inner_step_takes(
    pace: str,
    profile: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, topology = tmp_path / "recipe.yaml", tmp_path / "topology.yaml"
    file.write_text(yaml.safe_dump({"method": "halos", "live": {"pace": pace}, "profile": profile}))
    topology.write_text(yaml.safe_dump(TWO["topology"]))
    command = ["archipel", "fidelity", str(file), "--topology", str(topology)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "a topology does not say how long an inner step takes here" in told


@pytest.mark.live
def test_a_cluster_is_probed_and_a_run_foretold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One Ray session; the clock of a busy machine is not judged, what does not hang on it is."""
    fields = {
        "method": {"name": "diloco", "inner_steps": 5},
        "profile": PROFILE,
        "task": TASK,
        "run": {"steps": 40, "evaluations": 1},
        **TWO,
    }
    file, out = tmp_path / "recipe.yaml", tmp_path / "measured" / "topology.yaml"
    file.write_text(yaml.safe_dump(fields))
    with live.session(None):
        found = probe(recipe("diloco", **TWO), seconds=0.05)
        assert set(found.step_times_s) == {NodeId("east", "w0"), NodeId("west", "w0")}
        command = ["topology", "probe", str(file), "--seconds", "0.1", "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["archipel", *command, "--set", "live.pace=profile"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        measured = load_topology(str(out))
        assert measured.regions == TWO["topology"]["regions"]
        assert "both at once" in capsys.readouterr().out
        monkeypatch.setattr(
            "sys.argv",
            [
                *("archipel", "fidelity", str(file), "--set", "live.pace=profile", "--json"),
                *("--topology", str(out), "--out", str(tmp_path / "runs")),
            ],
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    told = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row["off"] for row in told["rows"]}
    for equal in ("outer steps", "bytes between regions", "bytes on all links"):
        assert rows[equal] == 0.0, rows
    assert (tmp_path / "runs" / "live").is_dir()
