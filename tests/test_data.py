"""`data.py`: batches are a pure function of (seed, shard, index), held-out text stays out, the
synthetic source has its entropy.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from archipel.errors import UserError
from archipel.train import data
from archipel.train.data import (
    Corpus,
    Shard,
    entropy_rate,
    folder_corpus,
    markov_corpus,
    region_weights,
    stdlib_corpus,
)

SHARD = Shard(index=0, of=4, region=0, regions=2, seed=0)
VALID = replace(SHARD, split="valid")


def numbered(*sizes: int, valid: int = 1000) -> Corpus:
    """Classes of these sizes; the training tokens count up from 0 through all of them, the held-out
    ones from 10,000.
    """
    ends = np.cumsum(sizes)
    classes = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return Corpus.of(classes, np.arange(10_000, 10_000 + valid), 20_000, "numbers")


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


# Batches


def test_a_batch_is_windows_of_successive_tokens() -> None:
    batch = numbered(500).batch(SHARD, 0, size=6, length=9)
    assert (batch.shape, batch.dtype) == ((6, 9), torch.int64)
    assert torch.equal(batch - batch[:, :1], torch.arange(9).expand(6, 9))


def test_the_same_seed_shard_and_index_give_the_same_batch() -> None:
    first, second = numbered(5000), numbered(5000)
    first.batch(SHARD, 1, 8, 5)  # what was drawn before does not matter
    assert torch.equal(first.batch(SHARD, 7, 8, 5), second.batch(replace(SHARD), 7, 8, 5))


@pytest.mark.parametrize("change", [{"index": 1}, {"seed": 1}])
def test_another_worker_or_seed_gives_another_batch(change: dict[str, Any]) -> None:
    corpus = numbered(5000)
    assert not torch.equal(
        corpus.batch(SHARD, 7, 8, 5), corpus.batch(replace(SHARD, **change), 7, 8, 5)
    )


def test_another_index_gives_another_batch() -> None:
    corpus = numbered(5000)
    assert not torch.equal(corpus.batch(SHARD, 7, 8, 5), corpus.batch(SHARD, 8, 8, 5))


def test_every_window_can_be_drawn_and_none_beyond_the_end() -> None:
    firsts = numbered(12).batch(SHARD, 0, size=300, length=10)[:, 0]
    assert sorted(set(firsts.tolist())) == [0, 1, 2]


def test_a_window_may_be_all_there_is() -> None:
    assert numbered(5).batch(SHARD, 0, size=1, length=5).tolist() == [[0, 1, 2, 3, 4]]


def test_with_weights_a_window_never_leaves_its_class() -> None:
    corpus = numbered(12, 30, 11)
    firsts = corpus.batch(SHARD, 0, size=2000, length=10, weights=np.full(3, 1 / 3))[:, 0].tolist()
    assert set(firsts) == {0, 1, 2} | set(range(12, 33)) | {42, 43}


def test_weights_say_how_often_each_class_is_drawn() -> None:
    weights = np.array([0.1, 0.6, 0.3])
    firsts = (
        numbered(100, 100, 100)
        .batch(SHARD, 0, size=20_000, length=4, weights=weights)[:, 0]
        .numpy()
    )
    np.testing.assert_allclose(
        np.bincount(firsts // 100, minlength=3) / 20_000, weights, atol=0.015
    )


# Validation


def test_validation_batches_are_of_held_out_tokens() -> None:
    batch = numbered(5000).batch(VALID, 0, 50, 5)
    assert int(batch.min()) >= 10_000


def test_validation_batches_are_the_same_for_all_seeds_and_workers() -> None:
    corpus = numbered(5000)
    other = Shard(index=3, of=9, region=1, regions=5, seed=17, split="valid")
    assert torch.equal(corpus.batch(VALID, 3, 8, 5), corpus.batch(other, 3, 8, 5))


def test_validation_batches_differ_by_index() -> None:
    corpus = numbered(5000)
    assert not torch.equal(corpus.batch(VALID, 0, 8, 5), corpus.batch(VALID, 1, 8, 5))


# Text


def test_one_file_in_twenty_is_held_out_as_a_whole(tmp_path: Path) -> None:
    corpus = folder_corpus(
        write(tmp_path, {f"{i:02}.txt": bytes([i]) * 10 for i in range(40)}), length=5
    )
    held_out, trained = set(corpus.valid.tolist()), set(corpus.train.tolist())
    assert len(held_out) == 2
    assert trained == set(range(40)) - held_out
    assert (len(corpus.valid), len(corpus.train)) == (20, 380)


def test_of_few_files_the_last_twentieth_of_each_is_held_out(tmp_path: Path) -> None:
    files = {"a.txt": b"a" * 95 + b"b" * 5, "b.txt": b"c" * 190 + b"d" * 10}
    corpus = folder_corpus(write(tmp_path, files), length=5)
    assert corpus.valid.tobytes() == b"b" * 5 + b"d" * 10
    assert corpus.train.tobytes() == b"a" * 95 + b"c" * 190


def test_a_single_file_is_a_corpus(tmp_path: Path) -> None:
    text = bytes(range(200))
    corpus = folder_corpus(write(tmp_path, {"a.txt": text}) / "a.txt", length=5)
    assert (corpus.train.tobytes(), corpus.valid.tobytes()) == (text[:190], text[190:])
    assert (corpus.vocabulary, corpus.entropy_rate) == (256, None)


def test_each_top_level_folder_is_a_class(tmp_path: Path) -> None:
    files = {"x/1.txt": b"x" * 100, "x/deep/er/2.txt": b"x" * 100, "y/1.txt": b"y" * 600}
    corpus = folder_corpus(write(tmp_path, files), length=5)
    assert [set(corpus.train[a:b].tobytes()) for a, b in pairwise(corpus.starts)] == [
        {ord("x")},
        {ord("y")},
    ]
    np.testing.assert_allclose(corpus.class_weights, [190 / 760, 570 / 760])


def test_the_order_of_files_is_that_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {f"{name}.txt": name.encode() * 40 for name in "bac"})
    monkeypatch.setattr(data, "_visible", lambda folder: sorted(folder.iterdir(), reverse=True))
    assert folder_corpus(tmp_path, length=2).train.tobytes() == b"a" * 38 + b"b" * 38 + b"c" * 38


def test_a_class_that_is_too_short_for_a_sequence_is_left_out(tmp_path: Path) -> None:
    corpus = folder_corpus(write(tmp_path, {"x/1": b"x" * 400, "y/1": b"y" * 19}), length=20)
    assert set(corpus.train.tobytes()) == {ord("x")}


def test_an_empty_file_is_a_class_of_nothing_and_is_left_out(tmp_path: Path) -> None:
    corpus = folder_corpus(
        write(tmp_path, {"x/1": b"", "y/1": b"y" * 400, "z/1": b"z" * 400}), length=20
    )
    assert len(corpus.class_weights) == 2
    assert set(corpus.train.tobytes()) == set(b"yz")


def test_text_may_be_any_bytes_for_each_is_a_token(tmp_path: Path) -> None:
    """Invalid UTF-8 is text like any other: nothing is decoded, and no byte is outside the
    vocabulary.
    """
    corpus = folder_corpus(
        write(tmp_path, {"a": bytes(range(256)) * 4, "b": b"\xff\xfe\xc3(" * 100}), length=20
    )
    assert set(corpus.train.tolist()) == set(range(corpus.vocabulary)) == set(range(256))


def test_links_lead_to_files_and_not_in_circles(tmp_path: Path) -> None:
    folder = write(tmp_path, {"books/a": b"a" * 400, "elsewhere": b"b" * 400}) / "books"
    (folder / "link").symlink_to("../elsewhere")
    (folder / "circle").symlink_to(".")
    assert set(folder_corpus(folder, length=5).train.tobytes()) == set(b"ab")


def test_a_link_to_nothing_is_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (write(tmp_path, {"a": b"a" * 400}) / "gone").symlink_to("nowhere")
    with pytest.raises(UserError) as error:
        folder_corpus(tmp_path, length=5)
    assert (
        str(error.value)
        == f"{tmp_path}: cannot read {tmp_path / 'gone'}: No such file or directory"
    )


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    write(tmp_path, {"a": b"a" * 400, "locked/b": b"b" * 400})
    with pytest.raises(UserError) as error:
        folder_corpus(tmp_path, length=5)
    assert str(error.value) == f"{tmp_path}: cannot read {tmp_path / 'locked'}: Permission denied"


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    corpus = folder_corpus(write(tmp_path, {"a": b"a" * 400, ".hidden": b"h" * 400}), length=5)
    assert ord("h") not in corpus.train


def test_files_in_hidden_folders_are_left_out(tmp_path: Path) -> None:
    corpus = folder_corpus(
        write(tmp_path, {"a": b"a" * 400, ".git/objects/1": b"h" * 400}), length=5
    )
    assert ord("h") not in corpus.train


def test_a_folder_below_a_hidden_one_can_be_a_corpus(tmp_path: Path) -> None:
    folder = write(tmp_path, {".cache/books/a": b"a" * 400}) / ".cache" / "books"
    assert set(folder_corpus(folder, length=5).train.tobytes()) == {ord("a")}


def test_a_corpus_is_described_with_a_fingerprint_of_its_content(tmp_path: Path) -> None:
    one, same, other = (
        folder_corpus(
            write(tmp_path / name, {"text": content * 200}) / "text", length=5
        ).description
        for name, content in (("one", b"ab"), ("same", b"ab"), ("other", b"ac"))
    )
    assert one.startswith(f"{tmp_path / 'one' / 'text'} (1 files, 0.0 MB, sha256 ")
    assert one.split("sha256")[1] == same.split("sha256")[1] != other.split("sha256")[1]


def test_the_standard_library_leaves_out_installed_packages_and_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"abc.py": b"a" * 400, "json/decoder.py": b"b" * 400, "testing.py": b"c" * 400}
    left_out = [
        "site-packages/x.py",
        "dist-packages/x.py",
        "test/test_abc.py",
        "json/tests/x.py",
        "idlelib/idle_test/x.py",
    ]
    write(tmp_path, {**kept, **dict.fromkeys([*left_out, "notes.txt", "a.pyc"], b"Z" * 400)})
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = stdlib_corpus(length=5)
    assert set(corpus.train.tobytes()) | set(corpus.valid.tobytes()) == set(b"abc")


def test_the_standard_library_of_this_python_is_a_corpus_of_many_classes() -> None:
    corpus = stdlib_corpus(length=65)
    assert len(corpus.train) > 3_000_000
    assert len(corpus.class_weights) > 10
    assert corpus.description.startswith("the Python standard library (")


def test_a_missing_path_is_named() -> None:
    with pytest.raises(UserError) as error:
        folder_corpus(Path("no/such/place"), length=5)
    assert (
        str(error.value)
        == f"task.path: there is no file or folder 'no/such/place' (relative to {Path.cwd()})"
    )


@pytest.mark.parametrize(
    ("files", "counts"),
    [
        ({}, "0 files with 0 bytes"),
        ({"a": b"x" * 99}, "1 files with 99 bytes"),
    ],  # of 99 bytes, 4 are held out
    ids=["empty", "too little held out"],
)
def test_too_little_text_is_refused_with_the_number(
    tmp_path: Path, files: dict[str, bytes], counts: str
) -> None:
    with pytest.raises(UserError) as error:
        folder_corpus(write(tmp_path, files), length=5)
    assert str(error.value) == (
        f"{tmp_path}: {counts} are too little: training, and validation on about a twentieth of "
        "them, each need 5 bytes "
        f"(task.sequence and one more); give more text or a shorter sequence"
    )


def test_just_enough_text_is_a_corpus(tmp_path: Path) -> None:
    corpus = folder_corpus(write(tmp_path, {"a": b"x" * 100}), length=5)
    assert (len(corpus.train), len(corpus.valid)) == (95, 5)


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    write(tmp_path, {"a": b""})
    with pytest.raises(UserError) as error:
        folder_corpus(tmp_path, length=5)
    assert str(error.value) == f"{tmp_path}: cannot read {tmp_path / 'a'}: Permission denied"


# Regions that differ


def test_region_weights_are_a_distribution() -> None:
    weights = region_weights(numbered(100, 300, 600), SHARD, 0.5)
    assert weights.shape == (3,)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)


def test_regions_differ_and_the_workers_of_one_do_not() -> None:
    corpus = numbered(100, 300, 600)
    here = region_weights(corpus, SHARD, 0.5)
    assert np.array_equal(here, region_weights(corpus, replace(SHARD, index=3), 0.5))
    assert not np.allclose(here, region_weights(corpus, replace(SHARD, region=1), 0.5))
    assert not np.allclose(here, region_weights(corpus, replace(SHARD, seed=1), 0.5))


def test_a_large_concentration_gives_the_classes_sizes() -> None:
    np.testing.assert_allclose(
        region_weights(numbered(100, 300, 600), SHARD, 1e7), [0.1, 0.3, 0.6], atol=1e-3
    )


def test_a_tiny_concentration_gives_one_class() -> None:
    for region in range(20):
        assert region_weights(
            numbered(100, 300, 600), replace(SHARD, region=region), 1e-4
        ).max() == pytest.approx(1)


def test_region_weights_have_the_moments_of_a_dirichlet_distribution() -> None:
    """Mean m and variance m(1 − m)/(A + 1), where A is the sum of the concentrations: here 0.5 for
    each of three classes.
    """
    m = np.array([0.1, 0.3, 0.6])
    corpus = numbered(100, 300, 600)
    drawn = np.stack(
        [region_weights(corpus, replace(SHARD, region=region), 0.5) for region in range(3000)]
    )
    np.testing.assert_allclose(drawn.mean(axis=0), m, atol=0.02)
    np.testing.assert_allclose(drawn.var(axis=0), m * (1 - m) / (1.5 + 1), rtol=0.06)


def test_one_class_cannot_differ_between_regions() -> None:
    with pytest.raises(UserError) as error:
        region_weights(numbered(100), SHARD, 0.5)
    assert (
        str(error.value)
        == "task.dirichlet: numbers has one class of documents only, so regions cannot differ"
    )


# The source whose entropy is known


@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_the_entropy_rate_of_two_states_has_a_closed_form(a: float, b: float) -> None:
    """Leave state 0 with probability a, state 1 with b: (b·h(a) + a·h(b)) / (a + b), h being the
    entropy of a coin.
    """

    def h(p: float) -> float:
        return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)

    transition = np.array([[1 - a, a], [b, 1 - b]])
    assert entropy_rate(transition) == pytest.approx((b * h(a) + a * h(b)) / (a + b), abs=1e-9)


def test_the_entropy_rate_of_equal_rows_is_that_of_a_die() -> None:
    assert entropy_rate(np.full((6, 6), 1 / 6)) == pytest.approx(math.log(6))


def test_a_cycle_has_no_entropy() -> None:
    assert entropy_rate(np.roll(np.eye(4), 1, axis=1)) == pytest.approx(0, abs=1e-12)


def test_the_synthetic_source_has_the_entropy_that_it_claims() -> None:
    """Against counts of pairs in a long sample of each class: H(next | this) = −Σ n(i,j)/n · ln
    n(i,j)/n(i).
    """
    corpus = markov_corpus(vocabulary=12, sources=3, tokens=1_500_000)
    rates = []
    for a, b in pairwise(corpus.starts):
        text = corpus.train[a:b].astype(int)
        counts = np.zeros((12, 12))
        np.add.at(counts, (text[:-1], text[1:]), 1)
        seen = counts > 0
        given_first = counts / counts.sum(axis=1, keepdims=True).clip(1)
        rates.append(-(counts[seen] * np.log(given_first[seen])).sum() / counts.sum())
    assert corpus.entropy_rate == pytest.approx(np.mean(rates), rel=0.015)


def test_each_source_has_an_alphabet_of_its_own() -> None:
    corpus = markov_corpus(vocabulary=12, sources=3, tokens=60_000)
    alphabets = [set(corpus.train[a:b].tolist()) for a, b in pairwise(corpus.starts)]
    assert [{token // 4 for token in alphabet} for alphabet in alphabets] == [{0}, {1}, {2}]
    assert {int(token) // 4 for token in corpus.valid} == {0, 1, 2}


def test_the_synthetic_source_holds_out_a_twentieth_of_each_class() -> None:
    corpus = markov_corpus(vocabulary=12, sources=3, tokens=60_000)
    assert np.diff(corpus.starts).tolist() == [19_000] * 3
    assert np.bincount(corpus.valid // 4).tolist() == [1000] * 3


def test_the_synthetic_source_is_the_same_every_time() -> None:
    one, other = markov_corpus(8, 2, tokens=10_000), markov_corpus(8, 2, tokens=10_000)
    assert np.array_equal(one.train, other.train)
    assert one.entropy_rate == other.entropy_rate


def test_no_token_of_a_source_is_outside_the_vocabulary() -> None:
    for vocabulary, sources in ((7, 3), (64, 4)):  # 7 = 3 · 2 and one that is never drawn
        corpus = markov_corpus(vocabulary, sources, tokens=20_000)
        assert max(corpus.train.max(), corpus.valid.max()) == vocabulary // sources * sources - 1


def test_a_source_needs_two_tokens() -> None:
    with pytest.raises(UserError) as error:
        markov_corpus(vocabulary=6, sources=4)
    assert (
        str(error.value)
        == "task: a vocabulary of 6 gives each of 4 sources 1 tokens; 2 to 512 are allowed"
    )
