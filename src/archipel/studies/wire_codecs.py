"""What do fewer bits on the wire save, and what do they cost?

What is compared: each method with each codec, on two regions of two workers with a link between
them that is slow beside their steps; all else is the same, data included. Settings are those of the
demo's short runs where the published ones need more outer steps than a run here has.

A change of the loss is that between two runs of one seed. Methods in which nobody waits see their
messages in another order if these take another time, so that their changes have more chance in
them. Times are those to the loss that the worst run of the same method ends at.

The network is modelled and the rounding is real. The time that it takes to round is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from archipel import methods
from archipel.recipe import Recipe, parse_recipe
from archipel.report import Result, intervals
from archipel.report.comparison import time_to_target_s
from archipel.run.codec import CODECS
from archipel.studies import Findings, Size

TITLE = "What do bf16, int8 and int4 on the wire save of each method's time, and cost of its loss?"
TOPOLOGY: dict[str, Any] = {
    "name": "2 regions of 2 workers, 1 Gbit/s and 70 ms apart",
    "regions": {"east": [1.0, 1.0], "west": [1.0, 0.8]},
    "default": {"bandwidth_gbit_s": 1.0, "latency_ms": 70},
}
SETTINGS: Mapping[str, Any] = {
    "inner_steps": 8,
    "outer_momentum": 0.5,
    "local_momentum": 0.5,
    "accumulate": 4,
    "buffer": 8,
}
"""Of each method, where it has them."""
QUICK, FULL = Size(steps=160, seeds=1), Size(steps=1_250, seeds=5)

Runs = Mapping[tuple[str, str], Sequence[Result]]
"""By method and codec, in the order of seeds."""


def recipes(size: Size) -> list[Recipe]:
    """For each seed a run of each method with each codec."""
    return [
        parse_recipe(
            {
                "label": f"{name}-{codec}",
                "method": {"name": name, **_settings_of(name)},
                "topology": TOPOLOGY,
                "wire": codec,
                "run": {"steps": size.steps, "seed": seed},
            }
        )
        for name in methods.names()
        for codec in CODECS
        for seed in range(size.seeds)
    ]


def answer(results: Sequence[Result], size: Size, out: Path) -> Findings:
    """What each codec saves of each method's time, and what it costs of its loss."""
    names = methods.names()
    runs: Runs = {
        (name, codec): [one for one in results if one.summary["label"] == f"{name}-{codec}"]
        for name in names
        for codec in CODECS
    }
    return Findings(
        finding=finding(runs) + ("" if size.seeds > 1 else " One seed says nothing about chance."),
        claims=[],
        columns=[
            "method",
            "wire",
            "final loss",
            "change by the wire",
            "time to the loss",
            "speed-up",
            "over slow links",
        ],
        rows=[row for name in names for row in rows(name, runs)],
        plots=[plot(runs, out / "wire-codecs.png")],
    )


def _settings_of(name: str) -> dict[str, Any]:
    known = methods.load(name).Config.model_fields
    return {key: value for key, value in SETTINGS.items() if key in known}


def rows(name: str, runs: Runs) -> list[list[Any]]:
    """The lines of one method."""
    times = {codec: times_s(name, codec, runs) for codec in CODECS}
    found = []
    for codec in CODECS:
        group = runs[name, codec]
        speed_ups = [a / b for a, b in zip(times["fp32"], times[codec], strict=True)]
        slow_bytes = [one.summary["slow_link_bytes"] for one in group]
        found.append(
            [
                name,
                codec,
                intervals.text([one.summary["final_loss"] for one in group], ".3f"),
                "" if codec == "fp32" else intervals.text(changes(name, codec, runs), "+.4f"),
                intervals.text(times[codec], ".0f") + " s",
                "" if codec == "fp32" else intervals.text(speed_ups, ".2f"),
                f"{fmean(slow_bytes) / 1e9:.3g} GB",
            ]
        )
    return found


def changes(name: str, codec: str, runs: Runs) -> list[float]:
    """By how much the final loss is higher than that of the run of the same seed as fp32."""
    pairs = zip(runs[name, codec], runs[name, "fp32"], strict=True)
    return [one.summary["final_loss"] - plain.summary["final_loss"] for one, plain in pairs]


def times_s(name: str, codec: str, runs: Runs) -> list[float]:
    """Seconds to the loss that the worst run of the method ends at, for each seed."""
    target = max(one.summary["final_loss"] for each in CODECS for one in runs[name, each])
    found = [time_to_target_s(one, target) for one in runs[name, codec]]
    return [time_s for time_s in found if time_s is not None]


def finding(runs: Runs) -> str:
    """What each codec saves and costs, over all methods."""
    said = []
    for codec in CODECS[1:]:
        speed_ups, worse = {}, {}
        for name in dict.fromkeys(name for name, _ in runs):
            plain_s, coded_s = (fmean(times_s(name, each, runs)) for each in ("fp32", codec))
            speed_ups[name], worse[name] = plain_s / coded_s, fmean(changes(name, codec, runs))
        slowest, fastest = min(speed_ups.items(), key=_second), max(speed_ups.items(), key=_second)
        least, most = min(worse.items(), key=_second), max(worse.items(), key=_second)
        said.append(
            f"{codec} makes a method {slowest[1]:.2f} ({slowest[0]}) to {fastest[1]:.2f} "
            f"({fastest[0]}) times as fast, and changes its final loss by {least[1]:+.4f} "
            f"({least[0]}) to {most[1]:+.4f} ({most[0]})."
        )
    return " ".join(said)


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


def plot(runs: Runs, path: Path) -> Path:
    """The loss over the modelled time, the mean of all seeds."""
    names = list(dict.fromkeys(name for name, _ in runs))
    figure = Figure(figsize=(3.2 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    colours = ("#444444", "#009E73", "#0072B2", "#D55E00")
    for axes, name in zip(panels, names, strict=True):
        for colour, codec in zip(colours, CODECS, strict=True):
            lines = [one.evals[1:] for one in runs[name, codec]]
            count = min(map(len, lines))
            times_s, losses = (
                [fmean(line[i][key] for line in lines) for i in range(count)]
                for key in ("time_s", "loss")
            )
            axes.plot(times_s, losses, color=colour, linewidth=1.3, label=codec)
        axes.set(xlabel="modelled seconds", title=name)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(CODECS), frameon=False)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    return path
