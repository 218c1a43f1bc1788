"""One study made: its runs, what they say, and the page of claims.

What belongs here: where a study's runs are kept so that none is made twice, its record as JSON, and
the page that is written from such records. What does not: the questions (`studies/`), and how
several recipes are simulated (`series.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from archipel import report, studies
from archipel.disk import checkpoint, rundir
from archipel.errors import UserError
from archipel.recipe import Recipe
from archipel.report import Result
from archipel.series import Progress, say_nothing, simulate_all
from archipel.studies import Findings, Size

RECORDS, PAGE = "studies", "claims.md"
"""Where the records are in a folder of docs, and the page that is made of them."""


@dataclass(frozen=True)
class Record:
    """What a study has left, as it is put on disk.

    Attributes:
        study, question: its name, and what it asks.
        command: makes it again.
        size: inner steps a run, and seeds.
        headline: what is real and what is modelled.
        findings: what was found; plots by the names of their files.
        date, machine, versions: when and where the runs were made, by the last of them.
    """

    study: str
    question: str
    command: str
    size: Size
    headline: str
    findings: Findings
    date: str
    machine: str
    versions: dict[str, str]

    def to_json(self) -> str:
        """The record as a JSON object; plots by their names alone."""
        plain = asdict(self)
        plain["findings"]["plots"] = [plot.name for plot in self.findings.plots]
        return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def make(
    name: str,
    size: Size,
    out: Path | None = None,
    processes: int | None = None,
    progress: Progress = say_nothing,
    warn: Callable[[str], None] = say_nothing,
) -> Record:
    """Make the runs of a study that are not there yet, and answer from all.

    Runs are kept in a folder whose name follows from the recipes but for their seeds, and from the
    versions of the libraries that bits depend on: what is found there is the same run.

    Args:
        name: of the study.
        out: the folder of runs, plots and `findings.json`. Default: runs/studies/NAME-DIGEST.
        processes: that compute gradients; None: one a core, or one a GPU.
        progress: is called while runs go on, with how far they are.
        warn: is told of each run that has diverged.

    Raises:
        UserError: there is no such study, or its folder holds other runs.
        Interrupted: Ctrl-C; the runs that have ended stay, and the next call goes on from them.
    """
    study = studies.load(name)
    recipes = study.recipes(size)
    folder = out or Path("runs") / "studies" / f"{name}-{_digest(recipes)}"
    runs, diverged = simulate_all(recipes, folder, processes, progress=progress, keep=True)
    for line in diverged:
        warn(line)
    planned = [rundir.name_of(recipe) for recipe in recipes]
    runs = sorted(runs, key=lambda run: planned.index(run.directory.name))
    findings = study.answer(runs, size, folder)
    report.write(runs, folder)
    last = max(runs, key=_ended)
    record = Record(
        study=name,
        question=study.TITLE,
        command=f"archipel study {name} {_asked(study, size)}",
        size=size,
        headline=report.headline(runs),
        findings=findings,
        date=time.strftime("%Y-%m-%d", time.gmtime(_ended(last))),
        machine=last.summary["machine"],
        versions=last.summary["versions"],
    )
    (folder / "findings.json").write_text(record.to_json(), encoding="utf-8")
    return record


def _ended(run: Result) -> float:
    return (run.directory / "summary.json").stat().st_mtime


def _asked(study: studies.Study, size: Size) -> str:
    if size == study.FULL:
        return "--full"
    return "--quick" if size == study.QUICK else f"--steps {size.steps} --seeds {size.seeds}"


def _digest(recipes: list[Recipe]) -> str:
    """Of recipes and versions; more seeds are more runs of the same."""
    same_seed = [replace(one, run=one.run.model_copy(update={"seed": 0})) for one in recipes]
    said = json.dumps([sorted({one.to_yaml() for one in same_seed}), checkpoint.versions()])
    return hashlib.sha256(said.encode()).hexdigest()[:10]


def keep(record: Record, docs: Path) -> None:
    """Put a record and its plots into a folder of docs, and write its page anew."""
    folder = docs / RECORDS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{record.study}.json").write_text(record.to_json(), encoding="utf-8")
    for plot in record.findings.plots:
        shutil.copyfile(plot, folder / plot.name)
    write_page(docs)


def write_page(docs: Path) -> None:
    """Write the page of claims from the records in a folder of docs.

    Raises:
        UserError: there is no record.
    """
    (docs / PAGE).write_text(page(docs), encoding="utf-8")


def page(docs: Path) -> str:
    """The page of claims, as Markdown: a row for each claim, then a section for each study.

    Raises:
        UserError: there is no record.
    """
    paths = sorted((docs / RECORDS).glob("*.json"))
    if not paths:
        raise UserError(f"{docs / RECORDS} has no records of studies: give a name, and --full")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return "\n".join([*_claims(records), *(line for one in records for line in _section(one))])


def _claims(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "# Claims and doubts, and what we see",
        "",
        "Written by `archipel study --write-docs docs` from the records in `docs/studies`: no "
        "figure on this page was typed by hand.",
        "Verdicts are those of small models on a modelled network; each study below says which. "
        "What follows a ± is half of the 95 % interval of the mean over seeds, by Student's t.",
        "",
        "| claim or doubt | where | what we see | verdict | study |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        for claim in record["findings"]["claims"]:
            reason = f": {claim['reason']}" if claim["reason"] else ""
            cells = [
                claim["claim"],
                claim["source"],
                claim["seen"],
                f"**{claim['verdict']}**{reason}",
                f"[{record['study']}](#{record['study']})",
            ]
            lines.append(_row(cells))
    return lines


def _section(record: dict[str, Any]) -> list[str]:
    found, size = record["findings"], Size(**record["size"])
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return [
        "",
        f"## {record['study']}",
        "",
        f"**{record['question']}**",
        "",
        found["finding"].replace("\n", "\n\n"),
        "",
        _row(found["columns"]),
        "|" + "---|" * len(found["columns"]),
        *(_row(row) for row in found["rows"]),
        "",
        *(f"![{record['study']}]({RECORDS}/{plot})" for plot in found["plots"]),
        "",
        f"*{record['headline']}* `{record['command']}`: {size.text}; "
        f"{record['date']}, {record['machine']}, {versions}.",
    ]


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
