"""`run/codec.py`: held against a few lines of NumPy, then what must hold of every vector."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from archipel.run import codec
from archipel.run.codec import BLOCK, CODECS, Codec, coded_bytes, decoded, encode
from archipel.run.screening import Screen, ScreeningConfig

LARGEST = {"int8": 127, "int4": 7}
SMALL: tuple[Codec, ...] = ("bf16", "int8", "int4")
HUGE = float(torch.finfo(torch.float32).max)
TINY = float(torch.finfo(torch.float32).tiny)

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
KINDS = st.one_of(
    st.lists(NUMBERS, max_size=300),
    st.lists(st.floats(-1, 1, width=32), max_size=300),
    st.lists(st.floats(width=32), max_size=300),  # infinities and NaN among them
    st.tuples(NUMBERS, st.integers(0, 300)).map(lambda pair: [pair[0]] * pair[1]),
    st.lists(
        st.sampled_from([0.0, 1.0, -HUGE, HUGE, TINY, -TINY / 2, 1e-45, 1e30, -1e-30]), max_size=300
    ),
)
VECTORS = KINDS.map(lambda values: torch.tensor(values, dtype=torch.float32))


def bf16(value: np.ndarray) -> np.ndarray:
    """To the nearest bf16 number, ties to even: by hand, on the bits."""
    bits = np.asarray(value, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def in_blocks(x: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and what arrives, block by block; for numbers of usual sizes."""
    codes, arrived = np.zeros(len(x), int), np.zeros(len(x), np.float32)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        scale = bf16(np.abs(block).max() / np.float32(largest))
        code = np.clip(np.rint(block / scale), -largest, largest)
        codes[start : start + BLOCK], arrived[start : start + BLOCK] = code, code * scale
    return codes, arrived


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("numel", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_codes_are_those_of_a_few_lines_of_numpy(name: Literal["int8", "int4"], numel: int) -> None:
    x = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    x *= np.float32(10.0) ** np.arange(numel) ** 0.2  # blocks of different sizes
    codes, arrived = in_blocks(x, LARGEST[name])
    coded = encode(torch.from_numpy(x), name, numel)
    if name == "int8":
        found = coded.codes.astype(int)
    else:
        found = np.stack([coded.codes & 15, coded.codes >> 4], axis=1).ravel()[:numel].astype(int)
        found -= 8
    np.testing.assert_array_equal(found, codes)
    np.testing.assert_array_equal(coded.decode(), arrived)


def test_bf16_is_the_nearest() -> None:
    x = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    np.testing.assert_array_equal(encode(torch.from_numpy(x), "bf16", 500).decode(), bf16(x))


@pytest.mark.parametrize("name", SMALL)
@given(vector=VECTORS, count=st.integers(0, 320))
def test_what_arrives_is_near_and_the_rest_is_as_it_was(
    name: Codec, vector: Tensor, count: int
) -> None:
    coded = encode(vector, name, count)
    arrived = coded.decode()
    count = min(count, len(vector))
    assert arrived.dtype == torch.float32
    assert arrived.shape == vector.shape
    assert torch.equal(arrived[count:].view(torch.int32), vector[count:].view(torch.int32))
    assert coded.nbytes == coded_bytes(count, name) + 4 * (len(vector) - count)
    for start in range(0, count, BLOCK):
        check_block(name, vector[start : min(start + BLOCK, count)], arrived[start:count][:BLOCK])


def check_block(name: Codec, block: Tensor, arrived: Tensor) -> None:
    if name == "bf16":
        finite = block.isfinite()
        assert torch.equal(finite, arrived.isfinite())
        wrong = (block[finite].double() - arrived[finite].double()).abs()
        assert bool((wrong <= block[finite].double().abs() / 256 + TINY / 256).all())
        return
    if not block.isfinite().all():
        assert arrived.isnan().all()
        return
    assert arrived.isfinite().all()
    top = float(block.abs().max())
    scale = top / LARGEST[name] * (1 + 1 / 256)
    # Half a step; what the scale's own rounding takes from the largest entry; what is too small.
    # Only where the scale cannot grow further, because the largest code would be infinite, it is
    # up to a whole step.
    steps = 0.5 if top < HUGE * (1 - 1 / 64) else 1.0 + 1 / 64
    bound = max(scale * steps, top / 256) if top / LARGEST[name] >= 2 * TINY else 128 * 2 * TINY
    assert float((block.double() - arrived.double()).abs().max()) <= bound


@pytest.mark.parametrize("name", SMALL)
@given(vector=VECTORS)
def test_it_is_refused_for_what_is_not_finite_and_for_nothing_else(
    name: Codec, vector: Tensor
) -> None:
    arrived = encode(vector, name, len(vector)).decode()
    for numel in (len(vector), 0):  # as parameters, and as statistics
        before, after = (
            Screen(ScreeningConfig()).refuses([one], numel) for one in (vector, arrived)
        )
        assert before == after


@pytest.mark.parametrize("name", SMALL)
def test_updates_of_usual_size_are_accepted_and_absurd_ones_are_not(name: Codec) -> None:
    rng = np.random.default_rng(0)
    sizes = [1.0, 3.0, 0.2, 1.0, 5.0, 0.1, 2.0, 1.0, 1.0, 1e5, 0.5, 300.0, 1e-3, 2e3]
    vectors = [torch.from_numpy(rng.standard_normal(999)).float() * size for size in sizes]
    screens = [Screen(ScreeningConfig()) for _ in range(2)]
    for vector in vectors:
        said = [
            screen.refuses([one], 999) is None
            for screen, one in zip(
                screens, (vector, encode(vector, name, 999).decode()), strict=True
            )
        ]
        assert said[0] == said[1]
    assert screens[0].accepted == len(vectors) - 2


@pytest.mark.parametrize("name", SMALL)
def test_pieces_of_whole_blocks_have_the_codes_of_the_whole(
    name: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is cut to travel, and of what is cut to stay in a cache."""
    x = torch.randn(10 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    whole = encode(x, name, len(x)).decode()
    pieces = [encode(piece, name, len(piece)).decode() for piece in torch.split(x, 3 * BLOCK)]
    assert torch.equal(torch.cat(pieces), whole)
    monkeypatch.setattr(codec, "STRETCH", 2 * BLOCK)
    assert torch.equal(encode(x, name, len(x)).decode(), whole)


def test_bytes_of_an_entry_by_hand() -> None:
    assert [codec.bytes_per_entry(name) for name in CODECS] == [
        4.0,
        2.0,
        1 + 2 / 128,
        0.5 + 2 / 128,
    ]
    assert [coded_bytes(129, name) for name in CODECS] == [516, 258, 129 + 4, 65 + 4]
    assert [coded_bytes(0, name) for name in CODECS] == [0, 0, 0, 0]


def test_a_vector_that_is_not_coded_is_what_it_is() -> None:
    vector: Any = torch.ones(3)
    assert decoded(vector) is vector
