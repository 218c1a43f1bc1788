"""What is trained: model, loss, data, inner optimizer and learning-rate schedule.

What belongs here: the `Task` that everything else trains, and how the built-in tasks make one from
their configuration. What does not: how inner steps are taken (`replica.py`), or by whom.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from archipel.errors import UserError, nearest
from archipel.pyfile import import_file, place_of, whereabouts
from archipel.train import causal_lm, data
from archipel.train.configs import (
    CausalLmTask,
    GptTask,
    StdlibTask,
    SyntheticTask,
    TaskConfig,
    TextTask,
    UserTask,
)
from archipel.train.data import Corpus, Shard
from archipel.train.documents import Source
from archipel.train.gpt import GPT, next_token_loss
from archipel.train.packed import packed, sequences_in
from archipel.train.seeding import seed_everything, seeds_kept
from archipel.train.shapes import SHAPES
from archipel.train.tokenizer import load_tokenizer

Batch = Any
UNNAMED = "a task of your own"
CPU = torch.device("cpu")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Schedule:
    """Learning rate over a run, as a factor of the optimizer's own: linear warm-up, then a cosine
    down to `final`.

    Attributes:
        warmup: the part of the run that warms up (published: 300 of 6144 steps).
        final: the factor at the end (published: 0.1).
    """

    warmup: float = 0.05
    final: float = 0.1

    def __post_init__(self) -> None:
        for name, most in (("warmup", 1.0), ("final", math.inf)):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value <= most and math.isfinite(value)):
                allowed = "a number from 0 to 1" if most == 1 else "a finite number, at least 0"
                raise UserError(f"Schedule.{name} = {value!r}: must be {allowed}")

    def factor(self, step: float, total: float) -> float:
        """The factor of the (0-based) `step` of `total` steps."""
        warmup = self.warmup * total
        if step + 1 < warmup:
            return (step + 1) / warmup
        done = min(max((step - warmup) / max(total - warmup, 1e-9), 0.0), 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, eq=False)
class Task:
    """What is trained: four functions, and a few facts about them.

    Attributes:
        model: makes the model. Called under a fixed seed, so that all workers start from the same
            weights.
        loss: the mean loss of the model on a batch, a 0-d tensor.
        batches: batch number `index` of a shard; must depend on nothing else. Validation batches
            are those of the shard whose `split` is `valid`, from 0 to `valid_batches` − 1.
        optimizer: makes the inner optimizer of a model: a `torch.optim.Optimizer` whose `step()`
            needs no closure. A parameter that a batch does not touch has no gradient in its step.
        valid_batches: how many batches an evaluation sees.
        tokens_per_step: tokens (or samples) of one batch, for the records; None: not known, and
            the records count inner steps alone.
        gradient_accumulation: into how many equal parts a batch is cut, whose gradients are taken
            one after the other and averaged: less memory, and one step of the optimizer all the
            same. A model in stages is cut by `pipeline.micro_batches` instead.
        gradient_clip: largest norm of a gradient; None: as it is.
        schedule: the learning rate over the run; None: constant.
        autocast: run the forward pass in this type; None: as the model is.
        description: what it is, for the report.
        loss_name: what the loss is, and its unit.
        entropy_rate: the best possible loss, where it is known.
        export: writes a state dict of the model, and what belongs beside it, into an empty folder,
            in a format that others read: the folder `model` of a run directory; None: there is no
            such format.

    Raises:
        UserError: a field has the wrong type, or a number is out of range.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batches: Callable[[Shard, int], Batch]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    valid_batches: int = 8
    tokens_per_step: int | None = None
    gradient_accumulation: int = 1
    gradient_clip: float | None = 1.0
    schedule: Schedule | None = Schedule()
    autocast: torch.dtype | None = None
    description: str = UNNAMED
    loss_name: str = "validation loss"
    entropy_rate: float | None = None
    export: Callable[[Mapping[str, Tensor], Path], None] | None = None

    def __post_init__(self) -> None:
        for name, gives in (
            ("model", "a function that makes it"),
            ("loss", "a function of a model and a batch"),
            ("batches", "a function of a shard and a number"),
            ("optimizer", "a function that makes it of a model"),
        ):
            value = getattr(self, name)
            # A module can be called too, but not to make a model.
            made = isinstance(value, nn.Module) and name in ("model", "optimizer")
            if made or not callable(value):
                _refuse(name, f"a {type(value).__name__}", gives)
        for name in ("valid_batches", "tokens_per_step", "gradient_accumulation"):
            count: Any = getattr(self, name)
            if count is None and name == "tokens_per_step":
                continue
            if not (_is_number(count) and isinstance(count, Integral) and int(count) >= 1):
                _refuse(name, repr(count), "a whole number, at least 1")
        clip, rate = self.gradient_clip, self.entropy_rate
        if clip is not None and not (_is_number(clip) and clip > 0 and math.isfinite(clip)):
            _refuse("gradient_clip", repr(clip), "a number above 0, or None: gradients as they are")
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            _refuse("schedule", repr(self.schedule), "an archipel.Schedule, or None: constant")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            _refuse("autocast", repr(self.autocast), "torch.bfloat16, torch.float16 or None")
        for name in ("description", "loss_name"):
            if not isinstance(getattr(self, name), str):
                _refuse(name, repr(getattr(self, name)), "a text")
        if rate is not None and not (_is_number(rate) and math.isfinite(rate)):
            _refuse("entropy_rate", repr(rate), "a finite number, or None")
        if self.export is not None and not callable(self.export):
            _refuse("export", repr(self.export), "a function of a state dict and a folder, or None")

    def seeded_model(self, seed: int) -> nn.Module:
        """A fresh model whose random initial weights depend on `seed` alone.

        Raises:
            UserError: `model` fails, or what it makes cannot be trained.
        """
        with seeds_kept(CPU), blaming("task.model"):
            seed_everything(seed, CPU)
            model = self.model()
        check_model(model)
        return model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """The inner optimizer of `model`.

        Raises:
            UserError: `optimizer` fails, or makes something else.
        """
        with blaming("task.optimizer"):
            optimizer = self.optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"task.optimizer returned a {type(optimizer).__name__}: it must return one "
                "torch.optim.Optimizer; several can be put behind one, a class derived from it "
                "whose step() has each of them step"
            )
        ours = {id(parameter) for parameter in model.parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in ours:
                    raise UserError(
                        f"task.optimizer: {type(optimizer).__name__} moves a tensor of shape "
                        f"{tuple(parameter.shape)} that is no parameter of the model; only the "
                        "model is trained: register it there"
                    )
        return optimizer


@contextmanager
def blaming(place: str) -> Iterator[None]:
    """Make a `UserError` of whatever one of the user's functions, named by `place`, raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{place} failed at {whereabouts(error)}") from error


def check_model(model: Any) -> None:
    """Raise a `UserError` if `model` is nothing that can be trained."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"task.model returned a {type(model).__name__}: it must return a torch.nn.Module"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"task.model: {name!r} has no shape yet (a lazy module); call the model once on an "
                "example in `model`, before it is returned"
            )
        if tensor.is_meta:
            raise UserError(
                f"task.model: {name!r} is on the device 'meta' and has no values; make the model "
                "on the CPU"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"task.model: the {type(model).__name__} has no parameter that can be trained (none "
            "has requires_grad)"
        )


def _refuse(name: str, value: str, allowed: str) -> NoReturn:
    raise UserError(f"Task.{name} = {value}: must be {allowed}")


def make_task(config: TaskConfig) -> Task:
    """The task that `config` describes.

    Raises:
        UserError: its data cannot be had, or the user's function does not return a `Task`.
    """
    match config:
        case StdlibTask():
            return _gpt_task(config, _stdlib(config.sequence + 1), "byte")
        case SyntheticTask():
            return _gpt_task(config, _markov(config.vocabulary, config.sources), "token")
        case TextTask():
            return _gpt_task(
                config, data.folder_corpus(Path(config.path), config.sequence + 1), "byte"
            )
        case CausalLmTask():
            return _causal_lm_task(config)
        case UserTask():
            return _user_task(config.name, config.settings)
        case _:
            raise AssertionError(f"task {config.name!r} trains nothing")


# A process makes several tasks from one corpus when a command compares methods.
_stdlib = cache(data.stdlib_corpus)
_markov = cache(data.markov_corpus)


def _gpt_task(config: GptTask, corpus: Corpus, unit: str) -> Task:
    if config.width % config.heads:
        raise UserError(
            f"task.width = {config.width}: must be divisible by task.heads = {config.heads}"
        )

    if config.dirichlet is not None:
        data.region_weights(
            corpus, Shard(0, 1, 0, 1, seed=0), config.dirichlet
        )  # refuses a corpus whose regions cannot differ

    @cache
    def weights(shard: Shard) -> Any:
        return (
            None
            if config.dirichlet is None
            else data.region_weights(corpus, shard, config.dirichlet)
        )

    valid_size = min(config.valid_sequences, 32)

    def batches(shard: Shard, index: int) -> Tensor:
        if shard.split == "valid":
            return corpus.batch(shard, index, valid_size, config.sequence + 1)
        return corpus.batch(shard, index, config.batch_size, config.sequence + 1, weights(shard))

    def model() -> nn.Module:
        return GPT(
            vocabulary=corpus.vocabulary,
            context=config.sequence,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            tied=config.tied,
        )

    with torch.device("meta"):  # it may be large
        size = sum(parameter.numel() for parameter in model().parameters())
    regions = (
        "iid" if config.dirichlet is None else f"regions differ (Dirichlet {config.dirichlet})"
    )
    return Task(
        model=model,
        loss=next_token_loss,
        batches=batches,
        optimizer=lambda module: adamw(
            module, config.lr, config.betas, config.eps, config.weight_decay
        ),
        valid_batches=math.ceil(config.valid_sequences / valid_size),
        tokens_per_step=config.batch_size * config.sequence,
        gradient_clip=config.gradient_clip,
        schedule=Schedule(warmup=config.warmup),
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
        description=f"a GPT of {config.layers} x {config.width} ({size:,} parameters) on "
        f"{corpus.description}, {regions}",
        loss_name=f"validation loss (nats per {unit})",
        entropy_rate=corpus.entropy_rate,
    )


def _causal_lm_task(config: CausalLmTask) -> Task:
    causal_lm.check_name(config.model)  # before its tokenizer is looked for, perhaps on the hub
    published = config.model in SHAPES
    named = config.tokenizer or ("bytes" if published else config.model)
    tokenizer = load_tokenizer(named, config.end_of_text)
    length = config.sequence
    model = causal_lm.pretrained(
        config.model,
        config.config,
        tokenizer,
        length,
        from_scratch=config.from_scratch,
        checkpointing=config.gradient_checkpointing,
        blocks=config.blocks,
        lora=config.lora,
    )
    source = Source(config.data, config.subset, config.text_column, config.region_column)
    tokens = packed(source, config.split, config.valid, tokenizer, config.cache)
    held_out = sequences_in(tokens.valid, length)
    if not held_out:
        raise UserError(
            f"task.data = {config.data!r}: {tokens.documents} documents with "
            f"{sum(map(len, tokens.train))} tokens for training and {len(tokens.valid)} for "
            f"validation are too little: each need {length + 1} tokens (task.sequence and one "
            "more); give more text or a shorter sequence"
        )
    valid_size = min(config.batch_size, held_out)
    valid_batches = max(1, min(config.valid_sequences, held_out) // valid_size)
    step_size = config.batch_size * config.gradient_accumulation

    def batches(shard: Shard, index: int) -> Tensor:
        if shard.split == "valid":
            return tokens.valid_batch(index, valid_size, valid_batches, length)
        return tokens.train_batch(shard, index, step_size, length)

    weights = "random weights" if model.weights is None else f"weights of {model.weights}"
    regions = f", regions differ by {config.region_column}" if config.region_column else ""
    return Task(
        model=model.make,
        loss=next_token_loss if config.blocks else causal_lm.next_token_loss,
        batches=batches,
        optimizer=lambda module: adamw(
            module, config.lr, config.betas, config.eps, config.weight_decay
        ),
        valid_batches=valid_batches,
        tokens_per_step=step_size * length,
        gradient_accumulation=config.gradient_accumulation,
        gradient_clip=config.gradient_clip,
        schedule=Schedule(warmup=config.warmup),
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
        description=f"{config.model}{_changed(config)} ({model.size:,} parameters, {weights}"
        f"{_adapters(config, model)}) on "
        f"{config.data} ({tokens.documents:,} documents, {sum(map(len, tokens.train)):,} tokens of "
        f"{named}, sha256 {tokens.digest[:8]}){regions}",
        loss_name="validation loss (nats per token)",
        export=causal_lm.exporter(model, tokenizer),
    )


def _adapters(config: CausalLmTask, model: causal_lm.Pretrained) -> str:
    if config.lora is None:
        return ""
    return f"; trained are {model.trained:,}, adapters of rank {config.lora.rank}"


def _changed(config: CausalLmTask) -> str:
    changes = ", ".join(f"{key} {value}" for key, value in config.config.items())
    return f" with {changes}" if changes else ""


def adamw(
    module: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW that decays matrices and neither biases nor the gains of norms."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True
    )


def _user_task(name: str, settings: Mapping[str, Any]) -> Task:
    file, _, function = name.rpartition(":")
    if not (file and function):
        lacking = "function" if file else "file"
        raise UserError(f"task.name = {name!r}: no {lacking} is named; expected 'file.py:function'")
    module = import_file(Path(file), f"task.name = {name!r}")
    make = getattr(module, function, None)
    if not callable(make):
        raise UserError(
            f"task.name = {name!r}: {file!r} has no function "
            f"{function!r}{nearest(function, vars(module))}"
        )
    _check_settings(name, make, settings)
    try:
        task = make(**settings)
    except UserError as error:  # of `Task`, which says it in full
        raise UserError(
            f"task.name = {name!r}: {function}() failed at {place_of(error)}: {error}"
        ) from error
    except Exception as error:
        raise UserError(
            f"task.name = {name!r}: {function}() failed at {whereabouts(error)}"
        ) from error
    if not isinstance(task, Task):
        raise UserError(
            f"task.name = {name!r}: {function}() returned {type(task).__name__}, not an "
            "archipel.Task"
        )
    if task.description == UNNAMED:
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        shown = f"{Path(file).name}:{function}{f'({given})' if given else ''}"
        return replace(task, description=f"{shown}, {UNNAMED}")
    return task


def _check_settings(name: str, make: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise a `UserError` if a user's function does not take these settings."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # it is not written in Python
        return
    kinds = [parameter.kind for parameter in parameters.values()]
    named = [
        key
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for key in settings:
        if key not in named and inspect.Parameter.VAR_KEYWORD not in kinds:
            takes = f"its arguments: {', '.join(named)}" if named else "it has no arguments"
            raise UserError(
                f"task.{key}: {name!r} has no argument {key!r}{nearest(key, named)}; {takes}"
            )
    if "name" in named and parameters["name"].default is inspect.Parameter.empty:
        raise UserError(f"{name!r} has an argument `name`, and task.name is the file's: rename it")
    for key in named:
        if parameters[key].default is inspect.Parameter.empty and key not in settings:
            raise UserError(f"task.{key} is missing: {name!r} needs it; give --set task.{key}=…")
