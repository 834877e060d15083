"""A small random Hugging Face model beside ours with the same weights. Needs torch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpage.config import ModelConfig
from jaxpage.formats.assemble import plan_leaves, read_leaf
from jaxpage.formats.tensors import Tensor
from jaxpage.formats.tree import nest
from jaxpage.models.families.llama import HF_RULES

# Large enough that every layer matters and logits spread over several units.
INITIALIZER_RANGE = 0.15


def twin(config: ModelConfig, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """(Hugging Face model, our parameters): one set of random weights, norms and biases too."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kwargs = _settings(config)
    if config.sliding_window is None:
        settings = transformers.LlamaConfig(
            **kwargs, attention_bias=config.attention_bias, mlp_bias=config.mlp_bias
        )
        model = transformers.LlamaForCausalLM(settings)
    else:
        settings = transformers.MistralConfig(**kwargs, sliding_window=config.sliding_window)
        model = transformers.MistralForCausalLM(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # as built, norms are 1 and biases 0: too easy to get right
                parameter.add_(0.2 * torch.randn(parameter.shape))
                assert "norm" in name or "bias" in name, name
    return model.eval(), _our_params(config, model.state_dict())


def reference_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    """Hugging Face's logits [T, V] of one forward pass over the tokens."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float().numpy()


def reference_decode(model: Any, token_ids: list[int], prompt_len: int) -> np.ndarray:
    """Hugging Face's logits [T, V] of a prefill of the prompt and then token by token."""
    import torch

    with torch.no_grad():
        out = model(torch.tensor([token_ids[:prompt_len]]), use_cache=True)
        logits = [out.logits[0]]
        for token in token_ids[prompt_len:]:
            out = model(torch.tensor([[token]]), cache=out.past_key_values)
            logits.append(out.logits[0])
        return torch.cat(logits).float().numpy()


def _settings(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling, max_length = config.rope_scaling, config.max_position_embeddings
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
        if scaling.kind == "dynamic":  # there the original length is called so
            max_length = scaling.original_max_position_embeddings
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": rope,
        "initializer_range": INITIALIZER_RANGE,
        "attn_implementation": "eager",
    }


def _our_params(config: ModelConfig, state: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    if config.tie_word_embeddings:
        del arrays["lm_head.weight"]  # another name of the embedding
    stored = {
        name: Tensor(name, array.shape, "float32", array.nbytes, lambda array=array: array)
        for name, array in arrays.items()
    }
    plans = plan_leaves(config, stored, HF_RULES, "a random model")
    return nest({plan.path: jnp.asarray(read_leaf(plan, "float32")) for plan in plans})
