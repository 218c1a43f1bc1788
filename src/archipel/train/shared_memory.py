"""Tensors in memory that several processes share.

What belongs here: a file without a name, and tensors inside it. What does not: what they hold
(`pool_process.py`).
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from archipel.train.optimizer_state import TensorSpec

ALIGNMENT_BYTES = 64


def anonymous_file() -> int:
    """A descriptor of a file in memory that has no name and goes with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("archipel")
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


def shared_tensors(descriptor: int, specs: Sequence[TensorSpec], *, create: bool) -> list[Tensor]:
    """Tensors inside the file `descriptor`, one after the other."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-max(spec.size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if create:
        os.ftruncate(descriptor, end)
    memory = mmap.mmap(descriptor, end)
    return [
        torch.frombuffer(
            memory, dtype=spec.dtype, count=max(math.prod(spec.shape), 1), offset=offset
        )[: math.prod(spec.shape)].view(spec.shape)
        for spec, offset in zip(specs, offsets, strict=True)
    ]
