"""The commands around text: `tokenize` before a run; `generate` and `evaluate` after it.

What belongs here: their arguments, and what they print. What does not: how documents are read
(`train/documents.py`), a tokenizer is trained (`train/tokenizer.py`), and a model is used
(`finished.py`).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from archipel import finished
from archipel.cli import terminal
from archipel.cli.options import Json, file_argument, path_option
from archipel.train.documents import Source
from archipel.train.tokenizer import train_tokenizer


def tokenize(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A parquet, jsonl, csv, arrow or text file, a folder of them, or a name on the "
            "Hugging Face hub.",
        ),
    ],
    vocabulary: Annotated[
        int, typer.Option(help="Tokens at most; all bytes and the end of a text are among them.")
    ] = 4096,
    out: Annotated[
        Path | None, path_option("FILE", "The tokenizer. Default: tokenizer.json.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    split: Annotated[str, typer.Option(help="The part of the data to learn from.")] = "train",
    subset: Annotated[
        str | None, typer.Option(help="Which of the data sets under the hub's name.")
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer on text, for task causal_lm."""
    source = Source(data, subset, text_column, None)
    tokenizer = train_tokenizer((text for _, text in source.documents(split)), vocabulary)
    out = out or Path("tokenizer.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    terminal.tell(f"{out}: {tokenizer.get_vocab_size():,} tokens")


def generate(
    directory: Annotated[
        Path, file_argument("DIR", "A run directory, or the folder of a model of transformers.")
    ],
    prompt: Annotated[str, typer.Option(help="What stands before; may be empty.")],
    tokens: Annotated[int, typer.Option(help="Length of the text at most.")] = 64,
    temperature: Annotated[
        float, typer.Option(help="0: the likeliest token each time; 1: by the model's odds.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
) -> None:
    """Have the language model of a run go on with a text."""
    text = finished.generate(directory, prompt, tokens=tokens, temperature=temperature, seed=seed)
    terminal.tell(prompt + text)


def evaluate(
    directory: Annotated[
        Path,
        file_argument("DIR", "A run directory, a folder that holds some, or a model's folder."),
    ],
    tasks: Annotated[
        str,
        typer.Option(metavar="A,B,…", help="Tasks of lm-eval by name, or YAML files of its kind."),
    ],
    few_shot: Annotated[
        int | None,
        typer.Option(help="Worked examples before each document. Default: as the task says."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Score only so many documents of each task, to try it out.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Documents that are scored at once.")] = 8,
    as_json: Json = False,
) -> None:
    """Score the language models of runs with lm-eval."""
    scores = finished.evaluate(
        directory, tasks, few_shot=few_shot, limit=limit, batch_size=batch_size
    )
    if as_json:
        rows = [asdict(score) for score in scores]
        for row in rows:  # JSON has no NaN and no infinity, and a perplexity may be either
            row["value"] = row["value"] if math.isfinite(row["value"]) else None
        print(json.dumps(rows, allow_nan=False))
        return
    table = Table(box=None)
    for name in ("run", "task", "metric", "value", "± standard error", "documents", "few-shot"):
        table.add_column(name, justify="left" if name in ("run", "task", "metric") else "right")
    for score in scores:
        arrow = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
        error = "" if score.stderr is None else f"{score.stderr:.4f}"
        shots = "" if score.few_shot is None else str(score.few_shot)
        figures = (f"{score.value:.4f}", error, f"{score.documents:,}", shots)
        table.add_row(score.run, score.task, score.metric + arrow, *figures)
    terminal.tell(table)
    if limit is not None:
        terminal.tell(f"--limit {limit}: of the first documents alone, not the tasks' own scores")
