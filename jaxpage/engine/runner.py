"""The only stateful device object: parameters, the pool, the programs, the last draws.

`dispatch` starts a step and returns at once; `read` waits for it. What a step drew stays on the
device and feeds the next one, so a step can be dispatched before the last one is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.stages import Lowered

from jaxpage import native
from jaxpage.config import CacheConfig, EngineConfig, ModelConfig
from jaxpage.device import step as device_step
from jaxpage.device.attention import make_attention
from jaxpage.device.kv_cache import init_cache
from jaxpage.device.sampling import summarise
from jaxpage.device.types import DrawInput, SamplingInput, StepShape, unpack
from jaxpage.engine.batch import StepInputBuilder, draw_rows, prompt_targets, to_result
from jaxpage.engine.block_moves import BlockMover
from jaxpage.engine.huge_pages import renew_zeros, use_huge_pages
from jaxpage.engine.ladders import Ladders
from jaxpage.engine.programs import Programs, Report, places_read, shape_tree
from jaxpage.engine.sampling_batch import SamplingBuilder
from jaxpage.errors import ConfigError
from jaxpage.host.buckets import cut_to_rung
from jaxpage.host.plan import StepPlan, StepResult
from jaxpage.models.params import checked_params
from jaxpage.sampling_params import MAX_LOGPROBS
from jaxpage.terms import default_device, engine_terms

Leaves = list[Any]
PROMPT_SLICE_TOKENS = 64
"""Prompt tokens whose logits are held at once while log-probabilities are computed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A dispatched step: device arrays that will hold its outcome."""

    plan: StepPlan
    shape: StepShape
    drawn: Array | None
    """As `pack_draws` makes it; None: no row of the step drew a token."""
    top: tuple[Array, Array] | None
    """Ids and log-probabilities, as bits, of the alternatives, where a draw asked for some."""
    scored: tuple[Array, Array, Array] | None
    """Prompt log-probabilities, where a row asked for them."""


class Runner:
    """Runs plans on the device. One thread only; at most two steps in flight.

    Forward and draw take the leaves of what is a tree elsewhere: JAX walks every argument at every
    call, and a list sooner than a tree.
    """

    def __init__(
        self,
        model: Any,
        params: dict[str, Any],
        *,
        config: ModelConfig,
        cache: CacheConfig,
        engine: EngineConfig,
        num_token_ids: int,
        report: Report | None = None,
    ) -> None:
        self._config = config
        device = default_device()
        self._put = partial(jax.device_put, device=device)
        self._terms = partial(engine_terms, device)
        self._take(params)
        self._params_tree = jax.tree.structure(self.params)
        self.programs = Programs(report=report, terms=self._terms)
        self.ladders = Ladders.of(engine, cache)
        self._model = model
        self._num_token_ids = num_token_ids
        self._max_draws = engine.max_num_seqs
        with self._terms():
            pool = init_cache(config, num_blocks=cache.num_blocks, block_size=cache.block_size)
            hidden = jax.ShapeDtypeStruct((1, config.hidden_size), config.dtype)
            self._head = self._find_head(hidden)
        pool = self._put(pool)
        renew_zeros(pool)
        self._cache, self._cache_tree = jax.tree.flatten(pool)
        self._previous = self._put(np.zeros((3, self._max_draws), np.int32))
        self._attention = make_attention(
            engine.attention,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_window,
            shares_prefixes=engine.shared_prefix_decode,
        )
        self._inputs = StepInputBuilder(self.ladders, cache)
        self._mover = BlockMover(
            self.programs, pool, num_swap_blocks=cache.num_swap_blocks, put=self._put
        )
        self._moved: StepPlan | None = None
        """The last plan whose block moves are done: they must not be done twice."""
        self._sampling = SamplingBuilder(engine, config.vocab_size, put=self._put)
        self._summarise = native.summarise if engine.attention == "native" else summarise

    @jax.disable_jit(False)  # which forbids calls of what was compiled ahead of time
    def dispatch(self, plan: StepPlan) -> Ticket:
        """Starts a step and returns without waiting for it.

        Until it returns nothing has changed but the plan's own slots, which it would write again.
        """
        self.check_open()
        vector, shape = self._inputs.build(plan)
        program = self._forward_program(shape)
        self._move_blocks(plan)
        self._cache, draw_input, hidden = program(
            self._weights, self._cache, self._put(vector), self._previous
        )
        drawn = top = None
        if draws := plan.draws:
            num_draws = self.ladders.num_draws(shape, len(draws))
            index = draw_rows(plan, shape, num_draws)
            if index is not None:
                program = self._spread_program(draw_input, num_draws)
                draw_input = program(draw_input, self._put(index))
            sampling, num_top = self._sampling.build(draws, num_draws)
            program = self._draw_program(draw_input, sampling, num_draws, num_top)
            head = [self._weights[place] for place in self._head]
            drawn, top = program(head, draw_input, sampling)
        targets = prompt_targets(plan, shape)
        scored = None if targets is None else self._score(hidden, targets)
        if drawn is not None:
            self._previous = drawn
        return Ticket(plan, shape, drawn, top, scored)

    def read(self, ticket: Ticket) -> StepResult:
        """Waits for a step and returns what it drew."""
        arrays = jax.device_get((ticket.drawn, ticket.top, ticket.scored))
        return to_result(ticket.plan, ticket.shape, *arrays)

    def expect(self, *, num_requests: int, prompt_tokens: int) -> None:
        """Starts compiling what a batch of requests will need first."""
        ladder = self.ladders.prefill_tokens
        first = cut_to_rung(min(max(1, prompt_tokens), ladder.sizes[-1]), ladder)
        prefill = self.ladders.prefill(first)
        rows = min(max(1, num_requests), self.ladders.decode_rows.sizes[-1])
        for shape in (prefill, self.ladders.decode(rows)):
            self.programs.expect(shape, _name(shape), partial(self._lower_forward, shape))

    def update_params(self, params: dict[str, Any]) -> None:
        """Swaps the weights; the programs stay. Raises ConfigError that names a leaf which differs.

        Where it raises, the old weights stay.
        """
        self._take(params)

    def check_open(self) -> None:
        """ConfigError after `close`."""
        if self._cache[0].is_deleted():
            raise ConfigError("got a call after close(), wanted an open LLM; build a new one")

    def close(self) -> None:
        """Frees the pool and the programs."""
        self.programs.close()
        for leaf in self._cache:
            leaf.delete()

    def _take(self, params: dict[str, Any]) -> None:
        """Weights on the engine's device: jax arrays as they are where they lie there already,
        NumPy ones copied, since their owner may go on writing to them."""
        with self._terms():
            params = jax.tree.map(_own, checked_params(params, self._config))
        self.params = self._put(params)  # once, not with every step
        self._weights = jax.tree.leaves(self.params)
        use_huge_pages(self._weights)

    def _move_blocks(self, plan: StepPlan) -> None:
        if plan.moves and plan is not self._moved:
            self._mover.prepare(plan.moves)
            pool = self._mover.apply(self._cache_tree.unflatten(self._cache), plan.moves)
            self._cache = jax.tree.leaves(pool)
            self._moved = plan

    def _score(self, hidden: Array, targets: np.ndarray) -> tuple[Array, Array, Array]:
        key = ("score", targets.size)
        program = self.programs.get(
            key, f"prompt log-probabilities of {targets.size}", partial(self._lower_score, hidden)
        )
        return program(self.params, hidden, self._put(targets))

    def _forward_program(self, shape: StepShape) -> Any:
        return self.programs.get(shape, _name(shape), partial(self._lower_forward, shape))

    def _draw_program(
        self, draw: DrawInput, sampling: SamplingInput, num_draws: int, num_top: int
    ) -> Any:
        history = sampling.history
        history_width = None if history is None else history.tokens.shape[1]
        key = ("draw", num_draws, num_top, sampling.edits is not None, history_width)
        lower = partial(self._lower_draw, draw, sampling, num_top)
        return self.programs.get(key, f"sampling of {num_draws}", lower)

    def _spread_program(self, draw: DrawInput, num_draws: int) -> Any:
        """Several draws of one row, or rows that draw nothing between."""

        def lower() -> Lowered:
            index = jax.ShapeDtypeStruct((num_draws,), jnp.int32)
            return jax.jit(device_step.spread_draws).lower(shape_tree(draw), index)

        count = draw.token_ids.size
        name = f"{num_draws} draws of {count} rows"
        return self.programs.get(("spread", count, num_draws), name, lower)

    def _lower_forward(self, shape: StepShape) -> Lowered:
        def forward(weights: Leaves, leaves: Leaves, vector: Array, previous: Array) -> Any:
            params = self._params_tree.unflatten(weights)
            cache, draw_input, hidden = device_step.hidden_step(
                self._model,
                params,
                self._cache_tree.unflatten(leaves),
                unpack(vector, shape),
                previous[0],
                attention=self._attention,
            )
            return jax.tree.leaves(cache), draw_input, hidden

        vector = jax.ShapeDtypeStruct((shape.packed_size,), jnp.int32)
        fixed = shape_tree((self._weights, self._cache))
        previous = shape_tree(self._previous)
        return jax.jit(forward, donate_argnums=1).lower(*fixed, vector, previous)

    def _find_head(self, hidden: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """The places among the weights of those that logits are made with."""

        def logits(weights: Leaves, hidden: Array) -> Array:
            params = self._params_tree.unflatten(weights)
            return self._model.apply({"params": params}, hidden, method="logits")

        return places_read(logits, shape_tree(self._weights), hidden)

    def _lower_draw(self, draw: DrawInput, sampling: SamplingInput, num_top: int) -> Lowered:
        def run(head: Leaves, draw: DrawInput, sampling: SamplingInput) -> Any:
            weights = shape_tree(self._weights)  # shapes stand for what is not read
            for place, leaf in zip(self._head, head, strict=True):
                weights[place] = leaf
            output = device_step.draw(
                self._model,
                self._params_tree.unflatten(weights),
                draw,
                sampling,
                num_top=num_top,
                num_token_ids=self._num_token_ids,
                summarise=self._summarise,
            )
            # as bits: -inf, what no alternative is left for, is no mistake for jax_debug_infs
            bits = lax.bitcast_convert_type(output.top_logprobs, jnp.int32)
            top = (output.top_ids, bits) if num_top else None
            return device_step.pack_draws(output, self._max_draws), top

        head = [self._weights[place] for place in self._head]
        return jax.jit(run).lower(*shape_tree((head, draw, sampling)))

    def _lower_score(self, hidden: Array) -> Lowered:
        def run(params: Any, hidden: Array, targets: Array) -> Any:
            return device_step.prompt_logprobs(
                self._model,
                params,
                hidden,
                targets,
                num_top=MAX_LOGPROBS,
                slice_rows=min(PROMPT_SLICE_TOKENS, targets.size),
                num_token_ids=self._num_token_ids,
            )

        targets = jax.ShapeDtypeStruct(hidden.shape[:1], jnp.int32)
        return jax.jit(run).lower(*shape_tree((self.params, hidden)), targets)


def _own(leaf: Array | np.ndarray) -> Array | np.ndarray:
    """JAX reads NumPy's memory later than it says, or for good."""
    return leaf if isinstance(leaf, Array) else np.array(leaf)


def _name(shape: StepShape) -> str:
    if shape.num_decode_rows:
        tokens = shape.num_tokens - shape.num_decode_rows
        return f"prefill of {tokens} beside decode of {shape.num_decode_rows}"
    kind = "decode" if shape.is_decode else "prefill"
    return f"{kind} of {shape.num_tokens}" + (" with shared blocks" if shape.num_groups else "")
