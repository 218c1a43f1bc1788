"""Golden runs: what every method does on the clock, as numbers in `tests/golden/`, one file a run.

Nothing is trained (task `none`) and no link has jitter, so that a run depends on the clock alone.
A file holds the run's recipe, its totals, its evaluations, and of its trace the first spans and
sums for each node. A change to the clock shows there as times and counts that a reader can follow
in the diff. To accept a change, and only then:

    python tests/test_golden.py

writes the files anew; say in the commit which of them have changed, and why.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import small

from archipel import assemble, methods, simulation
from archipel.recipe import parse_recipe

GOLDEN = Path(__file__).parent / "golden"
REL = 1e-9
FIRST_SPANS = 12

TOPOLOGY = {
    "regions": {"a": [1.0, 0.6], "b": [0.8, 0.5], "c": [0.3, 0.9]},
    "local": {"bandwidth_gbit_s": 8.0, "latency_ms": 1.0},
    "links": [
        {"between": ["a", "b"], "bandwidth_gbit_s": 0.08, "latency_ms": 40.0},
        {"between": ["b", "c"], "bandwidth_gbit_s": 0.02, "latency_ms": 120.0},
    ],
    "default": {"bandwidth_gbit_s": 0.05, "latency_ms": 80.0},
}
PROFILE = {"model_bytes": 10_000_000, "step_time_s": 0.5, "activation_bytes": 400_000}
FAULTS = {
    "schedule": [
        {"kind": "slow", "node": "a/w0", "at_s": 5.0, "for_s": 20.0, "factor": 3.0},
        {"kind": "loss", "at_s": 10.0, "for_s": 15.0, "probability": 0.3},
        {"kind": "crash", "node": "b/w0", "at_s": 20.0, "restart_after_s": 25.0},
        {"kind": "link_down", "between": ["b", "c"], "at_s": 40.0, "for_s": 8.0},
        {"kind": "leave", "node": "c/w0", "at_s": 50.0},
        {"kind": "partition", "regions": ["a"], "at_s": 60.0, "for_s": 18.0},
        {"kind": "join", "node": "b/w1", "at_s": 30.0},
    ],
    "save_every_s": 15.0,
    "deadline_s": 10.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fair": {
        "topology": {**TOPOLOGY, "sharing": "fair"},
        "method": {"workers_per_server": 1},  # so that servers of one region share its links
    },
    "faults": {"faults": FAULTS},
    "dynamic": {"method": {"dynamic_steps": True}},
    "stages": {"pipeline": {"stages": 2, "micro_batches": 2}},
    "stages-fair": {
        "pipeline": {"stages": 2, "micro_batches": 2},
        "topology": {**TOPOLOGY, "sharing": "fair"},
    },
}
WITHOUT_SERVERS = ("diloco", "noloco")
"""Methods that run in stages."""


def cases() -> Iterator[tuple[str, str]]:
    """Each method with each variant that it has."""
    for method in methods.names():
        settings = methods.load(method).Config.model_fields
        for variant in VARIANTS:
            if variant == "dynamic" and "dynamic_steps" not in settings:
                continue
            if variant.startswith("stages") and method not in WITHOUT_SERVERS:
                continue
            yield method, variant


def recipe_of(method: str, variant: str) -> dict[str, Any]:
    fields = VARIANTS[variant]
    chosen = {"inner_steps": 6, "accumulate": 3, "dynamic_steps": False, **fields.get("method", {})}
    return {
        "topology": TOPOLOGY,
        "profile": PROFILE,
        "task": "none",
        "run": {"steps": 600, "evaluations": 4},
        **fields,
        "method": {"name": method, **small(method, **chosen)},
    }


def golden(method: str, variant: str, folder: Path) -> dict[str, Any]:
    """What a run leaves in `folder`, as a golden file has it."""
    recipe = parse_recipe(recipe_of(method, variant))
    assemble.check_reachable(recipe)
    summary = simulation.simulate(recipe, None, folder)
    totals = (
        "time_s",
        "inner_steps",
        "absorbed_steps",
        "outer_steps",
        "local_updates",
        "messages",
        "sent_bytes",
        "slow_link_bytes",
        "idle_fraction",
        "stopped",
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return {
        "recipe": recipe_of(method, variant),
        "totals": {name: summary[name] for name in totals},
        "metrics": [
            {name: value for name, value in json.loads(line).items() if value is not None}
            for line in lines
        ],
        **digest(trace),
    }


def digest(trace: list[dict[str, Any]]) -> dict[str, Any]:
    """The first spans of a trace, and for each node and kind of span how many there are, when the
    first one starts and the last one ends, and the sums of their starts and lengths: whatever moves
    a span moves one of these.
    """
    names = {
        entry["tid"]: entry["args"]["name"] for entry in trace if entry["name"] == "thread_name"
    }
    spans = [
        (names[entry["tid"]], entry["name"], entry["ts"] / 1e6, entry["dur"] / 1e6)
        for entry in trace
        if entry["ph"] == "X"
    ]
    of_nodes: dict[str, dict[str, Any]] = {}
    for node, what, start_s, length_s in spans:
        sums = of_nodes.setdefault(node, {}).setdefault(
            what,
            {"spans": 0, "first_s": start_s, "last_end_s": 0.0, "starts_s": 0.0, "lengths_s": 0.0},
        )
        sums["spans"] += 1
        sums["last_end_s"] = max(sums["last_end_s"], start_s + length_s)
        sums["starts_s"] += start_s
        sums["lengths_s"] += length_s
    return {
        "first_spans": [
            {"node": node, "what": what, "start_s": start_s, "end_s": start_s + length_s}
            for node, what, start_s, length_s in spans[:FIRST_SPANS]
        ],
        "spans": of_nodes,
    }


def differences(found: Any, kept: Any, place: str = "") -> Iterator[str]:
    """Where two golden files differ, a line each; times may differ by 1e-9 of themselves."""
    if isinstance(found, dict) and isinstance(kept, dict):
        for key in [*kept, *(key for key in found if key not in kept)]:
            at = f"{place}.{key}" if place else key
            if key not in found:
                yield f"{at} is gone, was {kept[key]}"
            elif key not in kept:
                yield f"{at} is new: {found[key]}"
            else:
                yield from differences(found[key], kept[key], at)
    elif isinstance(found, list) and isinstance(kept, list):
        if len(found) != len(kept):
            yield f"{place} has {len(found)} entries, had {len(kept)}"
        for i, pair in enumerate(zip(found, kept, strict=False)):
            yield from differences(*pair, f"{place}[{i}]")
    elif isinstance(found, float) and isinstance(kept, float):
        if not math.isclose(found, kept, rel_tol=REL, abs_tol=1e-12):
            yield f"{place} is {found!r}, was {kept!r}"
    elif found != kept:
        yield f"{place} is {found!r}, was {kept!r}"


@pytest.mark.parametrize(("method", "variant"), list(cases()))
def test_a_golden_run_is_as_it_was(method: str, variant: str, tmp_path: Path) -> None:
    path = GOLDEN / f"{method}-{variant}.json"
    assert path.is_file(), f"{path.name} is not there; write it with: python tests/test_golden.py"
    found = json.loads(json.dumps(golden(method, variant, tmp_path / "run")))
    different = list(differences(found, json.loads(path.read_text())))
    assert not different, "\n".join([f"{path.name}: {len(different)} differ", *different[:12]])


@pytest.mark.parametrize("wire", ["bf16", "int4"])
@pytest.mark.parametrize("method", methods.names())
def test_fewer_bits_break_no_invariant(method: str, wire: str, tmp_path: Path) -> None:
    """Also while nodes crash, messages are lost and links go down; and fewer bytes are sent."""
    recipe = parse_recipe({**recipe_of(method, "faults"), "wire": wire})
    summary = simulation.simulate(recipe, None, tmp_path / "run")
    kept = json.loads((GOLDEN / f"{method}-faults.json").read_text())["totals"]
    assert summary["sent_bytes"] < 0.8 * kept["sent_bytes"]
    assert summary["stopped"] == kept["stopped"]


def test_every_golden_file_is_of_a_run() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {
        f"{method}-{variant}.json" for method, variant in cases()
    }


@pytest.mark.parametrize(
    ("found", "kept", "said"),
    [
        ({"a": 1.0}, {"a": 1.0 + 1e-12}, []),
        ({"a": 1.0}, {"a": 1.0 + 1e-8}, ["a is 1.0, was 1.00000001"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a[1] is 2, was 3"]),
        ({"a": [1]}, {"a": [1, 3]}, ["a has 1 entries, had 2"]),
        ({"b": {"c": 1}}, {"b": {"d": 2}}, ["b.d is gone, was 2", "b.c is new: 1"]),
        ({"a": 1}, {"a": None}, ["a is 1, was None"]),
    ],
)
def test_a_difference_is_named_with_both_values(found: Any, kept: Any, said: list[str]) -> None:
    assert list(differences(found, kept)) == said


def rounded(value: Any) -> Any:
    """Times to 12 digits: the last ones differ from machine to machine."""
    match value:
        case dict():
            return {key: rounded(entry) for key, entry in value.items()}
        case list() | tuple():
            return [rounded(entry) for entry in value]
        case float():
            return float(f"{value:.12g}")
    return value


def laid_out(value: Any, indent: str = "") -> str:
    """JSON with a record a line: what holds no dicts, and no lists of them, is one line."""
    if not _holds_records(value):
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {laid_out(entry, inner)}" for key, entry in value.items()]
    else:
        lines = [laid_out(entry, inner) for entry in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}{end}"


def _holds_records(value: Any) -> bool:
    if isinstance(value, dict):
        return any(isinstance(entry, dict) or _holds_records(entry) for entry in value.values())
    return isinstance(value, list) and any(isinstance(entry, dict) for entry in value)


def write_all() -> None:
    """Write all golden files anew, and remove those of runs that are no more."""
    GOLDEN.mkdir(exist_ok=True)
    for path in GOLDEN.glob("*.json"):
        path.unlink()
    for method, variant in cases():
        with tempfile.TemporaryDirectory() as folder:
            run = golden(method, variant, Path(folder) / "run")
        text = laid_out(rounded(run)) + "\n"
        (GOLDEN / f"{method}-{variant}.json").write_text(text)
        print(f"{method}-{variant}: {len(text):,} bytes")


if __name__ == "__main__":
    write_all()
