"""Which updates a receiver does without: those that are not finite, or absurdly large beside the
ones before.

What belongs here: the rule, as a pure function of the updates that one receiver has seen. What does
not: who is told that an update is refused (the engines), and what a method does then.

One bad update can spoil a model for good, and its sender may not notice: the cause can be a broken
memory cell, a file with garbage in it, or an inner optimizer that diverges. New updates are held
against a median, because a few bad ones cannot move it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict, Field

from archipel.actor import Vector


class ScreeningConfig(BaseModel):
    """When an update is refused: the section `bad_updates` of a recipe."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    multiple: float = Field(
        1000.0,
        gt=1,
        description="an update is refused if its norm is more than this many times the median",
    )
    window: int = Field(
        64, ge=1, description="the median is taken over this many of the latest accepted updates"
    )
    warm_up: int = Field(
        8, ge=1, description="no update is too large before this many have been accepted"
    )


@dataclass
class Screen:
    """What one receiver has accepted so far.

    Attributes:
        norms: of the last `window` accepted updates.
        accepted: how many there were in all.
    """

    config: ScreeningConfig
    norms: list[float] = field(default_factory=list)
    accepted: int = 0

    def refuses(self, vectors: Sequence[Vector], parameters: int) -> str | None:
        """Why an update is refused; None if it is accepted.

        Args:
            vectors: all that it carries; the first one is its gradient.
            parameters: leading entries of the gradient that are parameters. Behind them lie
                buffers, which are values and have no usual size: a running variance of 10⁶ is fine.
        """
        # In double precision: the square of a finite fp32 number need not be one. Then the norm is
        # finite if all entries are.
        norm = float(torch.linalg.vector_norm(vectors[0][:parameters], dtype=torch.float64))
        others = (vectors[0][parameters:], *vectors[1:])
        if not math.isfinite(norm) or not all(
            bool(torch.isfinite(vector).all()) for vector in others
        ):
            return "it is not finite"
        if self.accepted >= self.config.warm_up:
            median = statistics.median(self.norms)
            # As long as nothing has moved, nothing is too large.
            if 0 < median * self.config.multiple < norm:
                times, last = f"{norm / median:.3g} times", len(self.norms)
                return (
                    f"its norm {norm:.3g} is {times} the running median {median:.3g} of the "
                    f"last {last}"
                )
        self.accepted += 1
        self.norms = [*self.norms, norm][-self.config.window :]
        return None
