"""Keys and the inverse cumulative distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device.sampling.random_draw import draw_key, sample_categorical


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**64 - 1])
def test_the_key_is_jaxs_own(seed: int) -> None:
    """The promise that outlives this code: the same seed gives the same stream."""
    words = jnp.array(divmod(seed, 2**32), jnp.uint32)
    key = draw_key(words, jnp.int32(3), jnp.int32(41))
    with jax.enable_x64(True):
        whole = jax.random.key(np.uint64(seed))
    expected = jax.random.fold_in(jax.random.fold_in(whole, 3), 41)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected))


def test_an_index_of_weight_zero_is_never_drawn() -> None:
    weights = np.zeros((6, 8), np.float32)
    weights[[1, 1, 4], [0, 5, 7]] = [1e-30, 2.0, 1e-3]
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = jax.jit(jax.vmap(lambda key: sample_categorical(key, jnp.asarray(weights))))(keys)
    values, counts = np.unique(drawn, return_counts=True)
    assert set(values.tolist()) <= {8, 13, 39}
    assert 0 < counts[values == 39].sum() < 12  # one in 2001 is expected


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [0.0, np.float32(1) - np.float32(2**-24)])
def test_the_ends_of_the_unit_interval_are_safe(
    uniform: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.random, "uniform", lambda *_: jnp.full(2, uniform, jnp.float32))
    rng = np.random.default_rng(0)
    for _ in range(20):
        weights = rng.random((5, 8), np.float32) * (rng.random((5, 8)) < 0.3)
        index = int(sample_categorical(jax.random.key(0), jnp.asarray(weights, jnp.float32)))
        alive = np.flatnonzero(weights)
        assert index in (alive[0] if uniform == 0 else alive[-1], alive[-1])
