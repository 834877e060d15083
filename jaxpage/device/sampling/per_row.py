"""Work for some rows of a batch: only for rows that ask for it, and no row sees another.

Each row is computed by the same program on arrays without a batch axis. Its result is bitwise
the same alone, in any batch and in any order, because no reduction ever depends on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpage.device.varying import vary_alike

if TYPE_CHECKING:
    from jaxtyping import Bool

Tree = TypeVar("Tree")


def replace_rows(
    asked: Bool[Array, "R"], compute: Callable[..., Tree], default: Tree, *args: Any
) -> Tree:
    """`default` [R, ...] with row i replaced by `compute(*args at i)` where `asked[i]`.

    On a CPU: a loop over the rows that ask, so that one row's data stays in cache. Elsewhere: all
    rows at once, if any asks.
    """
    asked, default, args = vary_alike((asked, default, args))
    return lax.platform_dependent(
        asked, default, args, cpu=_loop_over(compute), default=_all_at_once(compute)
    )


def each_row(compute: Callable[..., Tree], *args: Any) -> Tree:
    """`compute(*args at i)` for every row i, stacked; bitwise the same in any batch on a CPU."""
    one_row = jax.eval_shape(compute, *jax.tree.map(lambda arg: arg[0], args))
    num_rows = jax.tree.leaves(args)[0].shape[0]
    default = jax.tree.map(lambda one: jnp.zeros((num_rows, *one.shape), one.dtype), one_row)
    # If XLA knew that all ask, it would unroll a loop over one row and sum in another order.
    asked = lax.optimization_barrier(jnp.ones(num_rows, jnp.bool_))
    return replace_rows(asked, compute, default, *args)


def _loop_over(compute: Callable[..., Tree]) -> Callable[..., Tree]:
    def run(asked: Array, default: Tree, args: Any) -> Tree:
        asking_first = jnp.argsort(~asked).astype(jnp.int32)

        def replace(index: Array | int, result: Tree) -> Tree:
            row = asking_first[index]
            computed = compute(*jax.tree.map(lambda arg: arg[row], args))
            return jax.tree.map(lambda all, one: all.at[row].set(one), result, computed)

        return lax.fori_loop(jnp.int32(0), asked.sum(dtype=jnp.int32), replace, default)

    return run


def _all_at_once(compute: Callable[..., Tree]) -> Callable[..., Tree]:
    def run(asked: Array, default: Tree, args: Any) -> Tree:
        def choose(new: Array, old: Array) -> Array:
            return jnp.where(asked.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        def compute_all() -> Tree:
            return jax.tree.map(choose, jax.vmap(compute)(*args), default)

        return lax.cond(asked.any(), compute_all, lambda: default)

    return run
