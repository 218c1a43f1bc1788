"""Documents as packed sequences of tokens, on disk, and which of them each worker sees when.

What belongs here: joining documents, the cache of their tokens, holding out validation data, epochs
and shards. What does not: reading documents (`documents.py`), and windows drawn at random, which
the built-in corpora have (`data.py`).

The tokens of all documents stand one after the other, each document followed by the token that ends
a text. Sequence s is the tokens from s · length to (s + 1) · length, and the one behind them, which
is only to be foretold; so each token is foretold once in an epoch.

Training sequences are dealt out: in each epoch they are shuffled, and a worker gets every n-th of
n workers, so that no sequence comes twice in an epoch and none is left out. As with all data, a
batch is a pure function of (seed, shard, index).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor

from archipel.errors import UserError
from archipel.train.data import HOLD_OUT, Shard
from archipel.train.documents import Source
from archipel.train.extra import library
from archipel.train.tokenizer import encode, fingerprint, size_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOGETHER = 1000
"""So many documents are tokenized at a time."""
MOST_KEYS = 256
"""More values than this in a region column are taken for a mistake; each is a file."""
NO_KEYS = ("",)
VALID, ABOUT = "valid.bin", "about.json"


@dataclass(frozen=True)
class Packed:
    """Tokens for training and validation.

    Attributes:
        train: the training tokens of each key of the region column, in the order of the keys; of
            all documents if there is no such column. Mapped from files, not in memory.
        valid: tokens held out for validation.
        keys: the region column's values; `NO_KEYS` if there is no such column.
        documents: how many there are.
        digest: of all tokens.
    """

    train: tuple[np.ndarray, ...]
    valid: np.ndarray
    keys: tuple[str, ...]
    documents: int
    digest: str

    def tokens_for(self, shard: Shard) -> tuple[np.ndarray, ...]:
        """The training tokens that the workers of a shard's region share: those of every key, in
        turn, that falls to it.

        Raises:
            UserError: there are fewer keys than regions.
        """
        if self.keys == NO_KEYS:
            return self.train
        if len(self.keys) < shard.regions:
            raise UserError(
                f"task.region_column: {shard.regions} regions need as many keys, and there are "
                f"{len(self.keys)}: {', '.join(self.keys)}"
            )
        return self.train[shard.region :: shard.regions]

    def train_batch(self, shard: Shard, index: int, size: int, length: int) -> Tensor:
        """The `size` sequences of batch `index` of a shard, shape (size, length + 1), int64.

        Raises:
            UserError: there are fewer sequences than workers that share them.
        """
        pieces = self.tokens_for(shard)
        rank, of = shard.index, shard.of
        if self.keys != NO_KEYS:
            rank, of = shard.in_region, shard.of_region
        counts = [sequences_in(tokens, length) for tokens in pieces]
        if sum(counts) < of:
            raise UserError(
                f"task.data: {sum(counts)} sequences of {length} tokens are too few for {of} "
                "workers, which share them; give more data, or a shorter task.sequence"
            )
        ends = np.cumsum(counts)
        rows = []
        places = range(index * size, (index + 1) * size)
        for number in dealt(sum(counts), rank, of, shard.seed, places):
            piece = int(np.searchsorted(ends, number, side="right"))
            rows.append(_sequence(pieces[piece], int(number - ends[piece] + counts[piece]), length))
        return _tensor(rows)

    def valid_batch(self, index: int, size: int, of: int, length: int) -> Tensor:
        """Batch `index` of the `of` that an evaluation sees, whose sequences lie evenly over the
        held-out data: shape (size, length + 1), int64.
        """
        numbers = np.linspace(0, sequences_in(self.valid, length) - 1, size * of).astype(int)
        chosen = numbers[index * size : (index + 1) * size]
        return _tensor([_sequence(self.valid, number, length) for number in chosen.tolist()])


def sequences_in(tokens: np.ndarray, length: int) -> int:
    return max(0, (len(tokens) - 1) // length)


def _sequence(tokens: np.ndarray, number: int, length: int) -> np.ndarray:
    return tokens[number * length : (number + 1) * length + 1]


def _tensor(rows: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.int64))


# Epochs


def dealt(count: int, rank: int, of: int, seed: int, places: Iterable[int]) -> list[int]:
    """Which of `count` sequences worker `rank` of `of` sees at each of `places`, counted from the
    start of the run.

    In epoch e the sequences are in the random order π_e, the same for all workers, and this one has
    π_e[rank], π_e[rank + of], … Its epochs follow each other without a gap, so that a batch may lie
    in two of them.
    """
    mine = len(range(rank, count, of))
    return [int(_order(count, seed, place // mine)[rank + place % mine * of]) for place in places]


@lru_cache(maxsize=4)  # workers of different speeds are in different epochs
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, 0xE90C4, epoch)).permutation(
        np.arange(count, dtype=np.uint32)
    )


# On disk


def packed(
    source: Source,
    split: str,
    valid: str | None,
    tokenizer: PreTrainedTokenizerBase,
    cache: str | None,
) -> Packed:
    """The tokens of a source's documents: from the cache, or read, tokenized and put there.

    Without `valid`, every 20th document is held out for validation, or, of fewer than 20, the last
    twentieth of each.

    Args:
        valid: a file or folder with the validation data, or a split of the source; None: a part of
            the training data is held out.
        cache: the folder for tokens; None: `archipel/tokens` where this user's caches are.

    Raises:
        UserError: see `Source.documents`; or the cache cannot be written to.
    """
    held_out: tuple[Source, str | None] | None = None
    if valid is not None:
        elsewhere = os.path.exists(valid)
        other = Source(valid, None, source.text_column, None) if elsewhere else source
        held_out = other, (None if elsewhere else valid)
    parts = [source.fingerprint, split, fingerprint(tokenizer)]
    if held_out:
        parts += [held_out[0].fingerprint, str(held_out[1])]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    home = Path(cache) if cache else _caches()
    folder = home / key
    if not (folder / ABOUT).is_file():
        try:
            home.mkdir(parents=True, exist_ok=True)
            with library("filelock").FileLock(home / f".{key}.lock"):
                if not (folder / ABOUT).is_file():  # another process was quicker
                    begun = folder.with_name(f".{folder.name}")
                    shutil.rmtree(begun, ignore_errors=True)  # of a process that was killed
                    begun.mkdir()
                    try:
                        _fill(begun, source, split, held_out, tokenizer)
                        begun.rename(folder)
                    finally:  # the disk may be full
                        shutil.rmtree(begun, ignore_errors=True)
        except OSError as error:
            raise UserError(f"task.cache: {error.filename or home}: {error.strerror}") from None
    return _mapped(folder)


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "archipel" / "tokens"


def _fill(
    folder: Path,
    source: Source,
    split: str,
    held_out: tuple[Source, str | None] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write all tokens, and what they are, into an empty folder."""
    dtype = np.dtype(np.uint16 if size_of(tokenizer) <= 2**16 else np.uint32)
    digest, names = hashlib.sha256(), dict[str, str]()
    number = -1
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}

        def write(name: str, tokens: np.ndarray) -> None:
            if name not in files:
                files[name] = stack.enter_context((folder / name).open("wb"))
            files[name].write(tokens.tobytes())
            digest.update(tokens.tobytes())

        documents = _tokens(source, split, tokenizer, dtype)
        head = list(islice(documents, HOLD_OUT))
        for number, (key, tokens) in enumerate(chain(head, documents)):
            cut = len(tokens)
            if held_out is None and len(head) < HOLD_OUT:
                cut -= cut // HOLD_OUT
            elif held_out is None and number % HOLD_OUT == HOLD_OUT // 2:
                cut = 0
            if key not in names:
                _check_few(source, [*names, key])
                names[key] = f"train-{len(names)}.bin"
            write(names[key], tokens[:cut])
            write(VALID, tokens[cut:])
        for _, tokens in _tokens(*held_out, tokenizer, dtype) if held_out else ():
            write(VALID, tokens)
    about = {
        "data": source.data,
        "documents": number + 1,
        "dtype": dtype.name,
        "files": names,
        "sha256": digest.hexdigest(),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _tokens(
    source: Source, split: str | None, tokenizer: PreTrainedTokenizerBase, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """The key of each document, and its tokens with the one that ends it."""
    documents = source.documents(split)
    while some := list(islice(documents, TOGETHER)):
        encoded = encode(tokenizer, [text for _, text in some])
        for (key, _), tokens in zip(some, encoded, strict=True):
            yield key, np.array([*tokens, tokenizer.eos_token_id], dtype)


def _check_few(source: Source, keys: Sequence[str]) -> None:
    if len(keys) > MOST_KEYS:
        raise UserError(
            f"task.region_column = {source.region_column!r}: has more than {MOST_KEYS} values, "
            f"such as {', '.join(keys[:3])}; choose a column with few"
        )


def _mapped(folder: Path) -> Packed:
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))

    def tokens_of(name: str) -> np.ndarray:
        path = folder / name
        if not path.is_file() or not path.stat().st_size:  # nothing to map
            return np.empty(0, about["dtype"])
        return np.memmap(path, about["dtype"], mode="r")

    files = dict(sorted(about["files"].items()))
    return Packed(
        tuple(map(tokens_of, files.values())),
        tokens_of(VALID),
        tuple(files),
        about["documents"],
        about["sha256"],
    )
