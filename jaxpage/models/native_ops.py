"""What lies between a model's attentions, by the native CPU kernels."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxpage import native
from jaxpage.models import layers


def linear(
    x: Array, w: Array, bias: Array | None = None, *, dtype: jnp.dtype | None = None
) -> Array:
    """`layers.linear` by the native CPU kernels; float16 weights stay with XLA.

    A row's result is the same to the bit for any number of rows up to `native.FEW_ROWS`, and among
    larger ones.
    """
    if w.dtype == jnp.float16:
        return layers.linear(x, w, bias, dtype=dtype)
    y = native.matmul(x, w.reshape(-1, w.shape[-1])).astype(dtype or x.dtype)
    if bias is not None:
        y = y + bias.reshape(1, -1).astype(y.dtype)
    return y


def rms_norm(x: Array, scale: Array, *, eps: float) -> Array:
    """`layers.rms_norm`, natively."""
    return native.rms_norm(x, scale, eps=eps).astype(x.dtype)


def swiglu(x: Array) -> Array:
    """`layers.swiglu`, natively, in float32 inside."""
    return native.swiglu(x).astype(x.dtype)


def rotate_qkv(qkv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
    """`layers.rotate_qkv`, natively. XLA would compute the cosines again in every layer."""
    q, k, v = (each.astype(qkv.dtype) for each in native.rope_qkv(qkv, cos, sin))
    return q, k, v


NATIVE_OPS = layers.Ops(linear, rms_norm, swiglu, rotate_qkv)
