"""The only stateful device object: parameters, the pool, the programs, the last draws.

`dispatch` starts a step and returns at once; `read` waits for it. What a step drew stays on the
device and feeds the next one, so a step can be dispatched before the last one is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.stages import Lowered

from jaxpage.config import CacheConfig, EngineConfig, ModelConfig
from jaxpage.device import step as device_step
from jaxpage.device.kv_cache import init_cache
from jaxpage.device.ops import Adapters, Backend, Model
from jaxpage.device.placement import WHOLE, Placement
from jaxpage.device.types import DrawInput, KVCache, SamplingInput, StepShape, unpack
from jaxpage.engine.batch import StepInputBuilder, draw_entries, prompt_targets, to_result
from jaxpage.engine.faults import StepFault
from jaxpage.engine.programs import Programs, Report
from jaxpage.engine.sampling_inputs import STAGES, SamplingBuilder, Stage
from jaxpage.engine.step_shapes import StepShapes
from jaxpage.engine.swap import BlockMover
from jaxpage.errors import ConfigError, JaxpageError
from jaxpage.host.ladder import cut_to_rung
from jaxpage.host.plan import PlannedRow, StepPlan, StepResult
from jaxpage.models.params import check_adapters, check_same_form, checked_params
from jaxpage.reading import reason
from jaxpage.sampling_params import MAX_LOGPROBS

Leaves = list[Any]
_FROM_VALUES = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""What NumPy and JAX raise for a value that they can't take."""
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
    prompt_logprobs: tuple[Array, Array, Array] | None
    """As `step.prompt_logprobs` returns them, where a row asked for them."""
    latest: Array
    """[3, R0] int32, as `pack_draws` makes it, R0 the most draws of a step: what this step drew, or
    the last one that drew. It feeds the next step."""


class PoolState(NamedTuple):
    """The KV cache, and how far it has come: replaced as one, so that the two always agree."""

    leaves: Leaves
    moved: StepPlan | None = None
    """The last plan whose block moves are done: they must not be done twice."""


class Runner:
    """Runs plans on the device. One thread only; at most two steps in flight.

    The pool is lost if something is raised after a program has taken it and before its result is
    kept. The next `dispatch` then raises a StepFault, and the first plan made after that gets a new
    pool.

    The forward and draw programs take lists of leaves instead of trees: JAX walks every argument at
    every call, and a list is faster.
    """

    def __init__(
        self,
        model: Model,
        params: dict[str, Any],
        *,
        config: ModelConfig,
        cache: CacheConfig,
        engine: EngineConfig,
        backend: Backend,
        num_token_ids: int,
        placement: Placement | None = None,
        stages: tuple[Stage, ...] = STAGES,
        adapters: Adapters | None = None,
        report: Report | None = None,
    ) -> None:
        """`num_token_ids`: ids from there on are padding of the vocabulary, never drawn.

        Without a `placement` everything lies on JAX's default device. `stages` are those of the
        sampler. `adapters`: what the rows' adapter numbers count.
        """
        self.config = config
        self.limits = engine
        self.cache_config = cache
        self._backend = backend
        self._placement = placement or Placement()
        self._model = model
        self._take(params)
        self._params_tree = jax.tree.structure(self.params)
        self.programs = Programs(report=report, terms=self._placement.terms)
        self.shapes = StepShapes.of(engine, cache, backend, has_adapters=adapters is not None)
        self._num_token_ids = num_token_ids
        self._max_draws = engine.max_num_seqs
        self._init_cache = partial(
            init_cache, config, num_blocks=cache.num_blocks, block_size=cache.block_size
        )
        pool = self._new_pool()
        leaves, self._cache_tree = jax.tree.flatten(pool)
        self._pool = PoolState(leaves)
        self._refused: StepPlan | None = None
        """The plan that found the pool lost; any other was made knowing it."""
        self._is_closed = False
        self._head_tree = jax.tree.structure({name: self.params[name] for name in model.head})
        if adapters is not None:
            check_adapters(adapters, config)
        self._adapters = self._placement.put(adapters)
        self._nothing_drawn = self._placement.put(np.zeros((3, self._max_draws), np.int32))
        self._last: Ticket | None = None
        self._stages = tuple(stage.apply for stage in stages)
        self._inputs = StepInputBuilder(self.shapes, cache)
        self._mover = BlockMover(
            self.programs, pool, self._placement, num_swap_blocks=cache.num_swap_blocks
        )
        self._sampling = SamplingBuilder(engine, config.vocab_size, self._placement, stages)

    @jax.disable_jit(False)  # which forbids calls of what was compiled ahead of time
    def dispatch(self, plan: StepPlan) -> Ticket:
        """Starts a step and returns without waiting for it.

        Until it returns, nothing has changed but the plan's own slots, which a second try writes
        again; a plan that was dispatched before gets its ticket. Raises StepFault for requests that
        can't be run, and when the pool was lost.
        """
        self.check_open()
        if self._last is not None and self._last.plan is plan:
            return self._last
        if any(leaf.is_deleted() for leaf in self._cache):
            self._renew_pool(plan)
        with self._blaming(plan):
            ticket = self._last = self._run(plan)
        return ticket

    def read(self, ticket: Ticket) -> StepResult:
        """Waits for a step and returns what it drew; StepFault where its memory ran out."""
        with self._blaming(ticket.plan):
            arrays = jax.device_get((ticket.drawn, ticket.top, ticket.prompt_logprobs))
            return to_result(ticket.plan, ticket.shape, *arrays)

    def expect(self, *, num_requests: int, prompt_tokens: int) -> None:
        """Starts compiling what a batch of requests will need first."""
        self.check_open()
        ladder = self.shapes.prefill_tokens
        first = cut_to_rung(min(max(1, prompt_tokens), ladder.sizes[-1]), ladder)
        prefill = self.shapes.prefill(first)
        rows = min(max(1, num_requests), self.shapes.decode_rows.sizes[-1])
        for shape in (prefill, self.shapes.decode(rows)):
            self.programs.expect(shape, _name(shape), partial(self._lower_forward, shape))

    def update_params(self, params: dict[str, Any]) -> None:
        """Swaps the weights; the programs stay. Raises ConfigError that names a leaf which differs,
        in its form too: an array, or quantised.

        Where it raises, the old weights stay.
        """
        self._take(params, before=self.params)

    @property
    def num_adapters(self) -> int:
        """Adapters that rows may have: 1 .. num_adapters."""
        counts = (leaf.shape[0] for leaf in jax.tree.leaves(self._adapters))  # all the same
        return next(counts, 1) - 1

    def check_open(self) -> None:
        """ConfigError after `close`."""
        if self._is_closed:
            raise ConfigError("got a call after close(), wanted an open LLM; build a new one")

    def close(self) -> None:
        """Frees the pool and the programs."""
        self._is_closed = True
        self.programs.close()
        self._drop_pool()

    def _take(self, params: dict[str, Any], *, before: dict[str, Any] | None = None) -> None:
        """Puts the weights on the engine's device: jax arrays that are there already stay, NumPy
        arrays are copied, since the caller may go on writing to them."""
        with self._placement.terms():
            params = jax.tree.map(_own, checked_params(params, self.config))
        if before is not None:
            check_same_form(params, before)
        # once, not with every step; also from pinned memory of the host
        self.params = self._placement.put_params(params)
        self._weights = jax.tree.leaves(self.params)
        self._head = jax.tree.leaves({name: self.params[name] for name in self._model.head})

    def _run(self, plan: StepPlan) -> Ticket:
        vector, shape = self._inputs.build(plan)
        program = self._forward_program(shape)
        self._move_blocks(plan)
        previous = self._nothing_drawn if self._last is None else self._last.latest
        leaves, draw_input, hidden = program(
            self._weights, self._cache, self._placement.put(vector), previous, self._adapters
        )
        self._pool = PoolState(leaves, self._pool.moved)
        drawn = top = None
        if draws := plan.draws:
            num_draws = self.shapes.num_draws(shape, len(draws))
            index = draw_entries(plan, shape, num_draws)
            if index is not None:
                program = self._spread_program(draw_input, num_draws)
                draw_input = program(draw_input, self._placement.put(index))
            sampling, num_top = self._sampling.build(draws, num_draws)
            program = self._draw_program(draw_input, sampling, num_draws, num_top)
            drawn, top = program(self._head, draw_input, sampling)
        targets = prompt_targets(plan, shape)
        logprobs = None if targets is None else self._prompt_logprobs(hidden, targets)
        return Ticket(plan, shape, drawn, top, logprobs, previous if drawn is None else drawn)

    def _move_blocks(self, plan: StepPlan) -> None:
        leaves, moved = self._pool
        if plan.moves and plan is not moved:
            self._mover.prepare(plan.moves)
            cache = self._mover.apply(self._cache_tree.unflatten(leaves), plan.moves)
            self._pool = PoolState(jax.tree.leaves(cache), plan)

    @property
    def _cache(self) -> Leaves:
        """The pool's arrays as they are now."""
        return self._pool.leaves

    @contextmanager
    def _blaming(self, plan: StepPlan) -> Iterator[None]:
        """Turns an error that a plan's requests caused into a StepFault that names them."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            self._drop_pool()  # what the device left unfinished can't be told from what it did
            self._check_params(error)
            if not _is_memory(error):
                raise
            raise StepFault(
                f"got no memory for a step of this request ({reason(error)}), wanted room beside "
                "the pool; lower num_blocks or max_num_batched_tokens",
                [row.seq_id for row in plan.rows],
            ) from error
        except _FROM_VALUES as error:
            self._check_params(error)
            seq_ids = [row.seq_id for row in plan.rows if not self._can_build(row)]
            if isinstance(error, JaxpageError) or not seq_ids:
                raise
            raise StepFault(
                f"got settings that no step can hold ({reason(error)}), wanted values that the "
                "device's integers and floats hold; change them",
                seq_ids,
            ) from error

    def _check_params(self, error: Exception) -> None:
        """ConfigError if the weights are gone: donated by a trainer, or deleted."""
        if any(leaf.is_deleted() for leaf in self._weights):
            raise ConfigError(
                "got params that have been donated or deleted since, wanted them to stay; call "
                "update_params with those that are served now"
            ) from error

    def _can_build(self, row: PlannedRow) -> bool:
        """Whether a row can be put into arrays, by itself."""
        alone = row._replace(source=None, token_ids=row.token_ids or (0,))
        is_single = row.num_tokens == 1 and not row.prompt_targets
        plan = StepPlan(0, (alone,), num_single=int(is_single))
        try:
            self._inputs.build(plan)
            if row.draws:
                self._sampling.build(row.draws, len(row.draws))
        except _FROM_VALUES:
            return False
        return True

    def _new_pool(self) -> KVCache:
        return self._placement.put_pool(self._init_cache)

    def _renew_pool(self, plan: StepPlan) -> None:
        """Refuses the plan that counts on the lost pool; makes a new pool for the next plan."""
        if self._refused is None or self._refused is plan:
            self._refused = plan
            raise StepFault("got a pool that an interrupted step has lost")
        self._drop_pool()  # before the new one is made: there may be no room for both
        self._pool = PoolState(jax.tree.leaves(self._new_pool()))
        self._refused = None

    def _drop_pool(self) -> None:
        """Deletes what steps have left on the device: arrays of a failed step only fail again."""
        for leaf in self._cache:
            leaf.delete()
        self._last = None
        self._mover.forget()

    def _prompt_logprobs(self, hidden: Array, targets: np.ndarray) -> tuple[Array, Array, Array]:
        key = ("prompt_logprobs", targets.size)
        program = self.programs.get(
            key,
            f"prompt log-probabilities of {targets.size}",
            partial(self._lower_prompt_logprobs, hidden),
        )
        return program(self._head, hidden, self._placement.put(targets))

    def _forward_program(self, shape: StepShape) -> Any:
        return self.programs.get(shape, _name(shape), partial(self._lower_forward, shape))

    def _draw_program(
        self, draw: DrawInput, sampling: SamplingInput, num_draws: int, num_top: int
    ) -> Any:
        key = ("draw", num_draws, num_top, tuple(map(_form, sampling.states)))
        lower = partial(self._lower_draw, draw, sampling, num_top)
        return self.programs.get(key, f"sampling of {num_draws}", lower)

    def _spread_program(self, draw: DrawInput, num_draws: int) -> Any:
        """The program that copies entries to draws: a row may have several draws, or none."""

        def lower() -> Lowered:
            index = self._placement.shape((num_draws,), jnp.int32)
            spread = jax.jit(device_step.spread_draws, **self._placement.outputs(WHOLE))
            return spread.lower(self._placement.shapes(draw), index)

        count = draw.token_ids.size
        name = f"{num_draws} draws of {count} rows"
        return self.programs.get(("spread", count, num_draws), name, lower)

    def _lower_forward(self, shape: StepShape) -> Lowered:
        def forward(
            weights: Leaves, leaves: Leaves, vector: Array, previous: Array, adapters: Any
        ) -> Any:
            cache, draw_input, hidden = device_step.hidden_step(
                self._model,
                self._params_tree.unflatten(weights),
                self._cache_tree.unflatten(leaves),
                unpack(vector, shape),
                previous[0],
                backend=self._backend,
                adapters=adapters,
            )
            return jax.tree.leaves(cache), draw_input, hidden

        shapes = self._placement.shapes
        fixed = shapes((self._weights, self._cache))
        vector = self._placement.shape((shape.packed_size,), jnp.int32)
        rest = shapes((self._nothing_drawn, self._adapters))
        where = self._placement.outputs((self._placement.pool, WHOLE, WHOLE))
        return jax.jit(forward, donate_argnums=1, **where).lower(*fixed, vector, *rest)

    def _lower_draw(self, draw: DrawInput, sampling: SamplingInput, num_top: int) -> Lowered:
        def run(head: Leaves, draw: DrawInput, sampling: SamplingInput) -> Any:
            output = device_step.draw(
                self._model,
                self._head_tree.unflatten(head),
                draw,
                sampling,
                backend=self._backend,
                stages=self._stages,
                num_top=num_top,
                num_token_ids=self._num_token_ids,
            )
            # as bits: a -inf, where too few alternatives are left, would trip jax_debug_infs
            bits = lax.bitcast_convert_type(output.top_logprobs, jnp.int32)
            top = (output.top_ids, bits) if num_top else None
            return device_step.pack_draws(output, self._max_draws), top

        given = self._placement.shapes((self._head, draw, sampling))
        return jax.jit(run, **self._placement.outputs(WHOLE)).lower(*given)

    def _lower_prompt_logprobs(self, hidden: Array) -> Lowered:
        def run(head: Leaves, hidden: Array, targets: Array) -> Any:
            return device_step.prompt_logprobs(
                self._model,
                self._head_tree.unflatten(head),
                hidden,
                targets,
                backend=self._backend,
                num_top=MAX_LOGPROBS,
                slice_rows=min(PROMPT_SLICE_TOKENS, targets.size),
                num_token_ids=self._num_token_ids,
            )

        targets = self._placement.shape(hidden.shape[:1], jnp.int32)
        given = self._placement.shapes((self._head, hidden))
        return jax.jit(run, **self._placement.outputs(WHOLE)).lower(*given, targets)


def _form(state: Any) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of a stage's state, which a program is compiled for; None: no draw asks for it."""
    return None if state is None else tuple(leaf.shape for leaf in jax.tree.leaves(state))


def _own(leaf: Array | np.ndarray) -> Array | np.ndarray:
    """A leaf whose memory is ours: JAX may read a NumPy array late, or go on using its memory."""
    return leaf if isinstance(leaf, Array) else np.array(leaf)


def _name(shape: StepShape) -> str:
    if 0 < shape.num_single < shape.num_rows:
        tokens = shape.num_tokens - shape.num_single
        return f"prefill of {tokens} beside decode of {shape.num_single}"
    kind = "decode" if shape.is_decode else "prefill"
    return f"{kind} of {shape.num_tokens}" + (" with shared blocks" if shape.num_groups else "")


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
