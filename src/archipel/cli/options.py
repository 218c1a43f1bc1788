"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def a_path(text: str) -> Path:
    """A file or a folder as it is named on the command line.

    Raises:
        BadParameter: there is no name. Python takes that for the folder where the command runs,
            which nobody can mean whose shell variable is empty.
    """
    if not text.strip():
        raise typer.BadParameter(
            f"{text!r} is no name of a file or folder; '.' is the folder where the command runs."
        )
    return Path(text)


def file_argument(metavar: str, text: str) -> Any:
    """An argument that names a file; `text` is its help."""
    return typer.Argument(parser=a_path, metavar=metavar, help=text)


def path_option(metavar: str, text: str) -> Any:
    """An option that names a file or a folder; `text` is its help."""
    return typer.Option(parser=a_path, metavar=metavar, help=text)


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change one setting; can be given often."
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes that compute gradients. Default: one a core, or one a GPU."
    ),
]
CheckpointEvery = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS|SECONDSs",
        help="Save the run after so many tokens, or seconds here (600s); Ctrl-C saves it anyway.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="A running Ray cluster. Default: a private one, on this machine."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Join a cluster without token or encryption.")
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Stop at a training loss that is not finite; restart no worker."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object alone on stdout.")]
