"""What a recipe can say of its task.

What belongs here: the settings of each task that has a name, their defaults and what they mean.
What does not: making a task of them (`task.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from archipel.errors import UserError, nearest

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[  # YAML has lists, not tuples
    tuple[Beta, Beta], Field(strict=False, description="β₁ and β₂ of AdamW")
]
Rate = Annotated[float, Field(gt=0, description="peak learning rate of AdamW")]
Eps = Annotated[float, Field(gt=0, description="ε of AdamW")]
Decay = Annotated[float, Field(ge=0, description="weight decay of AdamW; only matrices decay")]
Norm = Annotated[float, Field(gt=0)]
Clip = Annotated[
    Norm | None,
    Field(description="a gradient with a larger norm is scaled down to it; null: never"),
]
Warmup = Annotated[
    float, Field(ge=0, le=1, description="share of the run in which the learning rate rises")
]
Precision = Annotated[
    Literal["fp32", "bf16"],
    Field(description="bf16: the forward pass runs in autocast; weights stay fp32"),
]


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
    """A function of the user's that returns a `Task`: `name: mytask.py:make`. All other keys are
    its arguments.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def settings(self) -> dict[str, Any]:
        """What the function is given."""
        return dict(self.model_extra or {})


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
    lr: Rate = 3e-3
    betas: Betas = (0.9, 0.95)
    eps: Eps = 1e-8
    weight_decay: Decay = 0.1
    gradient_clip: Clip = 1.0
    warmup: Warmup = 0.05
    precision: Precision = "fp32"
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


Plain = bool | int | float | str | None


class Lora(BaseModel):
    """Low-rank adapters beside frozen weights (LoRA, arXiv 2106.09685); all defaults are `peft`'s
    own.
    """

    model_config = TaskConfig.model_config

    rank: int = Field(8, ge=1, description="columns and rows of an adapter's two matrices: r")
    alpha: float = Field(
        8.0, gt=0, description="an adapter's output is scaled by alpha / rank: lora_alpha"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="share of an adapter's inputs that are left out: lora_dropout"
    )
    target_modules: list[str] | str | None = Field(
        None,
        description="names of the layers that have adapters, all-linear, or an expression that "
        "fits their whole names; null: those that peft has for this kind of model",
    )


class CausalLmTask(TaskConfig):
    """Any causal language model of `transformers`, on any text that `datasets` reads."""

    name: Literal["causal_lm"] = "causal_lm"
    model: str = Field(
        min_length=1,
        description="a published shape, such as pythia-70m, whose weights are random; a folder "
        "with a config.json; or OWNER/NAME on the Hugging Face hub",
    )
    from_scratch: bool = Field(
        False, description="leave out the weights that a folder or the hub has"
    )
    config: dict[str, Plain | list[Plain] | dict[str, Plain]] = Field(
        {},
        description="laid over the model's config.json, such as {num_hidden_layers: 2}",
    )
    data: str = Field(
        min_length=1,
        description="the documents: a parquet, jsonl, csv, arrow or text file, a folder of them, "
        "or a name on the Hugging Face hub",
    )
    subset: str | None = Field(None, description="which of the data sets under the hub's name")
    split: str = Field("train", description="the part of the data to train on")
    valid: str | None = Field(
        None,
        description="validation data: a split, a file or a folder; null: one document in 20 is "
        "held out",
    )
    text_column: str = Field("text", description="the column that holds a document's text")
    region_column: str | None = Field(
        None,
        description="the column whose values are dealt out to the regions in turn, so that each "
        "sees documents of its own; null: all see the same",
    )
    tokenizer: str | None = Field(
        None,
        description="bytes, a tokenizer.json, a folder, or a name on the hub; null: the model's "
        "own, and bytes for a published shape",
    )
    end_of_text: str | None = Field(
        None, description="the token between documents; null: the tokenizer's own"
    )
    cache: str | None = Field(None, description="folder for tokens; null: ~/.cache/archipel/tokens")
    sequence: int = Field(512, ge=2, le=1_048_576, description="tokens per sequence")
    batch_size: int = Field(8, ge=1, description="sequences that go through the model at once")
    gradient_accumulation: int = Field(
        1, ge=1, description="so many of these make the batch of one inner step"
    )
    valid_sequences: int = Field(128, ge=1, description="sequences per evaluation, at most")
    gradient_checkpointing: bool = Field(
        False, description="compute activations again in the backward pass: less memory, more time"
    )
    blocks: bool = Field(
        False,
        description="make it an nn.Sequential that can be cut into stages (GPT-NeoX, Llama, "
        "Qwen3); true by default for a model in stages",
    )
    lora: Lora | None = Field(
        None,
        description="train low-rank adapters alone, such as {rank: 8, alpha: 16}, and freeze all "
        "else: only they travel; null: all weights are trained",
    )
    lr: Rate = 1e-3
    betas: Betas = (0.9, 0.95)
    eps: Eps = 1e-8
    weight_decay: Decay = 0.1
    gradient_clip: Clip = 1.0
    warmup: Warmup = 0.05
    precision: Precision = "fp32"

    # A task is a key of caches, and mappings have no hash.
    def __hash__(self) -> int:
        return hash(self.model_dump_json())


CONFIGS: dict[str, type[TaskConfig]] = {
    "none": NoTask,
    "stdlib": StdlibTask,
    "synthetic": SyntheticTask,
    "text": TextTask,
    "causal_lm": CausalLmTask,
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
