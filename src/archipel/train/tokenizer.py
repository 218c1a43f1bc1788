"""Tokenizers: text to numbers.

What belongs here: getting the one that a task names, and training one. What does not: which texts
(`documents.py`), and what becomes of the numbers (`packed.py`).

All of them are tokenizers of `transformers`, `bytes` too, so that each can be saved beside a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.errors import UserError, seen_from
from archipel.train.extra import library, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
# Of a tokenizer.json that stands alone nothing says which of its tokens ends a text.
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


def load_tokenizer(name: str, end_of_text: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer called `name`, with a token that ends a text.

    Args:
        name: `bytes`; a file `tokenizer.json`; a folder that `transformers` has saved; or a name on
            the Hugging Face hub.
        end_of_text: the token that ends a text; None: the tokenizer's own, or a usual one.

    Raises:
        UserError: there is no such tokenizer, or no such token in it.
    """
    transformers = library("transformers")
    path = Path(name)
    if name == "bytes":
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=_bytes(), eos_token=END_OF_TEXT
        )
    elif path.is_file():
        try:
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # of Rust, which has only this one
            raise UserError(f"task.tokenizer = {name!r}: is no tokenizer.json: {error}") from None
    elif path.suffix == ".json":
        raise UserError(f"task.tokenizer: there is no file {name!r}{seen_from(path)}")
    else:
        with reading(f"task.tokenizer = {name!r}"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    known = tokenizer.get_vocab()
    ends = [end_of_text] if end_of_text else [tokenizer.eos_token, *USUAL_ENDS]
    found = next((token for token in ends if token in known), None)
    if found is None:
        tried = ", ".join(repr(token) for token in ends if token)
        raise UserError(
            f"task.end_of_text: tokenizer {name!r} has none of the tokens {tried}; name the one "
            "that ends a text"
        )
    tokenizer.eos_token = found
    return tokenizer


def _bytes() -> Any:
    """Each byte is a token: the alphabet of a BPE that has not merged anything."""
    tokenizers = library("tokenizers")
    level = tokenizers.pre_tokenizers.ByteLevel
    tokens = [END_OF_TEXT, *sorted(level.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    return _of_bytes(tokenizer)


def _of_bytes(tokenizer: Any) -> Any:
    """Have a tokenizer cut text into words of bytes, as GPT-2's does; any text comes back whole."""
    tokenizers = library("tokenizers")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909) of at most `vocabulary`
    tokens, a `tokenizers.Tokenizer`.

    Raises:
        UserError: so few tokens cannot hold all bytes and the one that ends a text.
    """
    tokenizers = library("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 1
    if vocabulary < least:
        raise UserError(
            f"--vocabulary {vocabulary}: must be at least {least}, for all bytes and {END_OF_TEXT}"
        )
    tokenizer = _of_bytes(tokenizers.Tokenizer(tokenizers.models.BPE()))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, without any that mark its ends."""
    found: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    return found


def size_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest number of a token."""
    return 1 + max(map(int, tokenizer.get_vocab().values()))


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Differs between tokenizers that give different numbers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}{tokenizer.eos_token}".encode()).hexdigest()
