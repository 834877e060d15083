"""From options to an engine: the one place that knows which parts there are."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from jaxpage.config import DEFAULT_MODEL, ModelConfig
from jaxpage.device.ops import Adapters
from jaxpage.device.placement import Placement
from jaxpage.engine import compile_cache
from jaxpage.engine.engine import LLMEngine
from jaxpage.engine.options import EngineOptions
from jaxpage.engine.programs import Report
from jaxpage.engine.requests import RequestFactory
from jaxpage.engine.runner import Runner
from jaxpage.engine.sampling_inputs import STAGES, Stage
from jaxpage.engine.sizing import preemption_costs, size_pool
from jaxpage.errors import ConfigError
from jaxpage.host.scheduler import Scheduler
from jaxpage.models.registry import build_model
from jaxpage.tokenizer import Tokenizer, as_tokenizer


def build(
    options: EngineOptions | None = None,
    *,
    model: str | Path = DEFAULT_MODEL,
    config: ModelConfig | None = None,
    params: dict[str, Any] | None = None,
    tokenizer: object | None = None,
    placement: Placement | None = None,
    stages: tuple[Stage, ...] = STAGES,
    adapters: Adapters | None = None,
    report: Report | None = None,
) -> LLMEngine:
    """The engine of a model by name or path, or of `config` and `params` that the caller has.

    `tokenizer`, whatever `as_tokenizer` takes, replaces the model's. `placement`, `stages` and
    `adapters` are as for Runner; `report` is called with each program's name and the seconds it
    took to compile, from another thread. Raises ConfigError, CapacityError or CheckpointError.
    """
    options = (options or EngineOptions()).checked()
    compile_cache.enable()
    if (config is None) != (params is None):
        raise ConfigError("got one of config and params, wanted both or neither; pass both")
    placement = placement or Placement()
    with placement.terms():  # what is chosen and measured is so for its device
        if config is None or params is None:
            config, params, tokenizer = _load(model, options, tokenizer)
        elif options.dtype not in ("auto", config.dtype):
            raise ConfigError(
                f"got dtype={options.dtype!r} beside params of a config that says "
                f"{config.dtype!r}, wanted the same; cast the params or leave dtype out"
            )
        known = None if tokenizer is None else as_tokenizer(tokenizer)
        return _assemble(
            options,
            config,
            params,
            known,
            placement=placement,
            stages=stages,
            adapters=adapters,
            report=report,
        )


def _load(
    model: str | Path, options: EngineOptions, tokenizer: object | None
) -> tuple[ModelConfig, dict[str, Any], object | None]:
    from jaxpage.checkpoint import load

    config, params, loaded = load(model, dtype=options.model_dtype())
    return config, params, loaded if tokenizer is None else tokenizer


def _assemble(
    options: EngineOptions,
    config: ModelConfig,
    params: dict[str, Any],
    tokenizer: Tokenizer | None,
    *,
    placement: Placement,
    stages: tuple[Stage, ...],
    adapters: Adapters | None,
    report: Report | None,
) -> LLMEngine:
    limits = options.engine_config(config)
    cache = size_pool(
        config,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        kv_memory=options.kv_memory,
        most_tokens=limits.max_num_seqs * limits.max_model_len,
        num_swap_blocks=options.num_swap_blocks,
    )
    num_token_ids = config.vocab_size
    if tokenizer is not None:
        num_token_ids = min(num_token_ids, tokenizer.vocab_size)
    runner = Runner(
        build_model(config),
        params,
        config=config,
        cache=cache,
        engine=limits,
        backend=options.backend(),
        num_token_ids=num_token_ids,
        placement=placement,
        stages=stages,
        adapters=adapters,
        report=report,
    )
    scheduler = Scheduler(
        limits,
        cache,
        prefill_ladder=runner.shapes.prefill_tokens,
        costs=preemption_costs(config, runner.params, block_size=cache.block_size),
    )
    requests = RequestFactory(
        tokenizer,
        config,
        num_token_ids=num_token_ids,
        seed=secrets.randbits(64) if options.seed is None else options.seed,
        num_adapters=runner.num_adapters,
    )
    return LLMEngine(runner, scheduler, requests)
