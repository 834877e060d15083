"""Trains the tiny model and writes tests/tiny/model: `python -m tests.tiny.train`.

Needs optax, which nothing else here does. A few minutes on two cores. The text and the tokenizer
come out the same everywhere; weights differ in their last bits between machines, so the golden
files are made anew after a training (`python -m tests.tiny.make_golden`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.tree_util import register_dataclass

from jaxpage.backends.own_attention import OwnAttention
from jaxpage.config import ModelConfig
from jaxpage.device.ops import Ops
from jaxpage.device.types import LayerKV, StepInput
from jaxpage.models.registry import build_model, init_params
from tests.tiny import MODEL_DIR
from tests.tiny.export import write_folder
from tests.tiny.text import documents
from tests.tiny.tokenizer import VOCAB_SIZE, load_tokenizer, train_tokenizer

CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=160,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_ids=(2,),
)
TEXT_SEED, HELD_OUT_SEED = 1, 2
SHAPES = ((24, 128), (24, 128), (24, 128), (8, 384))
"""(rows, tokens a row) of the batches, in turn: attention costs tokens squared, and most documents
are short. A document is cut where its row ends."""
PEAK_RATE = 4e-3


@register_dataclass
@dataclass(frozen=True)
class TrainStep:
    """R rows of packed documents, flat: what the model and `dense_attention` read of a step."""

    tokens: Array  # [T] int32
    positions: Array  # [T] int32, from 0 in every document
    documents: Array  # [T] int32, which document of its row a token is of
    targets: Array  # [T] int32, the next token
    weights: Array  # [T] float32, 0 where the next token is of another document
    query_starts: Array  # [R + 1] int32
    prompt_lens: Array  # [R] int32; for dynamic rope scaling alone


def main() -> None:
    """Trains, reports loss and time, writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = options.out / "tokenizer.model"
    train_tokenizer(tokenizer, seed=TEXT_SEED)
    start = time.monotonic()
    params = train(tokenizer, options.steps)
    seconds = time.monotonic() - start
    held_out = batches(tokenizer, HELD_OUT_SEED)
    loss = np.mean([loss_of(params, next(held_out)) for _ in range(8)])
    print(f"held-out loss {loss:.4f} nats a token, {seconds:.0f} s")
    write_folder(options.out, CONFIG, params, tokenizer)


def train(tokenizer: Path, steps: int) -> dict[str, Any]:
    """Parameters after `steps` steps of AdamW, warmed up and decayed to zero."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, 100, steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    )

    @jax.jit
    def update(params: Any, state: Any, batch: TrainStep) -> tuple[Any, Any, Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss

    params = init_params(CONFIG, 0)
    state = optimizer.init(params)
    source = batches(tokenizer, TEXT_SEED)
    for step in range(steps):
        params, state, loss = update(params, state, next(source))
        if step % 200 == 0:
            print(f"step {step}: loss {float(loss):.4f}", flush=True)
    return params


@jax.jit
def loss_of(params: Any, batch: TrainStep) -> Array:
    """Mean cross entropy in nats of the tokens that have a weight."""
    model = build_model(CONFIG)
    bound = model.bind({"params": params})
    none = jnp.zeros(0, jnp.int32)  # of what only a cache needs
    step = StepInput(
        batch.tokens, batch.positions, none, none, none, batch.query_starts, none,
        batch.prompt_lens, none,
    )  # fmt: skip
    backend = OwnAttention(function=partial(dense_attention, batch))
    ops = Ops.of(step, backend)
    cache = (LayerKV(none, none),) * CONFIG.num_layers
    hidden, _ = bound(batch.tokens, batch.positions, cache, ops)
    logits = bound.logits(hidden, backend)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)


def dense_attention(
    batch: TrainStep, q: Array, k: Array, v: Array, layer_kv: Any, *_: Any
) -> tuple[Array, Any]:
    """Causal softmax attention inside each document; no cache. q [T, N, H], k and v [T, K, H]."""
    num_rows = batch.prompt_lens.shape[0]
    rows = (num_rows, q.shape[0] // num_rows)
    q = q.reshape(*rows, CONFIG.num_kv_heads, CONFIG.group_size, CONFIG.head_dim)
    k, v = (x.reshape(*rows, CONFIG.num_kv_heads, CONFIG.head_dim) for x in (k, v))
    order = jnp.arange(rows[1], dtype=jnp.int32)
    document = batch.documents.reshape(rows)
    seen = (order[:, None] >= order[None, :])[None] & (document[:, :, None] == document[:, None, :])
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k) * jnp.float32(CONFIG.head_dim**-0.5)
    scores = jnp.where(seen[:, None, None], scores, jnp.float32(-1e30))
    out = jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(scores), v)
    return out.reshape(-1, CONFIG.num_heads, CONFIG.head_dim), layer_kv


def batches(tokenizer: Path, seed: int) -> Iterator[TrainStep]:
    """An endless stream of batches of packed documents."""
    source = _marked(tokenizer, seed)
    for num_rows, row_tokens in cycle(SHAPES):
        rows = [_row(source, row_tokens) for _ in range(num_rows)]
        tokens, positions, ids = (np.array(part, np.int32) for part in zip(*rows, strict=True))
        weights = (ids[:, 1:] == ids[:, :-1]).astype(np.float32)
        yield TrainStep(
            tokens=jnp.asarray(tokens[:, :-1].reshape(-1)),
            positions=jnp.asarray(positions[:, :-1].reshape(-1)),
            documents=jnp.asarray(ids[:, :-1].reshape(-1)),
            targets=jnp.asarray(tokens[:, 1:].reshape(-1)),
            weights=jnp.asarray(weights.reshape(-1)),
            query_starts=jnp.arange(num_rows + 1, dtype=jnp.int32) * row_tokens,
            prompt_lens=jnp.full(num_rows, row_tokens, jnp.int32),
        )


def _row(source: Iterator[list[int]], row_tokens: int) -> tuple[list[int], list[int], list[int]]:
    """Whole documents, the last one cut: tokens, positions and numbers, row_tokens + 1 of each."""
    tokens: list[int] = []
    positions: list[int] = []
    ids: list[int] = []
    for number, document in enumerate(source):
        tokens += document
        positions += range(len(document))
        ids += [number] * len(document)
        if len(tokens) > row_tokens:
            break
    size = row_tokens + 1
    return tokens[:size], positions[:size], ids[:size]


def _marked(tokenizer: Path, seed: int) -> Iterator[list[int]]:
    """Token ids of documents, from begin mark to end mark."""
    pieces = load_tokenizer(tokenizer)
    for text in documents(seed):
        yield [pieces.bos_id(), *pieces.encode(text), pieces.eos_id()]


if __name__ == "__main__":
    main()
