"""What is refused at submission, with the arithmetic. Knows the limits, not what is running."""

from __future__ import annotations

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.errors import CapacityError, ConfigError, PromptCapacityError, RequestError
from jaxpage.host.plan import Request
from jaxpage.host.sequence import Sequence


def check_request(request: Request, config: EngineConfig, cache: CacheConfig) -> None:
    """Raises ConfigError, RequestError or PromptCapacityError when it can never run."""
    params = request.params
    if params.num_sequences > 1:
        raise ConfigError(
            f"got n={params.n}, best_of={params.best_of}, wanted 1: several completions of one "
            "prompt come with a later version; submit the prompt once for each"
        )
    if request.priority != 0:
        raise ConfigError(
            f"got priority={request.priority}, wanted 0: priorities come with a later version; "
            "leave it out"
        )
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise RequestError("got an empty prompt, wanted at least one token; give the prompt a BOS")
    num_drawn = min(1, _most_output(request, config))
    if num_prompt + num_drawn > config.max_model_len:
        raise RequestError(
            f"got a prompt of {num_prompt} tokens, wanted at most max_model_len="
            f"{config.max_model_len} less {num_drawn} for output; shorten it or raise max_model_len"
        )
    _check_pool(num_prompt, _most_output(request, config), cache)


def length_limit(request: Request, config: EngineConfig) -> int:
    """Tokens, prompt included, at which a sequence of this request ends by length."""
    return min(config.max_model_len, len(request.prompt_token_ids) + _most_output(request, config))


def outgrown(sequence: Sequence, cache: CacheConfig) -> CapacityError:
    """What a sequence is told that needs more than the whole pool."""
    need = cache.blocks_for(sequence.num_tokens)
    return CapacityError(
        f"got a sequence of {sequence.num_tokens} tokens that needs {need} blocks of "
        f"{cache.block_size}, wanted at most the pool's {cache.num_blocks}; "
        "lower max_tokens or raise num_blocks"
    )


def _most_output(request: Request, config: EngineConfig) -> int:
    limit = request.params.max_tokens
    return config.max_model_len if limit is None else limit


def _check_pool(num_prompt: int, most_output: int, cache: CacheConfig) -> None:
    """The last token drawn is never stored, and a prompt that is only scored stores one less."""
    num_stored = num_prompt + min(most_output, 2) - 1
    need = cache.blocks_for(num_stored)
    if need > cache.num_blocks:
        raise PromptCapacityError(
            f"got a prompt of {num_prompt} tokens that needs {need} blocks of {cache.block_size} "
            f"({num_stored} slots) to begin, wanted at most the pool's {cache.num_blocks}; "
            "shorten it or raise num_blocks"
        )
