"""A comparison as one HTML page that needs no other file, and its plots as PNG files.

What belongs here: the parts of the page, and writing it. What does not: the numbers, words and
plots in it. `report.html` is the template.
"""

from __future__ import annotations

import base64
import io
import os
import string
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from archipel.report.comparison import Groups, by_label, rows, target_loss
from archipel.report.plots import LOOKS, STYLE, Plot, figures
from archipel.report.results import Result
from archipel.report.words import changed, finding, headline, notes, table_cells


def write(runs: Sequence[Result], out: Path, target: float | None = None) -> Path:
    """Write `report.html`, a page that needs no other file, and its plots as PNG files into `out`.
    Returns the page's path.

    `target` is a loss; `target_loss(runs)` if None. Each file is replaced in one go. Raises
    ReportError as `rows` does, and for a `trace.json` that is not JSON.
    """
    return write_page(runs, out, target_loss(runs) if target is None else target)


def write_page(
    runs: Sequence[Result],
    out: Path,
    target: float | None,
    *,
    heading: str = "method",
    first: Callable[[], Iterable[Plot]] = lambda: (),
) -> Path:
    """As `write`, but without a target if `target` is None.

    Args:
        heading: what a label stands for.
        first: draws the plots that come before all others.
    """
    compared = rows(runs, target)
    groups = {row["label"]: by_label(runs)[row["label"]] for row in compared}
    with matplotlib.rc_context(STYLE):
        plots = [
            (f"{name}.png", _png(figure), caption)
            for name, figure, caption in chain(first(), figures(groups, compared, target))
        ]
    headers, *cells = table_cells(compared, target, slower=True, heading=heading)
    template = string.Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(", ".join(groups)),
        headline=escape(headline(runs)),
        finding=escape(finding(compared, target)),
        comparison=_html_table(headers, cells, groups),
        notes=escape(notes(runs, target)),
        settings="\n".join(_settings(label, group[0].summary) for label, group in groups.items()),
        plots="\n".join(
            f'<figure><img alt="{escape(name)}" '
            f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for name, png, caption in plots
        ),
        runs=_runs_table(groups),
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, content in [*((name, png) for name, png, _ in plots), ("report.html", page.encode())]:
        partial = out / f".{name}.{os.getpid()}"
        partial.write_bytes(content)
        os.replace(partial, out / name)
    return out / "report.html"


def _html_table(headers: Iterable[str], cells: Iterable[Sequence[str]], groups: Groups) -> str:
    """A table whose first column is a label, beside the colour that the label has in the plots."""
    looks = dict(zip(groups, cycle(LOOKS), strict=False))
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(
        f'\n<tr><th><i style="background:{looks[label][0]}"></i>{escape(label)}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for label, *rest in cells
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _settings(label: str, summary: dict[str, Any]) -> str:
    """A method's settings: first those that differ from the published ones."""
    others = " · ".join(
        f"{key} {value}"
        for key, value in summary["settings"].items()
        if key not in summary["changed"]
    )
    first = (
        f"<b>{escape(changed(summary))}</b>"
        if summary["changed"]
        else "all as published"
        if others
        else "nothing to set"
    )
    return f"<dt>{escape(label)}</dt><dd>{first}<small>{escape(others)}</small></dd>"


def _runs_table(groups: Groups) -> str:
    keys = ("label", "seed", "stopped", "inner_steps", "time_s", "wall_s", "processes", "machine")
    cells = []
    for run in chain.from_iterable(groups.values()):
        values = (
            f"{value:.1f}" if isinstance(value := run.summary[key], float) else str(value)
            for key in keys
        )
        versions = ", ".join(
            f"{name} {version}" for name, version in run.summary["versions"].items()
        )
        cells.append([*values, versions, run.directory.name])
    return _html_table([*keys, "versions", "directory"], cells, groups)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
