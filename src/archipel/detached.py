"""A live run that no terminal holds: it goes on when its command has ended.

What belongs here: the run as a named actor on the cluster's head machine, and how others start it,
find it, follow it and stop it. What does not: the run itself, which is `experiment.launch` as ever,
and what is printed (`cli/`).

The actor is Ray's *detached* one: it lives until it leaves by itself or its cluster ends. The hosts
are the actor's own and end with it. Ray starts processes anew for it, also when the job of the
command that made it is long over.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util import list_named_actors

from archipel import experiment
from archipel.disk import rundir
from archipel.errors import Interrupted, TrainingError, UserError, nearest
from archipel.experiment import Comparison, LiveProgress
from archipel.live.cluster import Machine, check_protected, head, on, session
from archipel.live.health import Now
from archipel.pyfile import whereabouts
from archipel.recipe import Recipe, load_recipe
from archipel.series import say_nothing
from archipel.yamlfile import parse

NAMESPACE = "archipel"
"""Where the names of detached runs are looked up; other programs of the cluster have others."""
TICK_S = 1.0
"""How often a run is asked how it stands."""
ANSWER_S = 120.0
"""Longest wait for an answer. The first one comes when the run's process is up."""
KEPT_S = 86_400.0
"""So long a run that has ended waits for somebody to whom its end can be shown."""
LINGER_S = 10.0
"""So long it stays when that has been done, for others that follow it too."""

Outcome = Comparison | UserError | TrainingError | OSError | Interrupted
"""What a run has come to: itself, with its report, or what it was ended by."""


@dataclass(frozen=True)
class Report:
    """How a detached run stands.

    Attributes:
        name: of the run.
        machine: address of the machine where its watch runs, and its run directory lies.
        directory: its run directory there.
        now: how far it is; None: it has not begun.
        said: lines of trouble, but those that whoever asks has seen.
        outcome: what it has come to; None: it goes on.
    """

    name: str
    machine: str
    directory: Path
    now: Now | None
    said: list[str]
    outcome: Outcome | None


class DetachedRun:
    """A run, in the process that watches it. Questions come in a thread of their own.

    Args:
        name, machine, directory: see `Report`.
        recipe: as YAML.
        settings: arguments of `experiment.launch`.
    """

    def __init__(
        self, name: str, machine: str, directory: Path, recipe: str, settings: dict[str, Any]
    ) -> None:
        self.name, self.machine, self.directory = name, machine, directory
        self.recipe, self.settings = recipe, settings
        self.now: Now | None = None
        self.said: list[str] = []
        self.outcome: Outcome | None = None
        self.stopping = False
        self.dismissed = threading.Event()

    def run(self) -> None:
        """Run, wait until the end has been shown, and leave."""
        self.outcome = self.come_to()
        self.dismissed.wait(KEPT_S)
        time.sleep(LINGER_S)
        ray.actor.exit_actor()

    def come_to(self) -> Outcome:
        """Run, and keep what is said meanwhile; what comes of it."""
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: self._hear(str(message))
            try:
                recipe, out = load_recipe(parse(self.recipe)), self.directory.parent
                result = experiment.launch(recipe, out=out, progress=self._tell, **self.settings)
                return experiment.compared([result], out, recipe.run.target_loss)
            except (UserError, TrainingError, OSError, Interrupted) as error:
                return error
            except Exception as error:  # a mistake of this package
                traceback.print_exc()  # into Ray's log of this process
                return TrainingError(f"the run failed at {whereabouts(error)}")

    def _tell(self, _: str, now: Now) -> None:
        """The run says how it stands. Here it is stopped: Ctrl-C reaches no actor."""
        self.now = now
        if self.stopping:
            raise KeyboardInterrupt

    def _hear(self, text: str) -> None:
        self.said.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {text}")

    @ray.method(concurrency_group="questions")
    def report(self, seen: int) -> Report:
        """How it stands, and what has been said after the first `seen` lines."""
        outcome = self.outcome  # before `said`: nothing is said after the end
        said = self.said[seen:]
        return Report(self.name, self.machine, self.directory, self.now, said, outcome)

    @ray.method(concurrency_group="questions")
    def stop(self) -> None:
        """Save it and end it, within about a second; if it has not begun yet, when it has."""
        self.stopping = True

    @ray.method(concurrency_group="questions")
    def dismiss(self) -> None:
        """Its end has been shown."""
        self.dismissed.set()


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"questions": 1})
class RayRun(DetachedRun):
    """The same as a Ray actor. It calls itself: a call of the command's would be lost if the
    command ended before the actor's process is up.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        ray.get_runtime_context().current_actor.run.remote()


def begin(
    recipe: Recipe,
    *,
    address: str | None,
    insecure: bool = False,
    strict: bool = False,
    checkpoint_every: str | int | None = None,
    out: Path | None = None,
    tell: Callable[[str], None] = say_nothing,
) -> Report:
    """Start `recipe` on the cluster's head machine, and leave it alone once its hosts train.

    Args:
        address: of a running Ray cluster.
        insecure, strict, checkpoint_every: see `experiment.launch`.
        out: the folder for the run directory, on the head machine; None: a new one,
            `runs/launch-DATE`. A relative path begins where the command runs.
        tell: is told what is being done.

    Raises:
        UserError: there is no `address`; or see `experiment.launch`.
        TrainingError: see `experiment.launch`.
        Interrupted: Ctrl-C; the run goes on.
    """
    if address is None:
        raise UserError(
            "--detach: without --address the run has a Ray of its own, which ends with this "
            "command; start one that stays, `ray start --head --port=6379 "
            f"--include-dashboard=false --labels=region={next(iter(recipe.topology.regions))}`, "
            "and give its address"
        )
    out = Path.cwd() / (out or Path("runs", rundir.dated_name("launch")))
    settings = {
        "address": address,
        "insecure": insecure,
        "strict": strict,
        "checkpoint_every": checkpoint_every,
    }
    with _joined(address, insecure=insecure):
        machine = head()
        run, name = _make(recipe, machine, out / rundir.name_of(recipe), settings)
        tell(f"{name} is being started on {machine.address}")
        with _left_alone(name, address, insecure=insecure):
            for report in _reports(run, name):
                if report.now is not None:
                    break
        if isinstance(report.outcome, BaseException):
            _dismiss(run)
            raise report.outcome
    return report


def attach(
    name: str | None,
    *,
    address: str,
    insecure: bool = False,
    stop: bool = False,
    tell: Callable[[str], None] = say_nothing,
    progress: LiveProgress = say_nothing,
) -> Comparison | Interrupted:
    """Follow a detached run until it ends, and warn of all trouble that it has had; what it leaves,
    or, if it was stopped, what goes on from there.

    Args:
        name: of the run; None: the only one there is.
        address, insecure: see `experiment.launch`.
        stop: save it, and end it.
        tell: is told where the run is.
        progress: is told about once a second how things stand.

    Raises:
        UserError: there is no such run, or several; or it ends so.
        TrainingError: its process has died, or does not answer; or it ends so.
        Interrupted: Ctrl-C; the run goes on.
    """
    with _joined(address, insecure=insecure):
        run, name = _find(name, address)
        if stop:
            run.stop.remote()
        with _left_alone(name, address, insecure=insecure):
            report = _ask(run, name, 0)
            tell(f"{name} is on {report.machine}, in {report.directory}")
            for report in _reports(run, name):
                if report.now is not None:
                    progress(name, report.now)
        _dismiss(run)
    assert report.outcome is not None
    if isinstance(report.outcome, UserError | TrainingError | OSError):
        raise report.outcome
    return report.outcome


@contextmanager
def _joined(address: str, *, insecure: bool) -> Iterator[None]:
    """A connection to the cluster, whose head keeps strangers out. All other machines are asked
    before the run sends them anything.
    """
    with session(address):
        if not insecure:
            check_protected([head()])
        yield


def _make(
    recipe: Recipe, machine: Machine, directory: Path, settings: dict[str, Any]
) -> tuple[Any, str]:
    """The actor of a run, and its name: that of its directory, or, if another run has it, with a
    number.
    """
    for number in itertools.count(1):
        name = directory.name + f"-{number}" * (number > 1)
        named = RayRun.options(  # type: ignore[attr-defined]
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            scheduling_strategy=on(machine),
        )
        try:
            run = named.remote(name, machine.address, directory, recipe.to_yaml(), settings)
        except ray.exceptions.ActorAlreadyExistsError:
            continue
        break
    return run, name


def _find(name: str | None, address: str) -> tuple[Any, str]:
    """The actor of a run, and its name. None: of the only one.

    Raises:
        UserError: there is none of that name, or none at all, or several.
    """
    actors = list_named_actors(all_namespaces=True)
    names = sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    known = ", ".join(names)
    if not names:
        raise UserError(
            f"--address {address}: there is no detached run; `archipel launch RECIPE.yaml "
            f"--address {address} --detach` starts one"
        )
    if name is None and len(names) > 1:
        raise UserError(f"NAME is required, for there are several detached runs: {known}")
    name = name or names[0]
    if name not in names:
        raise UserError(
            f"{name!r}: no detached run at {address} has that name; there are: {known}"
            f"{nearest(name, names)}"
        )
    try:
        return ray.get_actor(name, NAMESPACE), name
    except ValueError:
        raise UserError(f"{name!r}: this run has ended, and has left a moment ago") from None


def ways_back(name: str, address: str, *, insecure: bool) -> str:
    """The commands that follow a run and that stop it."""
    again = f"archipel attach {name} --address {address}{' --insecure' * insecure}"
    return f"`{again}` follows it, and `{again} --stop` saves and ends it"


@contextmanager
def _left_alone(name: str, address: str, *, insecure: bool) -> Iterator[None]:
    """Ctrl-C ends the command, and the run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        back = ways_back(name, address, insecure=insecure)
        raise Interrupted(f"{name} goes on; {back}") from None


def _reports(run: Any, name: str) -> Iterator[Report]:
    """How a run stands, once a second until it has ended. Warns of the trouble that it has."""
    seen = 0
    while True:
        report = _ask(run, name, seen)
        for text in report.said:
            warnings.warn(text, stacklevel=2)
        seen += len(report.said)
        yield report
        if report.outcome is not None:
            return
        time.sleep(TICK_S)


def _ask(run: Any, name: str, seen: int) -> Report:
    """See `DetachedRun.report`.

    Raises:
        TrainingError: there is no answer.
    """
    try:
        report: Report = ray.get(run.report.remote(seen), timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        raise TrainingError(
            f"{name} has not answered for {ANSWER_S:g} s; it may go on all the same"
        ) from None
    except ray.exceptions.RayError as error:
        raise TrainingError(
            f"{name}: the process that watches it has died, and its hosts end with it; on its "
            "machine, `archipel resume` with its run directory goes on from the last save. Ray "
            f"says: {' '.join(str(error).split())[:200]}"
        ) from None
    return report


def _dismiss(run: Any) -> None:
    """The end of a run has been shown: it may leave. It may have done so already."""
    with suppress(ray.exceptions.RayError):
        ray.get(run.dismiss.remote(), timeout=ANSWER_S)
