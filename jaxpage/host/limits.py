"""What can never run, with the arithmetic. Knows the limits, not what is running."""

from __future__ import annotations

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.errors import CapacityError, PromptCapacityError, RequestError
from jaxpage.host.plan import Request
from jaxpage.host.sequence import SequenceGroup


def check_request(request: Request, config: EngineConfig, cache: CacheConfig) -> None:
    """Raises RequestError or PromptCapacityError when it can never run."""
    num_rows = request.num_sequences
    if num_rows > config.max_num_seqs:
        name = "n or best_of" if request.beam is None else "beam_width"
        raise RequestError(
            f"got {name}={num_rows}, wanted at most max_num_seqs={config.max_num_seqs}, the rows "
            f"of one step; lower {name} or raise max_num_seqs"
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
    _check_pool(request, _most_output(request, config), cache)


def length_limit(request: Request, config: EngineConfig) -> int:
    """Tokens, prompt included, at which a sequence of this request finishes by length."""
    return min(config.max_model_len, len(request.prompt_token_ids) + _most_output(request, config))


def too_large(group: SequenceGroup, cache: CacheConfig) -> CapacityError:
    """The error of a running request that needs more than the whole pool."""
    num_tokens = max(sequence.num_tokens for sequence in group.live)
    size, num_rows = cache.block_size, len(group.live)
    need = cache.blocks_for(num_tokens)
    if num_rows > 1:
        return CapacityError(
            f"got {num_rows} sequences of one request, of up to {num_tokens} tokens, {need} blocks "
            f"of {size} each where none is shared, wanted all of them to go on in the pool's "
            f"{cache.num_blocks}; lower n, beam_width or max_tokens, or raise num_blocks"
        )
    return CapacityError(
        f"got a sequence of {num_tokens} tokens that needs {need} blocks of {size}, wanted at "
        f"most the pool's {cache.num_blocks}; lower max_tokens or raise num_blocks"
    )


def _most_output(request: Request, config: EngineConfig) -> int:
    limit = request.params.max_tokens
    return config.max_model_len if limit is None else limit


def _check_pool(request: Request, most_output: int, cache: CacheConfig) -> None:
    """The last token drawn is never stored; where none is drawn, nor is the last of the prompt.

    Of several sequences each needs a block of its own for its first token; the full blocks of
    the prompt are shared:

        block_size 4, prompt of 6, n = 3      a b c d | e f x .     1 + 3 blocks
                                                      | e f y .
                                                      | e f z .
    """
    num_prompt, num_rows = len(request.prompt_token_ids), request.num_sequences
    num_stored = num_prompt + min(most_output, 2) - 1
    need = cache.blocks_for(num_stored)
    if num_rows > 1 and most_output > 1:
        need = num_prompt // cache.block_size + num_rows
        detail = f"({num_prompt // cache.block_size} shared, 1 for each of {num_rows} sequences)"
    else:
        detail = f"({num_stored} slots)"
    if need > cache.num_blocks:
        raise PromptCapacityError(
            f"got a prompt of {num_prompt} tokens that needs {need} blocks of {cache.block_size} "
            f"{detail} to begin, wanted at most the pool's {cache.num_blocks}; "
            "shorten it or raise num_blocks"
        )
