"""Low-rank adapters (LoRA) by `peft`: beside frozen weights W a layer has two thin matrices, and
those alone are trained.

What belongs here: putting adapters into a model of `transformers`, and the folders of what they
have become. What does not: the model (`causal_lm.py`), and the settings (`configs.py`).

E. Hu et al., "LoRA: Low-rank adaptation of large language models" (arXiv 2106.09685), section 4.1:

    W x + (alpha / rank) B A x,  A of shape (rank, in), B of shape (out, rank), 0 at first

A frozen weight is no part of a vector (`vector.py`), so adapters are all that travels.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from archipel.errors import UserError, nearest
from archipel.train.configs import Lora
from archipel.train.extra import library

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter"
"""The folder, in that of a trained model, that holds its adapters alone, as `peft` loads them."""


def adapt(model: PreTrainedModel, lora: Lora) -> None:
    """Put adapters into a model, and freeze all else. Random weights are drawn from torch's
    generator.

    Raises:
        UserError: there are no such layers, or none that can have adapters; or a pattern of names
            is no regular expression.
    """
    peft = _peft()
    names = [name for name, _ in model.named_modules()]
    for target in [] if isinstance(lora.target_modules, str) else lora.target_modules or []:
        # `peft` leaves out what it does not find, as long as it finds one.
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise UserError(
                f"task.lora.target_modules: the {model.config.model_type} has no layer {target!r}"
                f"{nearest(target, {name.rpartition('.')[2] for name in names})}"
            )
    try:
        with warnings.catch_warnings():
            # Of layers whose weights are stored the other way round, which it then sees to itself.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
            peft.inject_adapter_in_model(_config(lora), model)
    except (ValueError, re.error) as error:
        raise UserError(f"task.lora.target_modules: {' '.join(str(error).split())}") from None
    _check_tied(model)


def without_values(outline: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model of fake tensors with adapters. `peft` moves them about, which fake tensors do not
    take: `outline` makes the model on the device `meta`.
    """
    with unset_fake_temporarily():
        model = outline()
    made: dict[int, Tensor] = {}  # a tied one is made once
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    made[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else fake
                    )
                tensors[name] = made[id(tensor)]
    return model


def export(
    model: PreTrainedModel,
    lora: Lora,
    state: Mapping[str, Tensor],
    weights: str | None,
    folder: Path,
) -> None:
    """Write the trained adapters as the folder `adapter`, and the model with them merged into its
    weights, W + (alpha / rank) B A, beside it.

    Args:
        model: without values; it is used up.
        state: what the adapted model's state dict has become.
        weights: the folder or the hub's name that W was loaded from; None: it was random, and
            adapters without it are of no use.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of `transformers`, about its own names
        whole = _peft().get_peft_model(model, _config(lora))
    # What is merged is written to, and `state` is the caller's.
    own = {
        name: tensor.clone() if "base_layer" in name.split(".") else tensor
        for name, tensor in state.items()
    }
    whole.get_base_model().load_state_dict(own, assign=True)
    if weights is not None:
        [config] = whole.peft_config.values()
        config.base_model_name_or_path = weights
        whole.save_pretrained(folder / ADAPTER)
    merged = whole.merge_and_unload()
    merged.tie_weights()
    merged.save_pretrained(folder)


def _config(lora: Lora) -> Any:
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def _check_tied(model: PreTrainedModel) -> None:
    """Raise a `UserError` if an adapter is in a table that is both embedding and output layer: the
    two would differ, and could not be merged.
    """
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(model.config, "tie_word_embeddings", False)
    if tied and any(hasattr(end, "base_layer") for end in ends):
        raise UserError(
            "task.lora.target_modules: the embedding and the output layer are one table here, "
            "which cannot have adapters; leave them out, or untie them with task.config = "
            "{tie_word_embeddings: false}"
        )


def _peft() -> Any:
    return library("peft", "task.lora needs")
