"""What a recipe can say of its task.

What belongs here: the settings of each task that has a name, their defaults and what they mean.
What does not: making a task of them (`task.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from archipel.errors import UserError, nearest

Beta = Annotated[float, Field(ge=0, lt=1)]


class TaskConfig(BaseModel):
    """Base of the tasks' configurations: unknown keys and wrong types are refused, nothing changes
    later.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    name: str


class NoTask(TaskConfig):
    """Timing only: the actors run with empty vectors and nothing is trained."""

    name: Literal["none"] = "none"


class UserTask(TaskConfig):
    """A function of the user's that returns a `Task`: `name: mytask.py:make`."""


class GptTask(TaskConfig):
    """What the built-in language tasks share: a small GPT, and AdamW as published (HALoS, arXiv
    2506.04531) but for the sizes.
    """

    layers: int = Field(2, ge=1, description="blocks of the GPT")
    width: int = Field(32, ge=1, description="width of the residual stream")
    heads: int = Field(
        2, ge=1, description="attention heads; the width must be a multiple of their number"
    )
    tied: bool = Field(
        True,
        description="one table is both input embedding and output layer; false by default for a "
        "model in stages",
    )
    sequence: int = Field(64, ge=2, le=65_536, description="tokens per sequence")
    batch_size: int = Field(4, ge=1, description="sequences per inner step")
    valid_sequences: int = Field(128, ge=1, description="sequences per evaluation")
    lr: float = Field(3e-3, gt=0, description="peak learning rate of AdamW")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), strict=False, description="β₁ and β₂ of AdamW"
    )  # YAML has lists, not tuples
    eps: float = Field(1e-8, gt=0, description="ε of AdamW")
    weight_decay: float = Field(0.1, ge=0, description="weight decay of AdamW; only matrices decay")
    gradient_clip: float | None = Field(
        1.0, gt=0, description="a gradient with a larger norm is scaled down to it; null: never"
    )
    warmup: float = Field(
        0.05, ge=0, le=1, description="share of the run in which the learning rate rises"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16: the forward pass runs in autocast; weights stay fp32"
    )
    dirichlet: float | None = Field(
        None,
        gt=0,
        description="how alike the regions' data are: concentration of each region's mixture of "
        "classes; null: all regions draw from the same data",
    )


class StdlibTask(GptTask):
    """The source of Python's own standard library, in bytes: every machine has it, and nothing is
    downloaded.
    """

    name: Literal["stdlib"] = "stdlib"


class SyntheticTask(GptTask):
    """Random Markov chains of known entropy: how far from the best possible loss is a number."""

    name: Literal["synthetic"] = "synthetic"
    vocabulary: int = Field(
        64, ge=2, le=8192, description="different tokens of all sources together"
    )
    sources: int = Field(
        4,
        ge=1,
        le=64,
        description="how many Markov chains there are, each with an alphabet of its own",
    )


class TextTask(GptTask):
    """Any file or folder of text, in bytes."""

    name: Literal["text"] = "text"
    path: str = Field(description="the text: a file or a folder")


CONFIGS: dict[str, type[TaskConfig]] = {
    "none": NoTask,
    "stdlib": StdlibTask,
    "synthetic": SyntheticTask,
    "text": TextTask,
}


def task_config(name: str) -> type[TaskConfig]:
    """The kind of configuration that the task called `name` has.

    Raises:
        UserError: there is no such task.
    """
    if ":" in name:
        return UserTask
    if name not in CONFIGS:
        meant = (
            f"; name its function too: '{name}:make'"
            if name.endswith(".py")
            else nearest(name, CONFIGS)
        )
        raise UserError(
            f"task = {name!r}: allowed are {', '.join(CONFIGS)} and your own "
            f"'file.py:function'{meant}"
        )
    return CONFIGS[name]
