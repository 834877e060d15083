"""What a model computes with: `Backend`, the operations by machine, and `Ops`, one forward pass.

A model gets an `Ops` and calls it; it knows no backend, no block table and no adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from jaxpage.config import AttentionSpec, ModelConfig
from jaxpage.device.types import LayerKV, StepInput
from jaxpage.weights import Leaf, Weight


@runtime_checkable
class Backend(Protocol):
    """The operations that differ by machine. Frozen and hashable: it is static under `jax.jit`.

    Arrays are [T, ...], a token a row. The plain backend of `jaxpage.backends` has a form of each
    operation that runs everywhere; one of one's own extends it and replaces what it does better.
    """

    @property
    def reads_groups(self) -> bool:
        """Whether the step must name the rows whose leading blocks are the same, so that these are
        read once; else the backend finds those rows itself, or reads all of each."""
        ...

    @property
    def pays_for_padding(self) -> bool:
        """Whether each padding row costs as much as a live one: decode rows then get fine rungs."""
        ...

    def linear(
        self, x: Array, w: Weight, bias: Array | None = None, *, dtype: jnp.dtype | None = None
    ) -> Array:
        """x [T, D] times w [..., D], its leading axes flattened, plus bias of those axes: [T, out].

        The result has x's dtype, or `dtype` (accumulated in float32 all the same).
        """
        ...

    def rms_norm(self, x: Array, scale: Array, *, eps: float) -> Array:
        """x / rms(x) * scale along the last axis, computed in float32, returned in x's dtype."""
        ...

    def swiglu(self, x: Array) -> Array:
        """silu(gate) * up of x [T, 2 F], the gate first: [T, F]."""
        ...

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        """x [T, heads, H] with each pair (i, i + H / 2) rotated by its token's angle i; cos, sin
        [T, H / 2]."""
        ...

    def rope_qkv(self, qkv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """(q [T, N, H], k [T, K, H], v [T, K, H]) of qkv [T, K, G + 2, H], q and k rotated."""
        ...

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        layer_kv: LayerKV,
        step: StepInput,
        *,
        spec: AttentionSpec,
    ) -> tuple[Array, LayerKV]:
        """(attention of q [T, N, H], the layer with k and v [T, K, H] stored first).

        `jaxpage.device.attention` states what it must give.
        """
        ...

    def argmax_logsumexp(self, logits: Array) -> tuple[Array, Array]:
        """Of logits [R, V]: (int32 [R] first largest entry, float32 [R] log of the sum of exp)."""
        ...


Adapters = Mapping[str, Any]
"""Low-rank additions to matrices, by layer and matrix: {"layers_0": {"qkv": (A, B)}}.

A [n, rank, D] and B [n, out, rank] hold n adapters; adapter 0 must be zeros: it is that of rows
without one. A row of adapter i gets x A[i]^T B[i]^T added (Hu et al. 2021, LoRA, the scale in B).
"""


@register_dataclass
@dataclass(frozen=True)
class Ops:
    """One forward pass: its step, its backend, and the adapters of its rows."""

    step: StepInput
    adapters: Any  # those of this layer, as in `Adapters`; None: none
    adapter_of: Leaf  # [T] int32, the adapter of each token's row; None where there are none
    backend: Backend = field(metadata={"static": True})

    @classmethod
    def of(cls, step: StepInput, backend: Backend, adapters: Adapters | None = None) -> Ops:
        """The operations of a whole model; without step.adapters, no row has an adapter."""
        if adapters is None or step.adapters is None:
            return cls(step, None, None, backend)
        # padding tokens are of row B; clipped, they take the last row's adapter, which is harmless
        adapter_of = step.adapters.at[step.row_of_tokens()].get(mode="clip")
        return cls(step, dict(adapters), adapter_of, backend)

    def layer(self, name: str) -> Ops:
        """The same for one layer, in which a matrix is known by its own name."""
        return self if self.adapters is None else replace(self, adapters=self.adapters.get(name))

    def linear(
        self,
        x: Array,
        w: Weight,
        bias: Array | None = None,
        *,
        name: str | None = None,
        dtype: jnp.dtype | None = None,
    ) -> Array:
        """The backend's, plus what each row's adapter adds to the matrix `name`."""
        y = self.backend.linear(x, w, bias, dtype=dtype)
        if self.adapters is None or name not in self.adapters:
            return y
        down, up = (leaf[self.adapter_of] for leaf in self.adapters[name])
        exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        added = jnp.einsum("td,trd,tor->to", x, down, up, **exact)
        return y + added.astype(y.dtype)

    def attention(
        self, q: Array, k: Array, v: Array, layer_kv: LayerKV, spec: AttentionSpec
    ) -> tuple[Array, LayerKV]:
        """The backend's, of this step; see `Backend.attention`."""
        return self.backend.attention(q, k, v, layer_kv, self.step, spec=spec)

    def prompt_lens(self) -> Array:
        """Tokens of the prompt of each token's row: [T] int32; padding has the last row's."""
        row = jnp.minimum(self.step.row_of_tokens(), self.step.num_rows - 1)
        return self.step.prompt_lens[row]


@runtime_checkable
class Model(Protocol):
    """What a step needs of a model; a Linen module fits.

    `apply({"params": params}, tokens, positions, cache, ops)` is (hidden [T, D], cache) and
    `apply({"params": params}, hidden, backend, method="logits")` is float32 logits [R, V].
    """

    config: ModelConfig

    @property
    def head(self) -> tuple[str, ...]:
        """The names, at the top of the parameters, that `logits` reads."""
        ...

    def apply(self, variables: Any, *args: Any, method: Any = None) -> Any: ...
