"""Corpora of tokens, and the shard of them that each worker sees.

What belongs here: reading text into tokens, the synthetic source, holding out validation data,
drawing a worker's batches. What does not: models and losses.

A batch is a pure function of (seed, shard, index): there is no iterator to lose, any process can
draw any batch, and a data cursor is one integer.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from archipel.errors import UserError, seen_from

HOLD_OUT = 20
"""One file in 20 is held out for validation; of a corpus of fewer files, the last twentieth of each
one.
"""


@dataclass(frozen=True)
class Shard:
    """Which data one worker sees.

    Attributes:
        index, of: the worker's rank, and how many workers there are.
        region, regions: the rank of its region, and how many there are.
        seed: of the run.
        split: `train`, or `valid` for the validation data, which is the same for all workers.
        in_region, of_region: the worker's rank in its region, and how many workers that has.
    """

    index: int
    of: int
    region: int
    regions: int
    seed: int
    split: Literal["train", "valid"] = "train"
    in_region: int = 0
    of_region: int = 1

    def rng(self, index: int) -> np.random.Generator:
        """Random numbers for batch `index` of this shard. Validation batches are the same in all
        runs, whatever their seed.
        """
        return np.random.default_rng(
            (self.seed, self.index, index) if self.split == "train" else (0x7A11D, index)
        )


def shards_of(regions: Sequence[str], seed: int) -> tuple[Shard, ...]:
    """The shards of workers that live in `regions`, in rank order."""
    names = list(dict.fromkeys(regions))
    return tuple(
        Shard(
            i,
            len(regions),
            names.index(region),
            len(names),
            seed,
            in_region=regions[:i].count(region),
            of_region=regions.count(region),
        )
        for i, region in enumerate(regions)
    )


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and validation; the training tokens in classes, so that regions can
    differ in what they see.

    Attributes:
        train: the training tokens, class after class.
        starts: where each class starts in `train`, and its end behind them: shape (classes + 1,).
        valid: tokens held out for validation.
        vocabulary: how many different tokens there are; each is below this number.
        description: what the corpus is, with a fingerprint of its content.
        entropy_rate: entropy of the source in nats per token, the best loss that any model can
            reach; None: unknown.
    """

    train: np.ndarray
    starts: np.ndarray
    valid: np.ndarray
    vocabulary: int
    description: str
    entropy_rate: float | None = None

    @staticmethod
    def of(
        classes: Sequence[np.ndarray],
        valid: np.ndarray,
        vocabulary: int,
        description: str,
        entropy_rate: float | None = None,
    ) -> Corpus:
        """A corpus from one array of training tokens for each class."""
        starts = np.cumsum([0, *map(len, classes)])
        return Corpus(np.concatenate(classes), starts, valid, vocabulary, description, entropy_rate)

    @cached_property
    def class_weights(self) -> np.ndarray:
        """Each class' share of the training tokens, shape (classes,)."""
        return np.asarray(np.diff(self.starts) / len(self.train))

    def batch(
        self, shard: Shard, index: int, size: int, length: int, weights: np.ndarray | None = None
    ) -> Tensor:
        """`size` random windows of `length` tokens, shape (size, length), int64.

        Without `weights` every window is as likely as any other; with them, shape (classes,), they
        say how often each class is drawn.
        """
        rng = shard.rng(index)
        if shard.split == "valid":
            tokens, first = self.valid, rng.integers(0, len(self.valid) - length + 1, size)
        elif weights is None:
            tokens, first = self.train, rng.integers(0, len(self.train) - length + 1, size)
        else:
            classes = rng.choice(len(weights), size=size, p=weights)
            tokens, first = (
                self.train,
                rng.integers(self.starts[classes], self.starts[classes + 1] - length + 1),
            )
        return torch.from_numpy(tokens[first[:, None] + np.arange(length)].astype(np.int64))


def region_weights(corpus: Corpus, shard: Shard, concentration: float) -> np.ndarray:
    """How often a region draws from each class: a Dirichlet sample around the classes' sizes, shape
    (classes,).

    Small `concentration` gives each region a few classes of its own; large gives all regions the
    same mixture.

    Raises:
        UserError: the corpus has one class only, so that regions cannot differ.
    """
    if len(corpus.class_weights) < 2:
        raise UserError(
            f"task.dirichlet: {corpus.description} has one class of documents only, so regions "
            "cannot differ"
        )
    alphas = concentration * len(corpus.class_weights) * corpus.class_weights
    # Gamma draws in logarithms: with a small concentration all of them could underflow to 0.
    rng = np.random.default_rng((shard.seed, 0xD1, shard.region))
    logs = np.log(rng.gamma(alphas + 1)) + np.log(rng.random(len(alphas))) / alphas
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


# Text


def stdlib_corpus(length: int) -> Corpus:
    """The source of this Python's standard library, in bytes, without installed packages and tests;
    one class a module.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [
        path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)
    ]
    return text_corpus(root, files, length, "the Python standard library")


def folder_corpus(path: Path, length: int) -> Corpus:
    """Any file, or all files below a folder, in bytes; one class a top-level folder or file.

    Raises:
        UserError: no such path, nothing in it, too little for one sequence, or a file that cannot
            be read.
    """
    if not os.path.exists(
        path
    ):  # which, unlike Path.exists, is not upset by a name that is too long
        raise UserError(f"task.path: there is no file or folder {str(path)!r}{seen_from(path)}")
    files = [path] if path.is_file() else _visible(path)
    return text_corpus(path.parent if path.is_file() else path, files, length, str(path))


def _visible(folder: Path) -> Iterator[Path]:
    """All files below `folder` that are not hidden, nor in a hidden folder; also links to nothing,
    which are no text to leave out without a word. Raises an OSError for a folder that cannot be
    read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(here, name) for name in names if not name.startswith(".")):
            if file.is_file() or not os.path.exists(file):
                yield file


def text_corpus(root: Path, files: Iterable[Path], length: int, what: str) -> Corpus:
    """Files below `root` as bytes, in the sorted order of their names."""
    try:
        by_name = {file.relative_to(root).as_posix(): file for file in files}
        names = sorted(by_name)
        contents = [by_name[name].read_bytes() for name in names]
    except OSError as error:
        raise UserError(f"{what}: cannot read {error.filename}: {error.strerror}") from None
    classes: dict[str, list[bytes]] = {}
    valid: list[bytes] = []
    for i, (name, content) in enumerate(zip(names, contents, strict=True)):
        cut = len(content)
        if len(names) < HOLD_OUT:
            cut -= cut // HOLD_OUT
        elif i % HOLD_OUT == HOLD_OUT // 2:
            cut = 0
        valid.append(content[cut:])
        classes.setdefault(name.split("/")[0], []).append(content[:cut])
    train = [
        tokens
        for parts in classes.values()
        if len(tokens := np.frombuffer(b"".join(parts), np.uint8)) >= length
    ]
    held_out = np.frombuffer(b"".join(valid), np.uint8)
    size = sum(map(len, contents))
    if not train or len(held_out) < length:
        raise UserError(
            f"{what}: {len(names)} files with {size} bytes are too little: training, and "
            "validation on about a twentieth of them, "
            f"each need {length} bytes (task.sequence and one more); give more text or a shorter "
            "sequence"
        )
    digest = hashlib.sha256(b"".join(contents)).hexdigest()[:8]
    return Corpus.of(
        train, held_out, 256, f"{what} ({len(names)} files, {size / 1e6:.1f} MB, sha256 {digest})"
    )


# A source whose entropy is known


def markov_corpus(vocabulary: int, sources: int, tokens: int = 4_000_000) -> Corpus:
    """Text of random Markov chains, whose entropy rate is known. The same in all runs, whatever
    their seed.

    Each of the `sources` has an alphabet of its own, so that one token tells which chain is
    speaking, and the best possible loss is the mean of the chains' entropy rates. Each source is a
    class.

    Raises:
        UserError: fewer than 2 tokens a source, or more than 512.
    """
    states = vocabulary // sources
    if not 2 <= states <= 512:
        raise UserError(
            f"task: a vocabulary of {vocabulary} gives each of {sources} sources {states} tokens; "
            "2 to 512 are allowed"
        )
    rng = np.random.default_rng(0x3A4C0)
    train, valid, rates = [], [], []
    for source in range(sources):
        transition = rng.dirichlet(np.full(states, 0.3), size=states)
        rates.append(entropy_rate(transition))
        text = _sample_chain(transition, tokens // sources, rng) + source * states
        cut = len(text) - len(text) // HOLD_OUT
        train.append(text[:cut])
        valid.append(text[cut:])
    description = (
        f"{sources} random Markov chain{'s' if sources > 1 else ''} over {states} tokens each"
    )
    return Corpus.of(train, np.concatenate(valid), vocabulary, description, float(np.mean(rates)))


def entropy_rate(transition: np.ndarray) -> float:
    """Nats per token of the stationary Markov chain with `transition`, shape (states, states): −Σ
    π_i P_ij ln P_ij.
    """
    values, vectors = np.linalg.eig(transition.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary = stationary / stationary.sum()
    logs = np.log(transition, out=np.zeros_like(transition), where=transition > 0)
    return float(-(stationary[:, None] * transition * logs).sum())


def _sample_chain(transition: np.ndarray, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """About `tokens` tokens: 1,000 independent walks, one after the other; the first 50 steps of
    each are dropped.
    """
    walks, burn_in = 1000, 50
    cumulative = transition.cumsum(axis=1)
    state = rng.integers(0, len(transition), walks)
    steps = []
    for _ in range(burn_in + tokens // walks):
        state = np.minimum(
            (rng.random(walks)[:, None] > cumulative[state]).sum(axis=1), len(transition) - 1
        )
        steps.append(state)
    return np.stack(steps[burn_in:], axis=1).astype(np.uint16).reshape(-1)
