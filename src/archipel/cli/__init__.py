"""The command line: which commands there are, and how errors become exit codes.

What belongs here: the list of commands, and the exit codes: 0; 1, training could not go on; 2, a
mistake that the user can mend; 130, Ctrl-C. What does not: what a Python program would want to call
as well, which is in `experiment.py`.
"""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

import archipel
from archipel.cli import clusters, questions, recipes, runs, studies, terminal, texts
from archipel.errors import TrainingError, UserError

app = typer.Typer(
    help="Train one model over slow links: compare methods on a modelled network, then run one for "
    "real.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
theory = typer.Typer(
    help="What is known exactly about a method.", no_args_is_help=True, rich_markup_mode=None
)
topology = typer.Typer(help="What a network is like.", no_args_is_help=True, rich_markup_mode=None)
app.command()(runs.compare)
app.command()(recipes.init)
app.command()(recipes.check)
app.command()(runs.sweep)
app.command()(runs.run)
app.command()(runs.resume)
app.command()(runs.launch)
app.command()(runs.attach)
app.command()(runs.report)
app.command("list")(questions.list_names)
app.command()(recipes.schema)
app.command()(texts.tokenize)
app.command()(texts.generate)
app.command()(texts.evaluate)
app.command("study")(studies.study_command)
app.command()(questions.latency)
app.command()(questions.fuzz)
app.command()(clusters.fidelity)
app.add_typer(topology, name="topology")
topology.command("probe")(clusters.probe)
app.add_typer(theory, name="theory")
theory.command("noloco")(questions.theory_noloco)


@topology.callback()
def topology_command() -> None:
    """What a network is like."""


@theory.callback()
def theory_command() -> None:
    """What is known exactly about a method."""


def _version(asked: bool) -> None:
    if asked:
        print(f"archipel {archipel.__version__}")
        raise typer.Exit


@app.callback()
def archipel_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print the version, and do nothing else.",
        ),
    ] = False,
) -> None:
    """What all commands have."""


def main() -> None:
    """Run the command line and turn errors into one line and an exit code, and warnings into one
    line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show Greek shows a question mark.
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *_: terminal.say(f"archipel: warning: {message}")
    try:
        sys.exit(app(prog_name="archipel", standalone_mode=False) or 0)
    except UserError as error:
        _complain(error, 2)
    except TrainingError as error:
        _complain(error, 1)
    except OSError as error:  # a full disk, a folder that cannot be written to
        _complain(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
    except Exception as error:
        # The option parser's own errors. Which package they come from depends on typer's version.
        if not hasattr(error, "format_message"):
            raise
        _complain(_wrong_option(error), getattr(error, "exit_code", 2))


def _wrong_option(error: Any) -> str:
    """What the option parser complains of, as all other mistakes are told: option, value, what is
    allowed. It leaves the value out.
    """
    names: list[str] = getattr(getattr(error, "param", None), "opts", [])
    given = ""
    for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:  # the last one counts
            given = value if equals else following
    if not given or not error.message or repr(given) in error.message:
        return str(error.format_message())
    return f"{names[0]} {given}: {error.message.removeprefix('Input ')}"


def _complain(message: object, code: int) -> NoReturn:
    terminal.say(f"archipel: {message}")
    sys.exit(code)
