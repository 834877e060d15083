"""Transformers' generate on the very arrays that a decode step was timed with.

JAX's weights are handed to PyTorch where they lie (DLPack), so a card holds them once; only the
query, key and value matrices, which are one leaf here, are copied.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.common.timing import Disturbed, longer_less_shorter
from benchmarks.gpu.kernels import BLOCK_SIZE, Sizes
from jaxpage.config import ModelConfig
from jaxpage.device.inputs import prefill_input
from jaxpage.device.kv_cache import init_cache
from jaxpage.formats.assemble import expand
from jaxpage.formats.hf_config import write_hf_config
from jaxpage.formats.rules import extract
from jaxpage.formats.tree import flatten
from jaxpage.functional import forward
from jaxpage.models.families.llama import HF_RULES
from jaxpage.models.registry import build_model

PROBE = (1, 5, 9, 2, 7)
"""Token ids whose logits show that both run the same model."""


def compare_generate(
    config: ModelConfig, params: dict[str, Any], rows: int, context: int, sizes: Sizes
) -> dict[str, Any]:
    """{"us" a step of `rows` rows behind `context` tokens, "difference" of the logits}.

    {"missing"} where PyTorch, Transformers or PyTorch's support of the card is, or a figure that
    the machine was too busy for.
    """
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return {"missing": f"{name} is not installed"}
    torch = importlib.import_module("torch")
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return {"missing": "this PyTorch does not see the card"}
    try:
        with torch.inference_mode():
            model = _build(torch, config, params)
            difference = _difference(torch, model, config, params)
            taken = _seconds(torch, model, rows, context, sizes)
    except torch.OutOfMemoryError as error:
        return {"missing": f"memory: {str(error).partition('.')[0]}"}
    except Disturbed as error:
        return {"missing": f"not measurable: {error}"}
    return {"us": taken * 1e6, "difference": difference}


def _build(torch: Any, config: ModelConfig, params: dict[str, Any]) -> Any:
    """The Hugging Face model around JAX's arrays."""
    transformers = importlib.import_module("transformers")
    written = transformers.LlamaConfig(**write_hf_config(config))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(written)
    leaves = {path: torch.from_dlpack(leaf) for path, leaf in flatten(params).items()}
    state = {
        name: extract(rule, leaves[path])
        for rule, name, path in expand(HF_RULES, config)
        if path in leaves
    }
    model.load_state_dict(state, assign=True)  # strict: nothing may be missing or left over
    device = next(iter(leaves.values())).device
    # Its table is no weight: made anew, since the one above has a shape and no numbers.
    model.model.rotary_emb = type(model.model.rotary_emb)(written).to(device)
    return model.eval()


def _difference(torch: Any, model: Any, config: ModelConfig, params: dict[str, Any]) -> float:
    """Largest difference of the last token's logits over the largest of ours."""
    step = prefill_input([list(PROBE)], [[1]], BLOCK_SIZE)
    cache = init_cache(config, 1, BLOCK_SIZE)
    _, ours = forward(build_model(config), params, cache, step, attention="reference")
    ids = torch.tensor([PROBE], device=model.device)
    theirs = jnp.asarray(model(ids).logits[0, -1].float().cpu().numpy())
    last: Array = ours.reshape(-1, ours.shape[-1])[-1].astype(jnp.float32)
    return float(jnp.abs(last - theirs).max() / jnp.abs(last).max())


def _seconds(torch: Any, model: Any, rows: int, context: int, sizes: Sizes) -> float:
    """Of one decode step: a long generate less one of a single token."""
    ids = torch.ones((rows, context), dtype=torch.int64, device=model.device)

    def generate(new_tokens: int) -> None:
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
        made.cpu()  # waits for the card

    generate(1)  # warms up
    return longer_less_shorter(generate, sizes.new_tokens) / sizes.new_tokens
