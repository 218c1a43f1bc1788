"""A run that was stopped and resumed is the run that was not, whatever it was stopped at; a damaged
checkpoint is never taken.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import small

from archipel import experiment, methods, outer, simulation
from archipel.actor import NodeId, Start
from archipel.disk import checkpoint, rundir
from archipel.disk.checkpoint import Every, parse_every
from archipel.disk.encoding import Decoder, Encoder, Surroundings, class_of
from archipel.errors import TrainingError, UserError
from archipel.methods import halos
from archipel.recipe import Recipe, parse_recipe
from archipel.run.metrics import Recorder
from archipel.sim.clock import Simulator
from archipel.sim.engine import Engine
from archipel.train.pool import Pool

# Values


@dataclass(kw_only=True, slots=True)
class Thing:
    """Its constructor counts, so that a test sees whether it was called."""

    name: str
    parts: list[Any] = field(default_factory=list)
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


HERE = sys.modules[__name__]


def again(value: Any, **things: object) -> Any:
    """`value` after a way through JSON and safetensors."""
    surroundings = Surroundings(things, [HERE])
    encoder = Encoder(surroundings)
    document = json.loads(
        json.dumps([encoder.encode(value, "state"), encoder.classes], allow_nan=False)
    )
    tensors = {name: tensor.clone() for name, tensor in encoder.tensors.items()}
    return Decoder(surroundings, tensors, document[1]).decode(document[0])


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.recursive(
    PLAIN | st.builds(NodeId, st.text(), st.text()),
    lambda inner: st.lists(inner).map(tuple),
    max_leaves=5,
)
VALUES = st.recursive(
    KEYS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=50, deadline=None)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = again(value)
    assert (found, type(found)) == (value, type(value))
    assert repr(found) == repr(value) or "{" in repr(
        value
    )  # -0.0, True and 1; but a set's order is its own


def test_floats_that_json_does_not_know() -> None:
    assert (
        repr(again([float("nan"), float("inf"), -float("inf"), -0.0])) == "[nan, inf, -inf, -0.0]"
    )


def test_numpys_numbers_and_arrays_keep_their_types() -> None:
    for value in (np.int64(3), np.float32(0.1), np.bool_(True), np.uint8(255)):
        assert (again(value), type(again(value))) == (value, type(value))
    for array in (np.array([[1.5, np.nan]], np.float32), np.zeros((0, 3), np.int16), np.array(7)):
        found = again(array)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)


def test_a_generator_goes_on_where_it_was_and_so_do_its_children() -> None:
    rng = np.random.default_rng((3, 4))
    rng.integers(10, dtype=np.uint32)  # half a word is kept
    rng.spawn(1)
    found = again(rng)
    for _ in range(3):
        assert found.integers(2**32, dtype=np.uint32) == rng.integers(2**32, dtype=np.uint32)
    assert found.spawn(1)[0].random() == rng.spawn(1)[0].random()


def test_what_was_one_object_is_one_object_again() -> None:
    thing, vector = Thing(name="a"), torch.arange(6.0)
    thing.parts = [thing, vector, vector, vector.view(2, 3)[1], {"x": vector}]
    first, second = again((thing, thing))
    assert first is second
    itself, one, two, row, inner = first.parts
    assert itself is first
    assert one is two is inner["x"]
    row[0] = 99
    assert one.tolist() == [0, 1, 2, 99, 4, 5]
    assert first.made == 1  # the constructor was not called again


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_of_all_types_and_shapes(dtype: torch.dtype) -> None:
    for tensor in (
        torch.ones(2, 3),
        torch.ones(3, 2).t(),
        torch.tensor(1),
        torch.empty(0),
        torch.empty(2, 0),
    ):
        found = again(tensor.to(dtype))
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert torch.equal(found, tensor.to(dtype))


def test_messages_rules_and_settings() -> None:
    config, rule = halos.Config(accumulate=3), outer.nesterov(0.5, 0.9, 4)
    found_config, found_rule, start = again((config, rule, Start()))
    assert (found_config, type(start)) == (config, Start)
    assert (found_rule.lr, found_rule.velocity.tolist()) == (0.5, [0.0] * 4)


def test_things_of_the_surroundings_are_not_saved() -> None:
    here = open  # could not be saved
    assert again({"a": [here]}, opener=here) == {"a": [here]}


class NotADataclass:
    pass


@dataclass
class Elsewhere:
    pass


Elsewhere.__module__ = "os"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (len, "builtins.builtin_function_or_method"),
        (NotADataclass(), "test_checkpoint.NotADataclass"),
        (Elsewhere(), "os.Elsewhere"),
        (Path("x"), "pathlib.PosixPath"),
        (torch.ones(1, requires_grad=True), "torch.Tensor"),
        (np.random.Generator(np.random.MT19937()), "numpy.random._generator.Generator"),
        (np.array(["text"]), "numpy.ndarray"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(value: object, name: str) -> None:
    with pytest.raises(UserError) as error:
        again({"actors": [value]})
    assert str(error.value).replace("pathlib._local", "pathlib") == (
        f"state.actors.0 is a {name}, which a checkpoint cannot hold; it can hold plain values, "
        "tuples, lists, sets, dicts, "
        f"tensors, numpy's numbers, arrays and generators, and dataclasses of the method's file"
    )


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "archipel.cli:subprocess",
        "archipel.train.pool:Pool",
        "archipel.train.pool:Connection",
        "this:Zen",
        ":",
    ],
)
def test_no_other_class_is_ever_made(name: str) -> None:
    assert class_of(name, [HERE]) is None
    with pytest.raises(TypeError, match=f"^there is no '{name}' that may be made$"):
        Decoder(Surroundings({}, [HERE]), {}, {name: []})


def test_a_class_whose_fields_have_changed_is_not_made() -> None:
    with pytest.raises(
        TypeError,
        match=r"^'archipel.outer:Nesterov' has the fields lr, gone there and lr, momentum, "
        r"velocity here$",
    ):
        Decoder(Surroundings({}), {}, {"archipel.outer:Nesterov": ["lr", "gone"]})


# Files

NOWHERE = Surroundings({})
RECIPE = "method: halos\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of events 5 and 9, of a state that says which."""
    for event in (5, 9):
        checkpoint.save(
            tmp_path / "checkpoint",
            event,
            {"event": event, "theta": torch.ones(event)},
            NOWHERE,
            RECIPE,
        )
    return tmp_path / "checkpoint"


def test_the_newest_is_loaded_and_two_are_kept(folder: Path) -> None:
    assert checkpoint.load(folder, NOWHERE, RECIPE)["event"] == 9
    checkpoint.save(folder, 12, {}, NOWHERE, RECIPE)
    assert {path.name for path in folder.iterdir()} == {"event-000000000009", "event-000000000012"}
    assert {path.name for path in (folder / "event-000000000012").iterdir()} == {
        "manifest.json",
        "state.json",
        "tensors.safetensors",
    }


def test_saving_a_sound_checkpoint_again_changes_nothing(folder: Path) -> None:
    before = (folder / "event-000000000009" / "manifest.json").stat().st_mtime_ns
    checkpoint.save(folder, 9, {"other": 1}, NOWHERE, RECIPE)
    assert (folder / "event-000000000009" / "manifest.json").stat().st_mtime_ns == before


def change(name: str, old: bytes, new: bytes) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        content = (directory / name).read_bytes()
        assert old in content
        (directory / name).write_bytes(content.replace(old, new, 1))

    return damage


def swap(name: str) -> Callable[[Path], object]:
    """A file of the checkpoint before it lies in its place."""
    return lambda directory: shutil.copy(
        directory.with_name("event-000000000005") / name, directory / name
    )


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a truncated file": (
        lambda d: os.truncate(d / "state.json", 10),
        "DIR/state.json has 10 bytes and should have ",
    ),
    "a file that is too long": (
        change("tensors.safetensors", b"{", b"{ "),
        "DIR/tensors.safetensors has ",
    ),
    "an altered file": (
        change("state.json", b'"event",9', b'"event",8'),
        "DIR/state.json has been altered: its SHA-256 is not the manifest's",
    ),
    "a flipped bit": (
        change("tensors.safetensors", b"\x00\x80\x3f", b"\x00\x80\x3e"),
        "DIR/tensors.safetensors has been altered: its SHA-256 is not the manifest's",
    ),
    "a missing file": (
        lambda d: (d / "tensors.safetensors").unlink(),
        "DIR/tensors.safetensors: No such file or directory",
    ),
    "a missing manifest": (
        lambda d: (d / "manifest.json").unlink(),
        "DIR/manifest.json: No such file or directory",
    ),
    "a truncated manifest": (
        lambda d: os.truncate(d / "manifest.json", 30),
        "DIR/manifest.json is not a manifest: JSONDecodeError: ",
    ),
    "an empty manifest": (
        lambda d: os.truncate(d / "manifest.json", 0),
        "DIR/manifest.json is not a manifest: JSONDecodeError: ",
    ),
    "a manifest of zeros": (
        lambda d: (d / "manifest.json").write_bytes(bytes(500)),
        "DIR/manifest.json is not a manifest: JSONDecodeError: ",
    ),
    "a manifest without files": (
        lambda d: (d / "manifest.json").write_text(
            '{"format": 1, "event": 9, "recipe_sha256": ""}'
        ),
        "DIR/manifest.json is not a manifest: KeyError: 'files'",
    ),
    "a manifest that is a list": (
        lambda d: (d / "manifest.json").write_text("[]"),
        "DIR/manifest.json is not a manifest: TypeError",
    ),
    "a manifest of the future": (
        change("manifest.json", b'"format": 1', b'"format": 2'),
        "DIR/manifest.json is of format 2; this version of archipel reads 1",
    ),
    "a file of another checkpoint": (
        swap("state.json"),
        "DIR/state.json has been altered: its SHA-256 is not the manifest's",
    ),
    "a manifest of another checkpoint": (
        swap("manifest.json"),
        "DIR/manifest.json is that of event 5, not of event-000000000009",
    ),
    "a checkpoint under another's name": (
        lambda d: (shutil.rmtree(d), shutil.copytree(d.with_name("event-000000000005"), d)),
        "DIR/manifest.json is that of event 5, not of event-000000000009",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_taken(
    kind: str, folder: Path
) -> None:
    damage, text = DAMAGE[kind]
    newest = folder / "event-000000000009"
    damage(newest)
    expected = text.replace("DIR", str(newest))
    with pytest.warns(UserWarning, match="^checkpoint refused: ") as caught:
        assert checkpoint.load(folder, NOWHERE, RECIPE)["event"] == 5
    [warning] = caught
    assert str(warning.message).startswith(f"checkpoint refused: {expected}")
    assert str(warning.message).endswith(f"; going on from {folder}/event-000000000005")
    shutil.rmtree(folder / "event-000000000005")
    with pytest.raises(UserError) as error:
        checkpoint.load(folder, NOWHERE, RECIPE)
    assert str(error.value).startswith(f"no checkpoint to go on from in {folder}: {expected}")
    # A run that comes by again puts a sound one in its place.
    checkpoint.save(folder, 9, {"event": 9}, NOWHERE, RECIPE)
    assert checkpoint.load(folder, NOWHERE, RECIPE)["event"] == 9


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_no_altered_byte_gets_through(data: st.DataObject) -> None:
    directory, contents = sound()
    name = data.draw(st.sampled_from(sorted(contents)))
    content = bytearray(contents[name])
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (directory / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = checkpoint.load(directory.parent, NOWHERE, RECIPE)["event"]
        except UserError as error:
            found = str(error)
    # Of a manifest, what is there for information only may change.
    assert (name, found) == ("manifest.json", 3) or str(directory) in str(found)
    (directory / name).write_bytes(contents[name])


@cache
def sound() -> tuple[Path, dict[str, bytes]]:
    directory = checkpoint.save(
        Path(tempfile.mkdtemp()) / "checkpoint",
        3,
        {"event": 3, "theta": torch.ones(3)},
        NOWHERE,
        RECIPE,
    )
    return directory, {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_checkpoint_of_another_run_is_refused(folder: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"event-000000000009/manifest.json is that of another run: its recipe is not this "
        r"run's",
    ):
        checkpoint.load(folder, NOWHERE, RECIPE + "seed: 1\n")


def test_checkpoints_of_later_events_go_once_the_run_comes_by_again(folder: Path) -> None:
    (folder / "event-000000000009" / "state.json").write_text("")
    checkpoint.save(folder, 7, {"event": 7}, NOWHERE, RECIPE)
    assert [path.name[-1] for path in checkpoint.checkpoints(folder)] == ["5", "7"]


def test_other_versions_are_said(folder: Path) -> None:
    change("manifest.json", f'"torch": "{torch.__version__}"'.encode(), b'"torch": "1.0"')(
        folder / "event-000000000009"
    )
    with pytest.warns(
        UserWarning, match=r"may go on differently than it would have: torch 1.0 then and .* now$"
    ):
        checkpoint.load(folder, NOWHERE, RECIPE)


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_is_full_or_read_only(
    file: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is one line, and all that was there is there as it was."""
    write = checkpoint.write_file
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def full(path: Path, content: bytes) -> None:
        write(path, content[: len(content) // 2] if path.name == file else content)
        if path.name == file:
            raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(TrainingError) as error:
        checkpoint.save(folder, 12, {}, NOWHERE, RECIPE)
    assert str(error.value) == (
        f"{folder}/event-000000000012: this checkpoint cannot be written: {os.strerror(code)}; "
        f"the last one, event-000000000009, is whole"
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        TrainingError,
        match=r"event-000000000001: this checkpoint cannot be written: File exists; there is none",
    ):
        checkpoint.save(tmp_path / "file", 1, {}, NOWHERE, RECIPE)


def test_what_a_crash_left_half_written_is_cleared_away(folder: Path) -> None:
    (folder / ".event-000000000011").mkdir()
    (folder / ".event-000000000011" / "state.json").write_text("{")
    assert checkpoint.load(folder, NOWHERE, RECIPE)["event"] == 9
    checkpoint.save(folder, 11, {"event": 11}, NOWHERE, RECIPE)
    assert [path.name[-2:] for path in sorted(folder.iterdir())] == ["09", "11"]


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("1000000", Every(tokens=1_000_000)),
        ("1_000", Every(tokens=1000)),
        ("600s", Every(seconds=600)),
        ("0.5s", Every(seconds=0.5)),
        ("0.00000001s", Every(seconds=1e-8)),
    ],
)
def test_how_often(text: str, every: Every) -> None:
    assert parse_every(text) == every
    assert parse_every(str(every)) == every


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "1.5", "10m", "s", "nan", "1e6"])
def test_how_often_is_refused(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_every(text)
    assert str(error.value) == (
        f"--checkpoint-every {text}: expected tokens, such as 1000000, or seconds on this machine, "
        "such as 600s"
    )


# Runs

TASK = {
    "name": "synthetic",
    "layers": 1,
    "width": 8,
    "heads": 2,
    "sequence": 8,
    "valid_sequences": 4,
    "vocabulary": 8,
}
TOPOLOGY = {
    "regions": {"a": [1.0, 0.6], "b": [0.3, 0.8]},
    "default": {"bandwidth_gbit_s": 1.0, "latency_ms": 40, "jitter": 0.4},
}
STAGED = {
    "regions": {"a": [1.0, 0.6, 0.9], "b": [0.3, 0.8, 1.0]},
    "default": {"bandwidth_gbit_s": 1.0, "latency_ms": 40, "jitter": 0.4},
}
"""Two stages of three replicas, one of which lies on both sides of the water. All kinds in stages
have these workers, so that they share a pool for each routing: to start one takes seconds.
"""
NORMED = """
import torch
from torch import nn
from archipel import Task

def batches(shard, index):
    generator = torch.Generator().manual_seed(shard.index * 1000 + index)
    x = torch.randn(8, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True)

def make():
    return Task(
        model=lambda: nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1)
        ),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        batches=batches,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
        valid_batches=1,
    )
"""


SHORT = {"steps": 24, "evaluations": 3}
STAGES = {"stages": 2, "micro_batches": 2}
NAMES = methods.names()

# Each kind of run: a method, and what is not as in `recipe`.
KINDS: dict[str, dict[str, Any]] = {
    **{name: {} for name in NAMES},
    **{f"{name}, BatchNorm": {"task": "normed"} for name in NAMES},
    **{f"{name}, int4": {"task": "normed", "wire": "int4"} for name in NAMES},
    **{f"{name}, none": {"task": "none", "run": {"steps": 200}} for name in NAMES},
    **{
        f"{name}, fair": {"topology": {**TOPOLOGY, "sharing": "fair"}}
        for name in ("halos", "noloco", "async_local_sgd")
    },
    **{
        f"{name}, {routing}": {
            "topology": STAGED,
            "pipeline": {**STAGES, "routing": routing},
            "run": SHORT,
        }
        for name in ("noloco", "diloco")
        for routing in ("random", "fixed")
    },
    **{
        f"noloco, {routing}, fair": {
            "topology": {**STAGED, "sharing": "fair"},
            "pipeline": {**STAGES, "routing": routing},
            "run": SHORT,
        }
        for routing in ("random", "fixed")
    },
    "noloco, BatchNorm, fixed": {
        "topology": STAGED,
        "task": "normed",
        "pipeline": {**STAGES, "routing": "fixed"},
        "run": SHORT,
    },
    "diloco, none, fixed": {
        "topology": STAGED,
        "task": "none",
        "pipeline": {**STAGES, "routing": "fixed"},
    },
    "halos, a target": {"run": {"steps": 60, "evaluations": 20, "target_loss": 1.95}},
    "halos, some seconds": {"run": {"steps": 60, "evaluations": 5, "seconds": 3.0}},
}


def recipe(name: str, **fields: Any) -> Recipe:
    base = {
        "method": {"name": name, **small(name)},
        "topology": TOPOLOGY,
        "task": TASK,
        "run": {"steps": 32, "evaluations": 3},
    }
    return parse_recipe(base | fields)


def files(directory: Path) -> dict[str, bytes]:
    """All that a run leaves; of the summary, what does not say how long it took here. No checkpoint
    is among them.
    """
    summary = json.loads((directory / "summary.json").read_text())
    del summary["wall_s"], summary["processes"]
    found = {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name != "summary.json"
    }
    return found | {"summary": json.dumps(summary).encode()}


class Workshop:
    """Runs to be stopped, with the pools they need, and what they leave if nobody stops them."""

    def __init__(self, folder: Path, pools: Callable[..., Pool | None]) -> None:
        self.folder, self.pool = folder, pools
        (folder / "normed.py").write_text(NORMED)
        self.left: dict[str, tuple[int, dict[str, bytes]]] = {}

    def recipe(self, kind: str) -> Recipe:
        fields = dict(KINDS[kind])
        if fields.get("task") == "normed":
            fields["task"] = f"{self.folder}/normed.py:make"
        return recipe(kind.split(",")[0], **fields)

    def unstopped(self, kind: str) -> tuple[int, dict[str, bytes]]:
        """The number of events of a run that nobody stops, and its files."""
        if kind not in self.left:
            one, directory = self.recipe(kind), self.folder / "unstopped" / kind
            simulator = simulation.make_simulator(one, self.pool(one))
            rundir.start(directory, one)
            reason = simulator.run()
            assert reason
            rundir.leave(
                directory, one, simulation.ended(one, simulator, self.pool(one)), reason, 0.0
            )
            self.left[kind] = simulator.state.events, files(directory)
        return self.left[kind]

    def stopped(self, kind: str, events: Sequence[int]) -> dict[str, bytes]:
        """The files of a run that is stopped after each of `events`, and resumed each time by a new
        simulator with new workers.
        """
        one, directory = self.recipe(kind), self.folder / "stopped" / kind
        pool = self.pool(one)
        rundir.start(directory, one)
        for event in sorted(events):
            simulator = simulation.make_simulator(one, pool)
            if checkpoint.checkpoints(directory / "checkpoint"):
                simulation.load_checkpoint(directory, one, simulator)
            assert simulator.run(lambda: simulator.state.events == event) is None  # noqa: B023
            simulation.save_checkpoint(directory, one, simulator, 100.0)
        assert simulation.simulate(one, pool, directory, resume=True)["wall_s"] > 100
        return files(directory)


@pytest.fixture(scope="module")
def workshop(
    tmp_path_factory: pytest.TempPathFactory, pools: Callable[..., Pool | None]
) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("runs"), pools)


def stops(events: int) -> st.SearchStrategy[list[int]]:
    """After which events to stop."""
    return st.lists(st.integers(1, events), min_size=1, max_size=2, unique=True)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=2)
def test_a_run_that_was_stopped_is_the_one_that_was_not(
    kind: str, workshop: Workshop, data: st.DataObject
) -> None:
    events, left = workshop.unstopped(kind)
    assert workshop.stopped(kind, data.draw(stops(events))) == left


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(data=st.data())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_two_hundred_stops(workshop: Workshop, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    events, left = workshop.unstopped(kind)
    assert workshop.stopped(kind, [data.draw(st.integers(1, events))]) == left


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_stopped_with_one_process_and_unstopped_with_two(name: str, workshop: Workshop) -> None:
    one, directory = workshop.recipe(name), workshop.folder / "two" / name
    simulation.simulate(one, workshop.pool(one, 2), directory)
    assert workshop.stopped(name, [20]) == files(directory)


# The command line

TIMED = ("compare", "--task", "none", "--steps", 6000)


@pytest.fixture
def archipel(archipel: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, list[str]]]:
    """Calls the command line; exit code and the lines on stderr."""

    def call(*arguments: object) -> tuple[int, list[str]]:
        code, _, err = archipel(*arguments)
        return code, err.splitlines()

    return call


def interrupt_at(event: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Ctrl-C is pressed while the run's event number `event` happens, in the first run that gets so
    far.
    """
    handle, pressed = Engine.handle, []

    def handling(self: Engine, *arguments: Any) -> None:
        if self.state.events == event and not pressed:
            pressed.append(event)
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        handle(self, *arguments)

    monkeypatch.setattr(Engine, "handle", handling)


def test_ctrl_c_saves_and_resume_goes_on_with_all_that_is_not_finished(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three methods the first is finished, the second stopped, the third has not begun."""
    methods = ("--methods", "diloco,halos,noloco")
    assert archipel(*TIMED, *methods, "--out", tmp_path / "whole")[0] == 0
    out = tmp_path / "out"
    interrupt_at(700, monkeypatch)
    code, lines = archipel(*TIMED, *methods, "--out", out)
    assert (code, lines[-1]) == (
        130,
        f"archipel: interrupted; `archipel resume {out}` goes on from here; `archipel report "
        f"{out}` shows what happened until then",
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stopped = [
        json.loads((out / name / "summary.json").read_text())["stopped"]
        for name in ("diloco-seed0", "halos-seed0")
    ]
    assert stopped == ["steps", "interrupted"]
    assert {path.name for path in (out / "halos-seed0").iterdir()} == {
        "recipe.yaml",
        "metrics.jsonl",
        "summary.json",
        "trace.json",
        "checkpoint",
    }
    assert [path.name for path in (out / "halos-seed0" / "checkpoint").iterdir()] == [
        "event-000000000700"
    ]
    assert [path.name for path in (out / "noloco-seed0").iterdir()] == ["recipe.yaml"]
    assert archipel(*TIMED, "--methods", "halos", "--out", out) == (
        2,
        [
            f"archipel: --out {out}: {out}/halos-seed0 is a run that has not ended; `archipel "
            f"resume {out}/halos-seed0` goes on "
            f"with it; to start anew, remove it or choose another --out"
        ],
    )
    assert archipel("resume", out)[0] == 0
    for name in ("diloco-seed0", "halos-seed0", "noloco-seed0"):
        assert files(out / name) == files(tmp_path / "whole" / name)
    before = files(out / "halos-seed0")
    for folder in (out, out / "halos-seed0"):
        code, lines = archipel("resume", folder)
        said = f"archipel: nothing to resume in {folder}: all runs there have ended"
        assert (code, lines[-1]) == (0, said)
    assert before.items() <= files(out / "halos-seed0").items()  # a report is beside them


@pytest.mark.parametrize("made", [(), ("notes.txt",)], ids=["empty", "with a file"])
def test_a_folder_without_runs_cannot_be_resumed(
    archipel: Any, tmp_path: Path, made: tuple[str, ...]
) -> None:
    for name in made:
        (tmp_path / name).touch()
    assert archipel("resume", tmp_path) == (
        2,
        [
            f"archipel: nothing to resume in {tmp_path}: no run directory (a folder with "
            "recipe.yaml) whose run has not ended, or of a live run its folder `checkpoint` is gone"
        ],
    )


def test_what_is_resumed_though_it_has_ended_keeps_the_target_of_its_recipe(
    tmp_path: Path,
) -> None:
    recipe = {"method": "halos", "task": TASK, "run": {"steps": 400, "target_loss": 4.5}}
    left = experiment.simulate(recipe, processes=1, out=tmp_path)
    found = experiment.resume(tmp_path)
    assert [result.summary for result in found.results] == [left.summary]
    assert found.target_loss == 4.5


def test_a_run_that_is_going_on_is_left_alone(archipel: Any, tmp_path: Path) -> None:
    """By whoever resumes it, or starts another of its name; another process has it, which here is
    another descriptor.
    """
    assert archipel(*TIMED, "--methods", "halos", "--out", tmp_path)[0] == 0
    run = tmp_path / "halos-seed0"
    (run / "summary.json").unlink()
    used = f"{run} is in use: its run is going on in another process"
    with rundir.alone_in(run):
        assert archipel("resume", tmp_path) == (2, [f"archipel: {used}"])
        assert archipel(*TIMED, "--methods", "halos", "--out", tmp_path) == (
            2,
            [f"archipel: {used}"],
        )
    assert archipel("resume", tmp_path)[0] == 0


def test_a_folder_of_the_users_is_not_taken_for_a_run(archipel: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: halos  # mine\ntask: none\n")
    assert archipel("resume", tmp_path) == (
        2,
        [
            f"archipel: {recipe} is not as a run leaves it, so there is nothing to resume; "
            f"`archipel run {recipe}` starts a run"
        ],
    )
    (tmp_path / "notes.txt").write_text("mine")
    assert archipel("resume", tmp_path)[1][0].startswith(
        f"archipel: nothing to resume in {tmp_path}: "
    )
    with pytest.raises(UserError, match=r"is there already and is not a run directory$"):
        simulation.simulate(parse_recipe({"method": "halos", "task": "none"}), None, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "notes.txt"}


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_in_the_middle_of_each_method(
    name: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real inner steps are under way, and evaluations."""
    events, left = workshop.unstopped(name)
    one, directory = workshop.recipe(name), tmp_path / "run"
    interrupt_at(events // 2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        simulation.simulate(one, workshop.pool(one), directory)
    assert json.loads((directory / "summary.json").read_text())["stopped"] == "interrupted"
    assert len(checkpoint.checkpoints(directory / "checkpoint")) == 1
    assert (
        simulation.simulate(one, workshop.pool(one), directory, resume=True)["stopped"] == "steps"
    )
    assert files(directory) == left


def test_a_second_ctrl_c_does_not_wait(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(700, monkeypatch, times=2)
    assert archipel(*TIMED, "--methods", "halos", "--out", tmp_path)[0] == 130
    assert {path.name for path in (tmp_path / "halos-seed0").iterdir()} == {
        "recipe.yaml",
        "metrics.jsonl",
        "summary.json",
        "trace.json",
    }


def test_another_programs_way_with_ctrl_c_is_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with simulation.interrupts() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def saved_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inner steps at which checkpoints are saved from now on."""
    save, found = simulation.save_checkpoint, []

    def saving(directory: Path, recipe: Recipe, simulator: Simulator, *rest: Any) -> Path:
        found.append(simulator.inner_steps)
        return save(directory, recipe, simulator, *rest)

    monkeypatch.setattr(simulation, "save_checkpoint", saving)
    return found


def test_every_so_many_tokens(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = saved_at(monkeypatch)
    one = workshop.recipe("sync_sgd")  # 4 workers: 4 inner steps at a time, of 4 · 8 tokens each
    simulation.simulate(one, workshop.pool(one), tmp_path / "run", every=Every(tokens=32 * 10))
    assert found == [12, 20, 32]
    assert files(tmp_path / "run") == workshop.unstopped("sync_sgd")[1]


def test_every_so_many_seconds(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a call of the clock takes a tenth of a second."""
    found, now = saved_at(monkeypatch), itertools.count()
    monkeypatch.setattr(simulation.time, "monotonic", lambda: next(now) / 10)
    assert (
        archipel(*TIMED, "--methods", "halos", "--checkpoint-every", "30s", "--out", tmp_path)[0]
        == 0
    )
    assert len(found) >= 2
    assert not (tmp_path / "halos-seed0" / "checkpoint").exists()


def test_resume_saves_as_often_as_before(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the run that had not begun; and an option changes it."""
    now = itertools.count()
    monkeypatch.setattr(simulation.time, "monotonic", lambda: next(now) / 10)
    seen: list[Every | None] = []
    usual = simulation.simulate
    monkeypatch.setattr(
        simulation,
        "simulate",
        lambda *a, every, **b: (seen.append(every), usual(*a, every=every, **b)),
    )
    interrupt_at(100, monkeypatch)
    out = ("--out", tmp_path)
    assert (
        archipel(*TIMED, "--methods", "halos,diloco", "--checkpoint-every", "2000.5s", *out)[0]
        == 130
    )
    for copy in ("again", "other"):
        shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{copy}"))
    assert archipel("resume", tmp_path)[0] == 0
    assert archipel("resume", f"{tmp_path}-again", "--checkpoint-every", "3000s")[0] == 0
    (
        tmp_path.with_name(f"{tmp_path.name}-other")
        / "halos-seed0/checkpoint/event-000000000100/manifest.json"
    ).write_text("{}")
    assert archipel("resume", f"{tmp_path}-other")[0] == 2  # nothing sound to ask
    first, second = Every(seconds=2000.5), Every(seconds=3000.0)
    assert seen == [first, first, first, second, second, None, None]


def test_tokens_need_a_task(archipel: Any, tmp_path: Path) -> None:
    assert archipel(
        *TIMED, "--methods", "halos", "--checkpoint-every", 1000, "--out", tmp_path / "out"
    ) == (
        2,
        [
            "archipel: --checkpoint-every 1000: task none has no tokens; give seconds on this "
            "machine, such as 600s"
        ],
    )
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_stops_the_run_which_can_be_resumed(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert archipel(*TIMED, "--methods", "halos", "--out", tmp_path / "whole")[0] == 0
    write, count = checkpoint.write_file, itertools.count(1)

    def filling(path: Path, content: bytes) -> None:
        if next(count) > 8:  # two checkpoints and a bit
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    now = itertools.count()
    directory = tmp_path / "out" / "halos-seed0"
    with monkeypatch.context() as patch:
        patch.setattr(simulation.time, "monotonic", lambda: next(now) / 10)
        patch.setattr(checkpoint, "write_file", filling)
        code, lines = archipel(
            *TIMED, "--methods", "halos", "--checkpoint-every", "30s", "--out", tmp_path / "out"
        )
    kept = checkpoint.checkpoints(directory / "checkpoint")
    assert (code, len(kept)) == (1, 2)
    assert re.fullmatch(
        rf"archipel: {directory}/checkpoint/event-\d+: this checkpoint cannot be written: No space "
        r"left on device; "
        rf"the last one, {kept[-1].name}, is whole",
        lines[-1],
    )
    (kept[-1] / "state.json").write_text("{}")  # and then that one is damaged too
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, lines = archipel("resume", directory)
    assert code == 0
    assert lines[0].startswith(
        f"archipel: warning: checkpoint refused: {kept[-1]}/state.json has 2 bytes and should have "
    )
    assert lines[0].endswith(f"; going on from {kept[0]}")
    assert (
        files(directory).items() >= files(tmp_path / "whole" / "halos-seed0").items()
    )  # and a report


def test_a_disk_that_is_full_at_the_end_costs_nothing_that_was_saved(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert archipel(*TIMED, "--methods", "halos", "--out", tmp_path / "whole")[0] == 0
    directory, now = tmp_path / "out" / "halos-seed0", itertools.count()

    def full(recorder: Recorder, path: Path, learning_rate: object) -> None:
        path.write_text("half of")
        raise OSError(errno.ENOSPC, "No space left on device", str(directory / "metrics.jsonl"))

    with monkeypatch.context() as patch:
        patch.setattr(simulation.time, "monotonic", lambda: next(now) / 10)
        patch.setattr(Recorder, "write_metrics", full)
        code, lines = archipel(
            *TIMED, "--methods", "halos", "--checkpoint-every", "30s", "--out", tmp_path / "out"
        )
    assert (code, lines[-1]) == (1, f"archipel: {directory}/metrics.jsonl: No space left on device")
    assert {path.name for path in directory.iterdir()} == {
        "recipe.yaml",
        "metrics.jsonl",  # as far as the run had come
        "checkpoint",
    }
    assert archipel("resume", directory)[0] == 0
    assert files(directory).items() >= files(tmp_path / "whole" / "halos-seed0").items()


def test_a_run_whose_checkpoints_are_all_damaged_is_left_alone(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(700, monkeypatch)
    assert archipel(*TIMED, "--methods", "halos", "--out", tmp_path)[0] == 130
    folder = tmp_path / "halos-seed0" / "checkpoint"
    os.truncate(folder / "event-000000000700" / "state.json", 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, lines = archipel("resume", tmp_path)
    assert code == 2
    assert lines[-1].startswith(
        f"archipel: no checkpoint to go on from in {folder}: "
        f"{folder}/event-000000000700/state.json has 0 bytes"
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


OWN = """
from dataclasses import dataclass
from typing import Any
from archipel.actor import Actor, Message, MethodConfig, Start, Trained

class Config(MethodConfig):
    pass

@dataclass(frozen=True, eq=False, slots=True)
class Note(Message):
    steps: int

@dataclass(kw_only=True)
class Worker(Actor):
    theta: Any
    kept: Any = None

    def upon(self, message, sender, ctx):
        match message:
            case Trained(steps=steps):
                ctx.after(float(ctx.rng.random()), Note(steps))
            case Note(steps=steps):
                self.absorbed += steps
                ctx.train(self.theta, 1, 0)
            case Start():
                self.kept = KEPT
                ctx.train(self.theta, 1, 0)

    def model(self):
        return self.theta

def build(config, world, theta):
    return [Worker(me=worker.id, theta=theta.clone()) for worker in world.workers]
"""


def test_a_method_of_ones_own(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noted.py").write_text(OWN.replace("KEPT", "{1: (2, [sender])}"))
    own = ("--methods", tmp_path / "noted.py")
    assert archipel(*TIMED, *own, "--out", tmp_path / "whole")[0] == 0
    interrupt_at(700, monkeypatch)
    assert archipel(*TIMED, *own, "--out", tmp_path / "out")[0] == 130
    assert archipel("resume", tmp_path / "out")[0] == 0
    assert files(tmp_path / "out" / "noted-seed0") == files(tmp_path / "whole" / "noted-seed0")


def test_a_method_whose_state_cannot_be_saved(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is bothered who asks for no checkpoint; Ctrl-C still leaves what happened until
    then.
    """
    (tmp_path / "odd.py").write_text(OWN.replace("KEPT", "len"))
    own = ("--methods", tmp_path / "odd.py")
    assert archipel(*TIMED, *own, "--out", tmp_path / "whole")[0] == 0
    complaint = (
        "state.simulator.nodes.r0/w0.actor.kept is a builtins.builtin_function_or_method, "
        "which "
        "a checkpoint cannot hold; "
    )
    topology = ("--topology", "one-node")
    code, lines = archipel(
        *TIMED, *own, *topology, "--checkpoint-every", "0.000001s", "--out", tmp_path / "every"
    )
    assert (code, lines[-1].startswith(f"archipel: odd: {complaint}")) == (2, True), lines
    interrupt_at(700, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, lines = archipel(*TIMED, *own, *topology, "--out", tmp_path / "out")
    assert code == 130
    assert lines[-2].startswith(f"archipel: warning: odd: {complaint}")
    assert (tmp_path / "out" / "odd-seed0" / "summary.json").is_file()
