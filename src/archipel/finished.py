"""What can be done with the language models that runs have left: have them write, and score them.

What belongs here: finding the model of a run, `generate`, and `evaluate` through lm-eval. What does
not: validation losses during a run, and how the folder `model` is written
(`train/causal_lm.py`).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from archipel import report
from archipel.disk.rundir import MODEL
from archipel.errors import UserError, nearest, seen_from
from archipel.recipe.arguments import check_arguments
from archipel.train.extra import library

YAML = (".yaml", ".yml")
TASKS = "--tasks"
"""What errors call the tasks."""


@dataclass(frozen=True)
class Score:
    """One metric of one model on one task of lm-eval.

    Attributes:
        run: the name of the run directory, or of the model's folder.
        task: the task's name, or what it calls itself.
        metric: with the filter that its answers went through, if there is one: `exact_match,
            strict-match`.
        value: over all documents.
        stderr: standard error of the value over the documents, as lm-eval computes it; None: it has
            none.
        documents: how many were scored.
        few_shot: worked examples in front of each; None: lm-eval does not say.
        higher_is_better: None: lm-eval does not say.
    """

    run: str
    task: str
    metric: str
    value: float
    stderr: float | None
    documents: int
    few_shot: int | None
    higher_is_better: bool | None


def models(directory: Path) -> dict[str, Path]:
    """The folders of models by the names of their runs: of a run directory, of all of them right in
    a folder, or the folder itself if `transformers` can load it.

    Raises:
        UserError: there is none.
    """
    if (directory / "config.json").is_file():
        return {directory.resolve().name: directory}
    if not directory.is_dir():
        raise UserError(f"there is no folder {str(directory)!r}{seen_from(directory)}")
    runs = report.find(directory)
    if not runs:
        raise UserError(f"{directory}: no run has ended there (a folder with summary.json)")
    found = {run.name: run / MODEL for run in runs if (run / MODEL / "config.json").is_file()}
    if not found:
        raise UserError(
            f"{directory}: no folder {MODEL!r} in {', '.join(run.name for run in runs)}; task "
            "causal_lm leaves one, and a Task with `export`"
        )
    if len(found) < len(runs):
        without = ", ".join(run.name for run in runs if run.name not in found)
        warnings.warn(f"left out, for there is no folder {MODEL!r}: {without}", stacklevel=2)
    return found


def generate(
    directory: str | Path,
    prompt: str,
    *,
    tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """What the model of a run writes behind a prompt; the prompt is not in it.

    Args:
        directory: a run directory, a folder that holds one, or a model's folder.
        tokens: the longest text; it may end before.
        temperature: 0: the likeliest token each time; 1: by the model's own probabilities.
        seed: of what is drawn, where the temperature is above 0.

    Raises:
        UserError: there is no model, or not one alone; or an argument is impossible.
    """
    check_arguments(directory=directory)
    folder = _only(models(Path(directory)), Path(directory))
    if tokens < 1:
        raise UserError(f"--tokens {tokens}: must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"--temperature {temperature}: must be 0 or more")
    transformers = library("transformers", "`archipel generate` needs")
    with _loading(folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(_device()).eval()
    start = prompt or tokenizer.eos_token  # a text begins where the one before it ended
    numbers = tokenizer(start, return_tensors="pt").input_ids.to(model.device)
    if not numbers.numel():
        raise UserError(f"{folder}: its tokenizer makes no token of --prompt {prompt!r}")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and numbers.shape[1] + tokens > longest:
        raise UserError(
            f"--tokens {tokens}: the model takes {longest} tokens at most, and the prompt has "
            f"{numbers.shape[1]}"
        )
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0}
    torch.manual_seed(seed)
    with torch.no_grad():
        written = model.generate(
            numbers,
            attention_mask=torch.ones_like(numbers),
            max_new_tokens=tokens,
            pad_token_id=tokenizer.eos_token_id,
            **(drawn if temperature else {"do_sample": False}),
        )
    return str(tokenizer.decode(written[0, numbers.shape[1] :], skip_special_tokens=True))


def evaluate(
    directory: str | Path,
    tasks: str | Sequence[str],
    *,
    few_shot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> list[Score]:
    """Score the models of runs with EleutherAI's lm-eval.

    Args:
        directory: a run directory, a folder that holds some, or a model's folder.
        tasks: names that lm-eval knows, or YAML files of its kind; also as one text with commas.
        few_shot: worked examples in front of each document; None: as each task says.
        limit: only so many documents of each task: to try it out, not to report.
        batch_size: documents that are scored at once.

    Raises:
        UserError: there is no model or no such task; its data cannot be read; an argument is
            impossible.
    """
    check_arguments(directory=directory)
    folders = models(Path(directory))
    names = [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks)]
    for option, value, least in (
        ("--few-shot", few_shot, 0),
        ("--limit", limit, 1),
        ("--batch-size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{option} {value}: must be at least {least}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    lm_eval = library("lm_eval", "`archipel evaluate` needs", "eval")
    by_name = [name for name in names if Path(name).suffix not in YAML]
    # Its own tasks are thousands of files, and reading them takes many seconds.
    manager = _managers(with_own=bool(by_name))
    named = [_task(name, manager) for name in names if name]
    if not named:
        raise UserError(f"{TASKS}: name at least one task of lm-eval, or a YAML file of one")
    hugging_face = library("lm_eval.models.huggingface", "`archipel evaluate` needs", "eval").HFLM
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    scores = []
    for run, folder in folders.items():
        with _loading(folder):
            model = hugging_face(pretrained=str(folder), device=_device(), batch_size=batch_size)
        try:
            found = lm_eval.simple_evaluate(
                model,
                tasks=named,
                task_manager=manager,
                num_fewshot=few_shot,
                limit=limit,
                log_samples=False,
                batch_size=batch_size,
            )
        except Exception as error:
            raise UserError(
                f"{TASKS} {','.join(names)}: lm-eval cannot score {folder}: "
                f"{' '.join(str(error).split()) or type(error).__name__}"
            ) from error
        scores += _scores(run, found)
    return scores


def _only(found: dict[str, Path], directory: Path) -> Path:
    if len(found) > 1:
        raise UserError(f"{directory} holds several runs; name one of {', '.join(found)}")
    return next(iter(found.values()))


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Whatever `transformers` says against a folder is one line."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder}: no language model with a tokenizer: {said}") from error


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def _managers(*, with_own: bool) -> Any:
    """What finds lm-eval's tasks: also those that come with it, or files alone."""
    tasks = library("lm_eval.tasks", "`archipel evaluate` needs", "eval")
    return tasks.TaskManager(include_defaults=with_own)


def _task(name: str, manager: Any) -> str:
    """A task as lm-eval wants it.

    Raises:
        UserError: there is no such file, or lm-eval does not know the name.
    """
    path = Path(name)
    if path.suffix in YAML:
        if not path.is_file():
            raise UserError(f"{TASKS}: there is no file {name!r}{seen_from(path)}")
        return str(path.resolve())
    known = manager.all_tasks
    if name not in known:
        raise UserError(
            f"{TASKS} {name}: lm-eval has no task of that name{nearest(name, known)}; `lm-eval ls "
            "tasks` lists them"
        )
    return name


def _scores(run: str, found: dict[str, Any]) -> list[Score]:
    """All numbers of lm-eval's answer that have a metric's name."""
    scores = []
    for task, figures in found["results"].items():
        better = found["higher_is_better"].get(task, {})
        for key, value in figures.items():
            metric, comma, answers = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = figures.get(f"{metric}_stderr,{answers}")
            scores.append(
                Score(
                    run=run,
                    task=figures.get("alias", task).strip(" -"),
                    metric=metric if answers == "none" else f"{metric},{answers}",
                    value=float(value),
                    stderr=float(error) if isinstance(error, (int, float)) else None,
                    documents=int(figures.get("sample_len", 0)),
                    few_shot=found["n-shot"].get(task),
                    higher_is_better=better.get(metric),
                )
            )
    return scores
