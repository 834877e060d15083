"""LLaMA 1 to 3, and models stored like them: Vicuna, TinyLlama, SmolLM2, Code Llama.

The module and the shapes of its leaves are in `jaxpage.models.llama`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jaxpage.config import ModelConfig
from jaxpage.fields import Fields, words
from jaxpage.models.family import Family, Layout, Rule
from jaxpage.models.llama import Llama

# Parts of attention/qkv [K, G + 2, H, ...] and of mlp/gate_up [2, F, ...].
Q, K, V = np.s_[:, :-2], np.s_[:, -2:-1], np.s_[:, -1:]
GATE, UP = np.s_[:1,], np.s_[1:,]

HF_RULES: tuple[Rule, ...] = (
    Rule("model.embed_tokens.weight", "embed/embedding"),
    Rule("model.layers.{i}.input_layernorm.weight", "layers_{i}/input_norm/scale"),
    Rule("model.layers.{i}.self_attn.q_proj.weight", "layers_{i}/attention/qkv/kernel", Q),
    Rule("model.layers.{i}.self_attn.k_proj.weight", "layers_{i}/attention/qkv/kernel", K),
    Rule("model.layers.{i}.self_attn.v_proj.weight", "layers_{i}/attention/qkv/kernel", V),
    Rule("model.layers.{i}.self_attn.q_proj.bias", "layers_{i}/attention/qkv/bias", Q),
    Rule("model.layers.{i}.self_attn.k_proj.bias", "layers_{i}/attention/qkv/bias", K),
    Rule("model.layers.{i}.self_attn.v_proj.bias", "layers_{i}/attention/qkv/bias", V),
    Rule("model.layers.{i}.self_attn.o_proj.weight", "layers_{i}/attention/out/kernel"),
    Rule("model.layers.{i}.self_attn.o_proj.bias", "layers_{i}/attention/out/bias"),
    Rule(
        "model.layers.{i}.post_attention_layernorm.weight", "layers_{i}/post_attention_norm/scale"
    ),
    Rule("model.layers.{i}.mlp.gate_proj.weight", "layers_{i}/mlp/gate_up/kernel", GATE),
    Rule("model.layers.{i}.mlp.up_proj.weight", "layers_{i}/mlp/gate_up/kernel", UP),
    Rule("model.layers.{i}.mlp.gate_proj.bias", "layers_{i}/mlp/gate_up/bias", GATE),
    Rule("model.layers.{i}.mlp.up_proj.bias", "layers_{i}/mlp/gate_up/bias", UP),
    Rule("model.layers.{i}.mlp.down_proj.weight", "layers_{i}/mlp/down/kernel"),
    Rule("model.layers.{i}.mlp.down_proj.bias", "layers_{i}/mlp/down/bias"),
    Rule("model.norm.weight", "final_norm/scale"),
    Rule("lm_head.weight", "lm_head/kernel"),
)
META_RULES: tuple[Rule, ...] = (
    Rule("tok_embeddings.weight", "embed/embedding"),
    Rule("layers.{i}.attention_norm.weight", "layers_{i}/input_norm/scale"),
    Rule("layers.{i}.attention.wq.weight", "layers_{i}/attention/qkv/kernel", Q, True),
    Rule("layers.{i}.attention.wk.weight", "layers_{i}/attention/qkv/kernel", K, True),
    Rule("layers.{i}.attention.wv.weight", "layers_{i}/attention/qkv/kernel", V),
    Rule("layers.{i}.attention.wo.weight", "layers_{i}/attention/out/kernel"),
    Rule("layers.{i}.ffn_norm.weight", "layers_{i}/post_attention_norm/scale"),
    Rule("layers.{i}.feed_forward.w1.weight", "layers_{i}/mlp/gate_up/kernel", GATE),
    Rule("layers.{i}.feed_forward.w3.weight", "layers_{i}/mlp/gate_up/kernel", UP),
    Rule("layers.{i}.feed_forward.w2.weight", "layers_{i}/mlp/down/kernel"),
    Rule("norm.weight", "final_norm/scale"),
    Rule("output.weight", "lm_head/kernel"),
)
GGUF_RULES: tuple[Rule, ...] = (
    Rule("token_embd.weight", "embed/embedding"),
    Rule("blk.{i}.attn_norm.weight", "layers_{i}/input_norm/scale"),
    Rule("blk.{i}.attn_q.weight", "layers_{i}/attention/qkv/kernel", Q, True),
    Rule("blk.{i}.attn_k.weight", "layers_{i}/attention/qkv/kernel", K, True),
    Rule("blk.{i}.attn_v.weight", "layers_{i}/attention/qkv/kernel", V),
    Rule("blk.{i}.attn_q.bias", "layers_{i}/attention/qkv/bias", Q, True),
    Rule("blk.{i}.attn_k.bias", "layers_{i}/attention/qkv/bias", K, True),
    Rule("blk.{i}.attn_v.bias", "layers_{i}/attention/qkv/bias", V),
    Rule("blk.{i}.attn_output.weight", "layers_{i}/attention/out/kernel"),
    Rule("blk.{i}.attn_output.bias", "layers_{i}/attention/out/bias"),
    Rule("blk.{i}.ffn_norm.weight", "layers_{i}/post_attention_norm/scale"),
    Rule("blk.{i}.ffn_gate.weight", "layers_{i}/mlp/gate_up/kernel", GATE),
    Rule("blk.{i}.ffn_up.weight", "layers_{i}/mlp/gate_up/kernel", UP),
    Rule("blk.{i}.ffn_gate.bias", "layers_{i}/mlp/gate_up/bias", GATE),
    Rule("blk.{i}.ffn_up.bias", "layers_{i}/mlp/gate_up/bias", UP),
    Rule("blk.{i}.ffn_down.weight", "layers_{i}/mlp/down/kernel"),
    Rule("blk.{i}.ffn_down.bias", "layers_{i}/mlp/down/bias"),
    Rule("output_norm.weight", "final_norm/scale"),
    Rule("output.weight", "lm_head/kernel"),
    # Rotary stretching as a table; the config reader turns it back into its rule.
    Rule("rope_freqs.weight", None),
    Rule("blk.{i}.attn_rot_embd", None),
    Rule("blk.{i}.attn_rot_embd.weight", None),
)


def _read(_: Fields, settings: dict[str, Any]) -> ModelConfig:
    """The common settings are all there are."""
    return ModelConfig(**settings)


def _write(config: ModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    """GGUF files call Mistral a llama too; transformers' Llama has no window."""
    if config.sliding_window is not None:
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        return values | mistral | {"sliding_window": config.sliding_window}
    return values | {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


HF_LAYOUT = Layout(
    # The second is the name that the first public LLaMA exports carried.
    names=("LlamaForCausalLM", "LLaMAForCausalLM"),
    rules=HF_RULES,
    read=_read,
    write=_write,
    # Transformers' Llama has no window, whatever its config says.
    keys=words("sliding_window is_llama_config"),
    defaults={  # of transformers' LlamaConfig
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
SHARDING = (
    (r"attention/qkv/", PartitionSpec("model")),
    (r"attention/out/kernel$", PartitionSpec(None, "model")),
    (r"mlp/gate_up/", PartitionSpec(None, "model")),
    (r"mlp/down/kernel$", PartitionSpec(None, "model")),
    (r"^(embed/embedding|lm_head/kernel)$", PartitionSpec("model")),
    (r"/(scale|bias)$", PartitionSpec()),
)
"""Heads, hidden units of the MLP and rows of the vocabulary are shared out; what is added to the
stream after a sum over devices is whole on each."""

LLAMA = Family(
    name="llama",
    module=Llama,
    layouts={
        "huggingface": HF_LAYOUT,
        "gguf": Layout(names=("llama",), rules=GGUF_RULES, read=_read),
        "meta": Layout(names=("",), rules=META_RULES, read=_read),
    },
    sharding=SHARDING,
)
