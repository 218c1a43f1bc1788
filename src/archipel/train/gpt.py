"""The small default model: a GPT with pre-normalisation, squared ReLU and no biases.

What belongs here: the model and its sizes. What does not: its data, its optimizer, or how it is
trained.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TransformerBlock(nn.Module):
    """Causal self-attention, then an MLP of four times the width. Each takes a normalised input,
    and its output is added to what came in.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, sequence, width) in and out."""
        x = x + self.attention_out(causal_attention(self.attention_in(self.norm_1(x)), self.heads))
        y: Tensor = self.mlp_out(F.relu(self.mlp_in(self.norm_2(x))).square())
        return x + y


def causal_attention(qkv: Tensor, heads: int) -> Tensor:
    """Multi-head causal attention on packed queries, keys and values: (batch, sequence, 3·width) to
    (batch, sequence, width).
    """
    (batch, sequence, _), dtype = qkv.shape, qkv.dtype
    if qkv.device.type == "cpu" and dtype == torch.bfloat16:
        # On CPUs with bf16 arithmetic the fused kernel's backward pass in bf16 takes half of a
        # step; in fp32 it does not.
        qkv = qkv.float()
    q, k, v = qkv.view(batch, sequence, 3, heads, -1).permute(2, 0, 3, 1, 4)
    with torch.autocast("cpu", enabled=False):
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(1, 2).reshape(batch, sequence, -1).to(dtype)


class Embed(nn.Module):
    """The embedding of a token plus that of its position."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shape (batch, sequence) to (batch, sequence, width)."""
        x: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return x


class Head(nn.Module):
    """Turns the last block's output into logits of the next token."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, sequence, width) to (batch, sequence, vocabulary)."""
        logits: Tensor = self.logits(self.norm(x))
        return logits


class GPT(nn.Sequential):
    """A decoder-only transformer over `vocabulary` tokens, for sequences of up to `context` of
    them.

    Tokens of shape (batch, sequence) give logits of the next one, shape (batch, sequence,
    vocabulary). `tied`: one table serves as embedding and as output; such a model cannot be cut
    into stages.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        layers: int,
        width: int,
        heads: int,
        tied: bool = True,
    ) -> None:
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}")
        embed = Embed(vocabulary, context, width)
        blocks = {f"block_{i}": TransformerBlock(width, heads) for i in range(layers)}
        head = Head(vocabulary, width)
        super().__init__(OrderedDict[str, nn.Module](embed=embed, **blocks, head=head))
        if tied:
            head.logits.weight = embed.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # GPT-2's rule: what is added to the residual stream shrinks with the number of
                # additions.
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each token given those before it; `batch` has shape (batch,
    sequence + 1).
    """
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
