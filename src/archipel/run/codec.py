"""Vectors in fewer bits: what travels of one, and what its receiver makes of that.

What belongs here: the codecs themselves, as pure functions of a vector. What does not: which vector
of which message goes by which codec, and what becomes of the rounding (`wire.py`).

- **bf16**: each entry rounded to the nearest number with 8 bits of mantissa; 2 bytes an entry.
- **int8**, **int4**: blocks of `BLOCK` entries, each with a scale of its own. With L = 127 or 7,
  and a = max|x| over the block:

      s = a / L, as bf16;   c = round(x / s), −L ≤ c ≤ L;   the receiver has s·c

  A code is 1 byte or half of one, a scale 2 bytes. So no entry is off by more than about s / 2.

All rounding is to the nearest, ties to even. It draws no random numbers: one vector has one code.
The product s·c is exact in fp32, so all receivers have the same bits.

A block with an entry that is not finite has NaN for its scale, and all of it arrives as NaN. What
is finite arrives finite. A block whose scale would be below fp32's normal numbers arrives as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from archipel.actor import Vector

Codec = Literal["fp32", "bf16", "int8", "int4"]
CODECS: tuple[Codec, ...] = get_args(Codec)

BLOCK = 128
"""Entries of a vector that share a scale."""
STRETCH = 1 << 18
"""Entries that are coded at a time, so that they stay in the processor's cache. Whole blocks."""

_LARGEST = {"int8": 127, "int4": 7}
"""L, the largest code."""
_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
_SCALE_BYTES = 2
_TINY = torch.finfo(torch.float32).tiny
_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, eq=False, slots=True)
class Coded:
    """What travels of one vector: its first `count` entries coded, the others as they are.

    Attributes:
        codec: says what the codes mean.
        count: entries that are coded.
        codes: `bf16`: the bits of each entry, (count,) int16. `int8`: (count,) int8. `int4`: two
            entries a byte, the first one in the lower half, (ceil(count / 2),) uint8.
        scales: bits of the blocks' scales as bf16, (ceil(count / BLOCK),) int16; `bf16` has none.
        rest: the entries behind those that are coded, as fp32.
    """

    codec: Codec
    count: int
    codes: np.ndarray
    scales: np.ndarray
    rest: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.rest.nbytes

    def decode(self) -> Vector:
        """The vector as it arrives, in memory of its own."""
        whole = torch.empty(self.count + len(self.rest))
        whole[self.count :] = torch.from_numpy(self.rest)
        codes, coded = torch.from_numpy(self.codes), whole[: self.count]
        if self.codec == "bf16":
            coded.copy_(codes.view(torch.bfloat16))
            return whole
        scales = torch.from_numpy(self.scales).view(torch.bfloat16)
        for start in range(0, self.count, STRETCH):
            part = coded[start : start + STRETCH]
            if self.codec == "int4":
                pairs = codes[start // 2 : (start + STRETCH) // 2]
                part.copy_(torch.stack([pairs & 15, pairs >> 4], dim=1).flatten()[: len(part)])
                part.sub_(8)
            else:
                part.copy_(codes[start : start + STRETCH])
            blocks = scales[start // BLOCK : (start + STRETCH) // BLOCK].float()
            part.mul_(blocks.repeat_interleave(BLOCK)[: len(part)])
        return whole


def encode(vector: Vector, codec: Codec, count: int) -> Coded:
    """Code the first `count` entries of `vector`, shape (n,); all of them if it has fewer. `codec`
    is not fp32.
    """
    coded, rest = vector.detach()[:count], vector.detach()[count:].numpy().copy()
    count = len(coded)
    if codec == "bf16":
        rounded = coded.bfloat16()
        # What is finite stays so: the largest fp32 numbers would round up to infinity.
        if bool(rounded.isinf().any()):
            rounded = torch.where(
                coded.isinf(), coded, coded.clamp(-_LARGEST_BF16, _LARGEST_BF16)
            ).bfloat16()
        return Coded(codec, count, _bits(rounded), np.empty(0, np.int16), rest)
    codes = torch.empty(count, dtype=torch.int8)
    scales = torch.empty(-(-count // BLOCK), dtype=torch.bfloat16)
    for start in range(0, count, STRETCH):
        part = coded[start : start + STRETCH]
        scale = _scales(part, _LARGEST[codec])
        scales[start // BLOCK : start // BLOCK + len(scale)] = scale
        # Zero where nothing can be divided by the scale: a block of zeros, or one that is NaN.
        inverse = torch.where(scale > 0, scale, torch.inf).float()
        ratio = part / inverse.repeat_interleave(BLOCK)[: len(part)]
        ratio.nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-_LARGEST[codec], _LARGEST[codec])
        codes[start : start + STRETCH] = ratio
    if codec == "int4":
        codes = torch.nn.functional.pad(codes, (0, count % 2)).add_(8).view(torch.uint8)
        codes = codes[0::2] | (codes[1::2] << 4)
    return Coded(codec, count, codes.numpy(), _bits(scales), rest)


def _scales(part: Tensor, largest: int) -> Tensor:
    """The scales of the blocks of `part`, shape (ceil(n / BLOCK),), as bf16; 0 for a block that
    arrives as zeros, NaN for one with an entry that is not finite.
    """
    whole = len(part) // BLOCK * BLOCK
    tops = [part[:whole].view(-1, BLOCK).abs().amax(dim=1)]
    if whole < len(part):
        tops.append(part[whole:].abs().amax(dim=0, keepdim=True))
    top = torch.cat(tops) if part.numel() else part
    scale = (top / largest).clamp_(max=_highest_scale(largest)).bfloat16()
    scale = torch.where(scale < _TINY, torch.zeros_like(scale), scale)
    return torch.where(top.isfinite(), scale, torch.full_like(scale, torch.nan))


def _highest_scale(largest: int) -> float:
    """The largest bf16 number of which `largest` times is still a finite fp32 number."""
    bound = torch.tensor(torch.finfo(torch.float32).max / largest, dtype=torch.float32)
    # Cutting off the last 16 bits is rounding towards zero.
    return float((bound.view(torch.int32) & -65536).view(torch.float32))


def _bits(numbers: Tensor) -> np.ndarray:
    """bf16 numbers as integers of the same bits, for NumPy has no bf16."""
    return numbers.view(torch.int16).numpy()


def decoded(vector: Vector | Coded) -> Vector:
    """A vector as it arrives, whether or not it travels in fewer bits."""
    return vector.decode() if isinstance(vector, Coded) else vector


def coded_bytes(count: int, codec: Codec) -> int:
    """What `count` entries take."""
    scales = -(-count // BLOCK) * _SCALE_BYTES if codec in _LARGEST else 0
    return -(-count * _BITS[codec] // 8) + scales


def bytes_per_entry(codec: Codec) -> float:
    """What an entry takes, with its part of a scale."""
    return coded_bytes(BLOCK, codec) / BLOCK
