"""Documents of text, from files, folders and the Hugging Face hub.

What belongs here: finding and reading them, one after the other. What does not: their tokens
(`packed.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipel.errors import UserError, nearest, seen_from
from archipel.train.extra import library, reading

KINDS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
"""Endings of files, and the reader of `datasets` for them."""
PACKED = (".gz", ".zst", ".bz2", ".xz")
ABOUT_DATA = ("README.md", "dataset_infos.json")
"""What the hub puts beside the files of a data set."""


@dataclass(frozen=True)
class Source:
    """Where documents are.

    Attributes:
        data: a file, a folder, or a name on the Hugging Face hub.
        subset: which of the data sets that the hub has under one name.
        text_column: holds the text of a document.
        region_column: holds the key by which regions differ in what they see; None: they do not.
    """

    data: str
    subset: str | None
    text_column: str
    region_column: str | None

    @property
    def fingerprint(self) -> str:
        """Differs when any file has changed, as far as names, sizes and times tell; of the hub's
        data it is the name.
        """
        path = Path(self.data)
        files = [
            (str(file.relative_to(path.parent)), file.stat().st_size, file.stat().st_mtime_ns)
            for file in _files(path)
        ]
        place = str(path.resolve()) if files else ""
        return hashlib.sha256(repr((self, place, files)).encode()).hexdigest()

    def documents(self, split: str | None) -> Iterator[tuple[str, str]]:
        """The key and the text of each document of a split (None: of the only one), one after the
        other; without a `region_column` the key is empty. Those without text are left out.

        Raises:
            UserError: they cannot be found or read, or a column is not there.
        """
        splits = self.splits()
        if split is None and len(splits) == 1:
            [split] = splits
        if split is None or split not in splits:
            asked = "task.valid: " if split is None else f"task.split = {split!r}: "
            raise UserError(
                f"{asked}the splits of {self.data} are {', '.join(splits)}{nearest(split, splits)}"
            )
        rows = _read(splits[split], self.data)
        for number, row in enumerate(rows):
            if not number:
                self._check_columns(row)
            text = row[self.text_column]
            if text is None or text == "":
                continue
            if not isinstance(text, str):
                raise UserError(
                    f"task.text_column = {self.text_column!r}: row {number} of {self.data} holds a "
                    f"{type(text).__name__}, not a text"
                )
            yield str(row[self.region_column]) if self.region_column else "", text

    def splits(self) -> Mapping[str, Iterable[dict[str, Any]]]:
        """The rows of each split, which are read when they are asked for; files that name none are
        the split `train`.

        Raises:
            UserError: there is no such data.
        """
        datasets, path = library("datasets"), Path(self.data)
        files = _files(path)
        if not files:
            _check_name(self.data)
            with reading(f"task.data = {self.data!r}"):
                return datasets.load_dataset(  # type: ignore[no-any-return]
                    self.data, self.subset, streaming=True
                )
        if (path / "dataset_info.json").is_file():  # of `save_to_disk`, as is the next one
            return {"train": datasets.load_from_disk(str(path))}
        if (path / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(path))  # type: ignore[no-any-return]
        kinds = {kind for file in files if (kind := _kind(file))}
        if len(kinds) != 1:
            found = ", ".join(sorted({file.suffix or file.name for file in files})[:8])
            raise UserError(
                f"task.data = {self.data!r}: expected files of one kind, ending in "
                f"{', '.join(KINDS)}; found {found}"
            )
        [kind] = kinds
        options = {"sample_by": "document"} if kind == "text" else {}  # not by line
        place = {"data_files": str(path)} if path.is_file() else {"data_dir": str(path)}
        try:
            return datasets.load_dataset(kind, streaming=True, **place, **options)  # type: ignore[no-any-return]
        except Exception as error:
            raise UserError(f"task.data = {self.data!r}: {error}") from None

    def _check_columns(self, row: Mapping[str, Any]) -> None:
        for name in ("text_column", "region_column"):
            column = getattr(self, name)
            if column is not None and column not in row:
                raise UserError(
                    f"task.{name} = {column!r}: the columns of {self.data} are "
                    f"{', '.join(row)}{nearest(column, row)}"
                )


def _read(rows: Iterable[dict[str, Any]], what: str) -> Iterator[dict[str, Any]]:
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # each reader has its own
            raise UserError(f"task.data = {what!r}: cannot be read: {error}") from None
        yield row


def _files(path: Path) -> list[Path]:
    """The file, or all files of data below the folder, in the order of their names."""
    if not os.path.isdir(path):
        return [path] if os.path.isfile(path) else []
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and file.name not in ABOUT_DATA
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _kind(file: Path) -> str | None:
    suffixes = [suffix for suffix in file.suffixes if suffix not in PACKED]
    return KINDS.get(suffixes[-1]) if suffixes else None


def _check_name(data: str) -> None:
    """Raise a `UserError` for what can only be meant for a file or a folder."""
    named = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", data)
    if not named or _kind(Path(data)) or os.path.isdir(data):
        empty = os.path.isdir(data)
        raise UserError(
            f"task.data = {data!r}: there is nothing in that folder"
            if empty
            else f"task.data: there is no file or folder {data!r}{seen_from(data)}"
        )
