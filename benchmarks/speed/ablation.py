"""A decode step with parts of it left out: what each part costs is what is saved without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpage.backends.native import Native
from jaxpage.config import AttentionSpec, ModelConfig
from jaxpage.device import step as device_step
from jaxpage.device.inputs import decode_input
from jaxpage.device.kv_cache import init_cache, write_kv
from jaxpage.device.ops import Backend
from jaxpage.device.sampling.settings import greedy_sampling
from jaxpage.device.types import DrawInput, LayerKV, StepInput
from jaxpage.models.llama import Llama

BLOCK_SIZE = 16
PARTS = (
    "attention", "KV write", "QKV and O", "MLP", "rest of the layers",
    "LM head", "sampling", "host", "dispatch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bench:
    """A model on the device at hand, and the backend that computes it."""

    config: ModelConfig
    params: dict[str, Any]
    backend: Backend


def step_costs(
    bench: Bench, rows: int, contexts: list[int], rounds: int
) -> dict[int, dict[str, float]]:
    """Milliseconds of each part of a decode step but the host's, by context length.

    The least of the rounds: parts are differences, and what else a machine does only adds.
    """
    names = ["full", "write", "none", "mlp", "qkvo"]
    if isinstance(bench.backend, Native):
        names.remove("write")  # its attention stores K and V itself
    variants = {name: _compile(bench, name) for name in names}
    head, draw, empty = _head(bench), _draw(bench), jax.jit(lambda params, x: x + 1)
    most = max(contexts)
    cache = init_cache(
        bench.config, num_blocks=rows * -(-most // BLOCK_SIZE), block_size=BLOCK_SIZE
    )
    hidden = jnp.ones((rows, bench.config.hidden_size), jnp.dtype(bench.config.dtype))
    small = jnp.zeros(rows, jnp.int32)
    found: dict[int, dict[str, float]] = {}
    for context in contexts:
        step = jax.device_put(scattered_step(rows, context, most, block_size=BLOCK_SIZE))
        times: dict[str, list[float]] = {}
        for round_index in range(rounds + 1):
            for name, program in variants.items():
                start = time.perf_counter()
                cache, out = program(bench.params, cache, step)
                jax.block_until_ready(out)
                if round_index:
                    times.setdefault(name, []).append(time.perf_counter() - start)
            for name, call in (
                ("head", lambda: head(bench.params, hidden)),
                ("draw", lambda: draw(bench.params, hidden, small)),
                ("dispatch", lambda: empty(bench.params, small)),
            ):
                start = time.perf_counter()
                jax.block_until_ready(call())
                if round_index:
                    times.setdefault(name, []).append(time.perf_counter() - start)
        found[context] = _parts({name: 1e3 * min(t) for name, t in times.items()})
    return found


def _parts(ms: dict[str, float]) -> dict[str, float]:
    write = ms.get("write", ms["none"])
    layers = {
        "attention": ms["full"] - write,
        "KV write": write - ms["none"],
        "QKV and O": ms["full"] - ms["qkvo"],
        "MLP": ms["full"] - ms["mlp"],
    }
    return {
        **layers,
        "rest of the layers": ms["full"] - sum(layers.values()),
        "LM head": ms["head"] - ms["dispatch"],
        "sampling": ms["draw"] - ms["head"],
        "dispatch": 2 * ms["dispatch"],
        "step": ms["full"] + ms["draw"],
    }


def _compile(bench: Bench, leave_out: str) -> Callable[..., Any]:
    backend: Any = _Lesser(bench.config, bench.backend, leave_out)

    def run(params: Any, cache: Any, step: StepInput) -> Any:
        return device_step.hidden_of(Llama(bench.config), params, cache, step, backend=backend)[
            ::-1
        ]

    return jax.jit(run, donate_argnums=1)


class _Lesser:
    """A backend that leaves out one part of the work."""

    def __init__(self, config: ModelConfig, backend: Backend, leave_out: str) -> None:
        self._config, self._backend, self._leave_out = config, backend, leave_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def linear(self, x: Array, w: Array, bias: Array | None = None, *, dtype: Any = None) -> Array:
        """Skips the weights of a part left out: the result is the input's first columns."""
        config, out = self._config, int(np.prod(w.shape[:-1]))
        widths = {2 * config.intermediate_size, config.intermediate_size}
        part = "mlp" if widths & {out, w.shape[-1]} else "qkvo"
        if out == config.vocab_size or part != self._leave_out:
            return self._backend.linear(x, w, bias, dtype=dtype)
        repeats = -(-out // x.shape[1])
        return jnp.tile(x, (1, repeats))[:, :out].astype(dtype or x.dtype)

    def attention(
        self, q: Array, k: Array, v: Array, kv: LayerKV, step: StepInput, *, spec: AttentionSpec
    ) -> tuple[Array, LayerKV]:
        if self._leave_out == "write":  # all of attention but that
            return q, write_kv(kv, k, v, step.slots)
        if self._leave_out == "none":
            # k and v are used a little, so that their products are not dropped
            return q + (k + v)[:, :1] * jnp.asarray(1e-9, q.dtype), kv
        return self._backend.attention(q, k, v, kv, step, spec=spec)


def _head(bench: Bench) -> Callable[..., Any]:
    model = Llama(bench.config)
    return jax.jit(
        lambda params, x: model.apply({"params": params}, x, bench.backend, method="logits")
    )


def _draw(bench: Bench) -> Callable[..., Any]:
    model: Any = Llama(bench.config)

    def run(params: Any, hidden: Array, small: Array) -> Any:
        rows = hidden.shape[0]
        settings = replace(greedy_sampling(rows), temperature=jnp.ones(rows, jnp.float32))
        drawn = DrawInput(hidden=hidden, token_ids=small, positions=small)
        return device_step.draw(model, params, drawn, settings, backend=bench.backend)

    return jax.jit(run)


def scattered_step(rows: int, context: int, most: int, *, block_size: int) -> StepInput:
    """Rows whose new token is the last of `context`; each has blocks of its own, scattered.

    most: tokens that a row's blocks hold.
    """
    width = -(-most // block_size)
    order = np.random.default_rng(0).permutation(rows * width) + 1
    tables = [order[i * width : (i + 1) * width].tolist() for i in range(rows)]
    return decode_input([5 + i for i in range(rows)], [context - 1] * rows, tables, block_size)
