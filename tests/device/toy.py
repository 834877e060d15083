"""A one-layer model that can be followed by hand: what a step needs of a model, and no more."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    sliding_window=None,
)


class Toy:
    """Embedding and position plus attention over itself; the head is a matrix of its own."""

    config = CONFIG
    head = ("head",)

    def apply(self, variables: Any, *args: Any, method: Any = None) -> Any:
        params = variables["params"]
        if method == "logits":
            return args[0] @ params["head"]
        tokens, positions, cache, ops = args
        angle = positions[:, None].astype(jnp.float32) * jnp.arange(1.0, 17)[None]
        x = params["embed"][tokens] + jnp.cos(angle)
        q = x.reshape(-1, 4, 4)
        out, layer = ops.attention(q, q[:, ::2], q[:, 1::2], cache[0], CONFIG.attention_spec(0))
        return x + out.reshape(x.shape), (layer,)


def init_params(seed: int = 0) -> dict[str, jax.Array]:
    embed, head = jax.random.split(jax.random.key(seed))
    return {
        "embed": jax.random.normal(embed, (37, 16)),
        "head": jax.random.normal(head, (16, 37)),
    }
