"""Causal language models of `transformers`, for training and back.

What belongs here: which model a task means, making it, its loss, and the folder that others load.
What does not: its data (`packed.py`), adapters (`lora.py`), and the published shapes (`shapes.py`).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn import functional as F

from archipel.errors import UserError, nearest, seen_from
from archipel.train import lora as adapters
from archipel.train.configs import Lora
from archipel.train.extra import library, reading
from archipel.train.shapes import SHAPES
from archipel.train.tokenizer import size_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pretrained:
    """A model that is made anew each time, from its configuration or from its weights.

    Attributes:
        config: of `transformers`.
        weights: the folder or the hub's name that they are loaded from; None: they are random.
        checkpointing: activations are computed again in the backward pass, and not kept.
        blocks: make it an `nn.Sequential`, which can be cut into stages.
        lora: train adapters alone; None: all weights.
    """

    config: PretrainedConfig
    weights: str | None
    checkpointing: bool
    blocks: bool
    lora: Lora | None

    def make(self) -> nn.Module:
        """A new model in fp32, in training mode. Random weights are drawn from torch's generator.

        Raises:
            UserError: the weights do not fit the configuration.
        """
        auto = library("transformers").AutoModelForCausalLM
        faked = detect_fake_mode()  # then there are no values to be loaded
        if faked and self.lora:
            model = adapters.without_values(self.adapted)
        elif faked or self.weights is None:
            model = auto.from_config(self.config, dtype=torch.float32)
        else:
            with reading(f"task.model = {self.weights!r}"):
                model = auto.from_pretrained(
                    self.weights, config=self.config, dtype=torch.float32, trust_remote_code=False
                )
        if self.checkpointing:
            model.activation_checkpointing_enable()
        if self.lora and not faked:
            adapters.adapt(model, self.lora)
        model.train()
        return blocks_of(model) if self.blocks else model

    def bare(self) -> PreTrainedModel:
        """The model without values, adapters or blocks."""
        auto = library("transformers").AutoModelForCausalLM
        with torch.device("meta"):
            return auto.from_config(self.config, dtype=torch.float32)

    def adapted(self) -> PreTrainedModel:
        """The model without values, with adapters if it has any."""
        model = self.bare()
        if self.lora:
            with torch.device("meta"):
                adapters.adapt(model, self.lora)
        return model

    @property
    def size(self) -> int:
        """How many parameters it has, each counted once, without adapters."""
        return sum(parameter.numel() for parameter in self.bare().parameters())

    @property
    def trained(self) -> int:
        """How many of its parameters are trained: all, or those of its adapters."""
        return sum(one.numel() for one in self.adapted().parameters() if one.requires_grad)


def pretrained(
    name: str,
    changes: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    from_scratch: bool,
    checkpointing: bool,
    blocks: bool,
    lora: Lora | None,
) -> Pretrained:
    """The model that a task means.

    Without weights its vocabulary is the tokenizer's, unless `changes` says otherwise.

    Args:
        name: a published shape; a folder with a config.json; or a name on the Hugging Face hub.
        changes: laid over the fields of its configuration.
        length: the longest sequence that it is to take, in tokens.
        from_scratch: leave weights out.
        checkpointing, blocks, lora: see `Pretrained`.

    Raises:
        UserError: there is no such model, or no way to make blocks of it, or to put adapters in;
            `changes` names a field that it does not have; or it cannot take such tokens or
            sequences.
    """
    config, weights = config_of(name)
    weights = None if from_scratch else weights
    fields = dict(changes)
    if weights is None:
        end = tokenizer.eos_token_id
        # Padding would leave a row of the embedding untrained, and nothing is padded here.
        own = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
        fields = {"vocab_size": size_of(tokenizer), **own, **fields}
    known = config.to_dict().keys()
    for key in changes:
        if key not in known and key not in config.attribute_map:
            raise UserError(
                f"task.config: a {config.model_type} has no field {key!r}{nearest(key, known)}"
            )
    # Made anew, for some fields follow from others.
    given = {**_given(config, name), **fields}
    if "layer_types" in given and "layer_types" not in changes:  # a list that is as long as layers
        given["layer_types"] = given["layer_types"][: given.get("num_hidden_layers")]
    try:
        config = type(config)(**given)
        found = Pretrained(config, weights, checkpointing, blocks, lora)
        _ = found.size
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"task.config: no {config.model_type} can be made of {dict(changes)}: "
            f"{' '.join(str(error).split())}"
        ) from None
    if config.vocab_size < size_of(tokenizer):
        raise UserError(
            f"task.tokenizer: has {size_of(tokenizer)} tokens, and the model's vocabulary "
            f"{config.vocab_size}; give the tokenizer that it was trained with, or from_scratch"
        )
    if blocks:
        _check_blocks(config)
    if blocks and lora:
        raise UserError(
            "task.lora: a model in stages (pipeline.stages, task.blocks) cannot have adapters; "
            "leave one of them out"
        )
    if lora:
        _ = found.trained
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise UserError(
            f"task.sequence = {length}: {name} takes sequences of up to {longest} tokens; give a "
            "shorter one, or change max_position_embeddings in task.config"
        )
    return found


def config_of(name: str) -> tuple[PretrainedConfig, str | None]:
    """The configuration of the model called `name`, and where its weights are, if there are any.

    Raises:
        UserError: there is no such model.
    """
    auto = library("transformers").AutoConfig
    if name in SHAPES:
        return auto.for_model(**SHAPES[name]), None
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"task.model = {name!r}: there is no config.json in that folder")
        with reading(f"task.model = {name!r}"):
            config = auto.from_pretrained(name, trust_remote_code=False)
        there = any(file.suffix in (".safetensors", ".bin") for file in path.iterdir())
        return config, name if there else None
    check_name(name)
    with reading(f"task.model = {name!r}"):
        return auto.from_pretrained(name, trust_remote_code=False), name


def check_name(name: str) -> None:
    """Raise a `UserError` if no model can be called `name`. Nothing is asked of the hub."""
    named = name in SHAPES or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name)
    if not named and not Path(name).is_dir():
        raise UserError(
            f"task.model = {name!r}: allowed are {', '.join(SHAPES)}, a folder with a config.json"
            f"{seen_from(name)}, and OWNER/NAME on the Hugging Face hub{nearest(name, SHAPES)}"
        )


def _given(config: PretrainedConfig, name: str) -> dict[str, Any]:
    """What the configuration was made of; of a file, all that differs from the defaults."""
    if name in SHAPES:
        return {key: value for key, value in SHAPES[name].items() if key != "model_type"}
    return config.to_diff_dict()  # type: ignore[no-any-return]


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each token given those before it; `batch` has shape (batch,
    sequence + 1).
    """
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def exporter(
    model: Pretrained, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Mapping[str, Tensor], Path], None]:
    """Writes trained weights as a folder that `AutoModelForCausalLM.from_pretrained` loads, the
    tokenizer beside them.
    """

    def export(state: Mapping[str, Tensor], folder: Path) -> None:
        made = model.bare()
        if model.lora:
            adapters.export(made, model.lora, state, model.weights, folder)
        else:
            # The blocks are parts of the model, so what is loaded into them is loaded into it.
            (blocks_of(made) if model.blocks else made).load_state_dict(state, assign=True)
            made.tie_weights()
            made.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return export


# In blocks

IN_BLOCKS = ("gpt_neox", "llama", "qwen3")
"""Kinds of models whose decoder layers need to know nothing but what comes in."""


def _check_blocks(config: PretrainedConfig) -> None:
    kinds = {*(getattr(config, "layer_types", None) or ["full_attention"])}
    if config.model_type not in IN_BLOCKS or kinds != {"full_attention"}:
        raise UserError(
            f"task.blocks: allowed are models of the kinds {', '.join(IN_BLOCKS)} with full "
            f"attention, and this is a {config.model_type} with {', '.join(sorted(kinds))}"
        )


class Layer(nn.Module):
    """A decoder layer that finds the rotary embeddings of its positions itself."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, sequence, width) in and out."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        y: Tensor = self.layer(
            x,
            attention_mask=None,  # causal
            position_ids=positions,
            position_embeddings=self.rotary(x, positions),
        )
        return y


def blocks_of(model: PreTrainedModel) -> nn.Sequential:
    """The model as blocks that share its parameters: tokens, shape (batch, sequence), give logits,
    shape (batch, sequence, vocabulary).
    """
    base = model.base_model
    embed: list[nn.Module] = [model.get_input_embeddings()]
    if hasattr(base, "emb_dropout"):
        embed.append(base.emb_dropout)
    norm = base.final_layer_norm if hasattr(base, "final_layer_norm") else base.norm
    layers = {f"layer_{i}": Layer(layer, base.rotary_emb) for i, layer in enumerate(base.layers)}
    head = nn.Sequential(OrderedDict(norm=norm, logits=model.get_output_embeddings()))
    return nn.Sequential(
        OrderedDict[str, nn.Module](embed=nn.Sequential(*embed), **layers, head=head)
    )
