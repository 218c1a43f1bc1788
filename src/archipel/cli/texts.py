"""The command that makes something of text, before any run: `tokenize`.

What belongs here: its arguments, and what it prints. What does not: how documents are read
(`train/documents.py`) and a tokenizer is trained (`train/tokenizer.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from archipel.cli import terminal
from archipel.cli.options import path_option
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
