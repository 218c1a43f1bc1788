"""Published shapes of causal language models, by name.

What belongs here: the fields of each one's `config.json`, as `transformers` calls them, and where
they were published. What does not: making a model of them (`causal_lm.py`), and weights: nothing is
downloaded for a shape.
"""

from __future__ import annotations

from typing import Any


def _pythia(hidden_size: int, layers: int, heads: int) -> dict[str, Any]:
    """Table 1 of Pythia (arXiv 2304.01373); the two smallest are newer than the paper, and stand at
    https://huggingface.co/EleutherAI/pythia-14m and …-31m.
    """
    return {
        "model_type": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10_000,
        "use_parallel_residual": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "pythia-14m": _pythia(128, 6, 4),
    "pythia-31m": _pythia(256, 6, 8),
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    # Radford et al., "Language models are unsupervised multitask learners" (2019);
    # https://huggingface.co/openai-community/gpt2
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "layer_norm_epsilon": 1e-5,
    },
    # OPT (arXiv 2205.01068), table 1; https://huggingface.co/facebook/opt-125m
    "opt-125m": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    # SmolLM2 (arXiv 2502.02737), a Llama; https://huggingface.co/HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    # TinyLlama (arXiv 2401.02385), table 2
    "tinyllama-1.1b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    # Qwen3 (arXiv 2505.09388), table 1; https://huggingface.co/Qwen/Qwen3-0.6B-Base
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
