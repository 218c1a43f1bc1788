"""`detached.py` without Ray: what a run keeps for those who ask, and how it is stopped. Its actor
and its commands are in `test_live_cluster.py`.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_recipes import recipe

from archipel import experiment
from archipel.errors import Interrupted, TrainingError, UserError

detached = pytest.importorskip("archipel.detached")
health = pytest.importorskip("archipel.live.health")

NOW = health.Now(10, 100, 1.0, None, None, {}, None, None)
"""How a run stands that has just begun."""


@pytest.fixture
def run_that(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A detached run whose `experiment.launch` does something else."""

    def make(launch: Callable[..., Any]) -> Any:
        monkeypatch.setattr(experiment, "launch", launch)
        text, directory = recipe("diloco").to_yaml(), Path("/runs/diloco-seed0")
        return detached.DetachedRun("diloco-seed0", "10.0.0.1", directory, text, {"strict": True})

    return make


@pytest.mark.filterwarnings("default:east")
def test_what_a_run_says_is_kept_and_told_once(run_that: Any) -> None:
    given = {}

    def launch(loaded: Any, *, progress: Any, **settings: Any) -> None:
        given.update(settings, label=loaded.label)
        warnings.warn("east/w0 died", stacklevel=1)
        progress("diloco-seed0", NOW)
        warnings.warn("east/w1 died", stacklevel=1)
        raise TrainingError("nothing happens any more")

    run = run_that(launch)
    assert run.report(0) == detached.Report(
        "diloco-seed0", "10.0.0.1", Path("/runs/diloco-seed0"), None, [], None
    )
    run.outcome = run.come_to()
    assert given == {"strict": True, "label": "diloco", "out": Path("/runs")}
    report = run.report(0)
    assert [line.split(": ")[1] for line in report.said] == ["east/w0 died", "east/w1 died"]
    assert report.now == NOW
    assert repr(report.outcome) == "TrainingError('nothing happens any more')"
    assert run.report(1).said == report.said[1:]
    assert run.report(2).said == []


def test_a_run_is_stopped_when_it_next_says_how_it_stands(run_that: Any) -> None:
    def launch(_: Any, *, progress: Any, **settings: Any) -> None:
        progress("diloco-seed0", NOW)  # nothing happens yet
        run.stop()
        try:
            progress("diloco-seed0", NOW)
        except KeyboardInterrupt:
            raise Interrupted("saved") from None

    run = run_that(launch)
    assert repr(run.come_to()) == "Interrupted('saved')"


def test_a_mistake_of_this_package_is_told_with_its_place(
    run_that: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_that(lambda *_, **__: 1 // 0).come_to()
    assert isinstance(outcome, TrainingError)
    assert str(outcome).startswith(f"the run failed at {__file__}:")
    assert str(outcome).endswith("ZeroDivisionError: integer division or modulo by zero")
    assert "Traceback" in capsys.readouterr().err


def test_a_run_on_a_private_ray_cannot_be_detached() -> None:
    with pytest.raises(UserError) as error:
        detached.begin(recipe("diloco"), address=None)
    assert str(error.value) == (
        "--detach: without --address the run has a Ray of its own, which ends with this command; "
        "start one that stays, `ray start --head --port=6379 --include-dashboard=false "
        "--labels=region=east`, and give its address"
    )


def test_an_address_where_nobody_listens_is_told_at_once() -> None:
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(UserError) as error:
            detached.attach(None, address=address)
    assert str(error.value) == (
        f"--address {address}: no Ray cluster answers there: Connection refused"
    )
