"""How well a mean over seeds is known.

What belongs here: means with their 95 % intervals by Student's t, as numbers and as text. What does
not: which runs are compared (`comparison.py`, the studies).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t with 1, 2, … degrees of freedom."""


def t_95(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t; beyond the table that of its end, up to 6.5 %
    more than the right one.
    """
    return T_95[min(freedom, len(T_95)) - 1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of independent values by Student's t, as (low, high); (nan,
    nan) of a single one.
    """
    mean, half = fmean(values), half_width(values)
    return mean - half, mean + half


def half_width(values: Sequence[float]) -> float:
    """Half the length of `interval`."""
    if len(values) < 2:
        return math.nan
    return t_95(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def text(values: Sequence[float], form: str) -> str:
    """Mean ± half of the 95 % interval, each in the format `form`; the value alone of one."""
    if len(values) < 2:
        return format(fmean(values), form)
    return f"{format(fmean(values), form)} ± {format(half_width(values), form.removeprefix('+'))}"
