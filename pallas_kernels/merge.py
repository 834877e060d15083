"""Merges attention over disjoint sets of tokens, by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels._compat import own_constants


@own_constants()
def merge_partials(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """(out [..., H], natural log-sum-exp [...]), float32, of attention over all tokens.

    outs[j] [..., H] and lses[j] [...] are attention over the j-th set of tokens; a set in which a
    query saw nothing has lse -inf, and its out may be anything but NaN. Where no set has anything,
    the result is 0 and -inf. (FlashAttention's rescaling, Dao et al. 2022, section 3.1.)
    """
    largest = lses[0]
    for lse in lses[1:]:
        largest = jnp.maximum(largest, lse)
    floor = jnp.where(largest > -jnp.inf, largest, 0)  # -inf minus -inf would be NaN
    weights = [jnp.exp(lse - floor) for lse in lses]
    total = sum(weights[1:], weights[0])
    pairs = zip(outs, weights, strict=True)
    acc = [out.astype(jnp.float32) * weight[..., None] for out, weight in pairs]
    divisor = jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, floor + jnp.log(divisor), -jnp.inf)
    return sum(acc[1:], acc[0]) / divisor[..., None], lse
