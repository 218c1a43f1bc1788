"""Worlds that nobody would build: every method runs in them, or refuses with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import small

from archipel import assemble, methods, simulation
from archipel.errors import UserError
from archipel.recipe import Recipe, parse_recipe

DEFAULT = {"bandwidth_gbit_s": 1.0, "latency_ms": 5.0}
WORLDS = {
    "one worker": {"a": [1.0]},
    "two workers": {"a": [1.0, 0.3]},
    "three workers": {"a": [1.0, 0.5, 0.2]},
    "a region with one worker": {"a": [1.0, 1.0, 0.7, 0.7], "b": [0.1]},
    "every region with one worker": {"a": [1.0], "b": [0.5], "c": [0.3]},
    "an empty region": {"a": [1.0, 1.0], "b": []},
}


def odd(method: str, regions: dict[str, list[float]], **settings: Any) -> Recipe:
    return parse_recipe(
        {
            "method": {"name": method, **small(method, **settings)},
            "topology": {"regions": regions, "default": DEFAULT},
            "task": "none",
            "run": {"steps": 60, "evaluations": 2},
        }
    )


def run(recipe: Recipe, out: Path) -> dict[str, Any]:
    assemble.check_reachable(recipe)
    return simulation.simulate(recipe, None, out)


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize("world", WORLDS)
def test_it_runs(method: str, world: str, tmp_path: Path) -> None:
    summary = run(odd(method, WORLDS[world]), tmp_path / "run")
    assert summary["stopped"] == "steps"
    assert 60 <= summary["inner_steps"] <= 60 + 3 * 5 * 3  # at most one round of everybody further
    assert summary["time_s"] > 0


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize("world", WORLDS)
def test_one_inner_step_at_a_time(method: str, world: str, tmp_path: Path) -> None:
    summary = run(odd(method, WORLDS[world], inner_steps=1), tmp_path / "run")
    assert 60 <= summary["inner_steps"] <= 60 + 2 * 5


def test_a_group_larger_than_the_world(tmp_path: Path) -> None:
    summary = run(odd("noloco", WORLDS["three workers"], group_size=50), tmp_path / "run")
    assert summary["outer_steps"] == 60 // (3 * 3) + 1


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize("world", WORLDS)
def test_more_servers_than_workers(method: str, world: str, tmp_path: Path) -> None:
    """Of a local server for each worker and a global one; methods without servers do not know the
    setting.
    """
    given = odd(method, WORLDS[world], workers_per_server=1)
    workers = {worker.id for worker in given.topology.workers}
    servers = set(simulation.make_simulator(given, None).actors) - workers
    assert len(servers) == {"halos": len(workers) + 1, "async_local_sgd": 1}.get(method, 0)
    summary = run(given, tmp_path / "run")
    assert summary["inner_steps"] >= 60
    assert method != "halos" or summary["local_updates"] >= 2 * summary["outer_steps"]


@pytest.mark.parametrize("method", methods.names())
def test_more_updates_to_a_report_than_the_run_has(method: str, tmp_path: Path) -> None:
    given = odd(method, WORLDS["three workers"], accumulate=10_000)
    if method != "halos":
        assert run(given, tmp_path / "run")["inner_steps"] >= 60
        return
    with pytest.raises(UserError) as error:
        run(given, tmp_path / "run")
    assert str(error.value) == (
        "halos: the workers have taken 1,717 inner steps since the model to take home last "
        "changed, "
        "and the run is planned for 60: "
        "outer steps come too seldom; lower inner_steps or accumulate, or give it more steps"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", methods.names())
def test_more_inner_steps_than_the_run_has(method: str, tmp_path: Path) -> None:
    """It ends after the first outer step. Where steps are dynamic, the slow worker takes 150 in the
    time of 500.
    """
    summary = run(odd(method, WORLDS["two workers"], inner_steps=500), tmp_path / "run")
    whole = {"sync_sgd": 60, "diloco": 1000, "async_local_sgd": 650, "halos": 650, "noloco": 500}
    assert summary["stopped"] == "steps"
    assert 60 <= summary["inner_steps"] <= 1000
    assert summary["inner_steps"] == whole.get(method, summary["inner_steps"])
