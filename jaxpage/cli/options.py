"""The options of `python -m jaxpage.generate`, and what they mean to the library."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from jaxpage.config import DEFAULT_MODEL, DTYPES
from jaxpage.errors import ConfigError

_LATER = "in a later version"


class OneLineParser(argparse.ArgumentParser):
    """Wrong calls end with one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(
            f"error: got a wrong call ({message}), wanted {self.prog} options; see --help\n"
        )
        sys.exit(2)


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m jaxpage.generate",
        description="Complete prompts with a LLaMA-family model. Results go to stdout, "
        "everything else to stderr.",
    )
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="text to complete")
    _add_input(parser.add_argument_group("model and input"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_output(parser.add_argument_group("output"))
    _add_engine(parser.add_argument_group("engine"))
    return parser


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The options as fields of SamplingParams; a JSONL line may override each."""
    names = (
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n",
        "best_of", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logprobs", "prompt_logprobs",
    )  # fmt: skip
    fields = {name: getattr(args, name) for name in names}
    fields["stop"] = tuple(args.stop)
    fields["stop_token_ids"] = tuple(args.stop_token_id)
    if args.logit_bias:
        fields["logit_bias"] = dict(_parse_bias(text) for text in args.logit_bias)
    if args.beam_width is not None:
        fields["beam_width"] = args.beam_width
        if args.length_penalty is not None:
            fields["length_penalty"] = args.length_penalty
        if args.early_stopping is not None:
            choices = {"false": False, "true": True, "never": "never"}
            fields["early_stopping"] = choices[args.early_stopping]
    return fields


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options as keywords of LLM. Raises ConfigError for options that need another."""
    is_beam_option = args.length_penalty is not None or args.early_stopping is not None
    if is_beam_option and args.beam_width is None:
        raise ConfigError(
            "got --length-penalty or --early-stopping without --beam-width, wanted them for a beam "
            "search; leave them out"
        )
    names = (
        "dtype", "block_size", "num_blocks", "kv_memory", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "preemption", "swap_blocks", "attention", "tensor_parallel_size",
    )  # fmt: skip
    options = {name: getattr(args, name) for name in names}
    options["enable_prefix_caching"] = not args.no_prefix_caching
    return options


def _add_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", default=DEFAULT_MODEL, metavar="M",
                       help="name, directory, .gguf file or Hub id (%(default)s)")  # fmt: skip
    group.add_argument("--dtype", default="auto", choices=("auto", *DTYPES),
                       help="auto: float32 on a CPU, bfloat16 on a GPU")  # fmt: skip
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"),
                       help="auto: a GPU where there is one")  # fmt: skip
    group.add_argument("--prompts", metavar="FILE",
                       help=".txt: a prompt a line; .jsonl: an object a line; a pipe or "
                       "-, stdin: either")  # fmt: skip
    group.add_argument("--chat", action="store_true",
                       help="wrap PROMPT, or lines of text, in the chat template")  # fmt: skip
    group.add_argument("--system", metavar="S", help="system message, with --chat")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-tokens", type=int, default=128, metavar="N", help="most tokens to write (128)")
    add("--min-tokens", type=int, default=0, metavar="N", help="no end before this many (0)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    add("--top-p", type=float, default=1.0, metavar="P",
        help="draw from the likeliest that sum to P (1.0: all)")  # fmt: skip
    add("--top-k", type=int, default=0, metavar="K", help="0 or -1: off (default)")
    add("--min-p", type=float, default=0.0, metavar="P",
        help="draw from those of at least P times the likeliest (0.0: all)")  # fmt: skip
    add("--seed", type=int, metavar="S", help="draw the same every time (without: anew)")
    add("-n", type=int, default=1, metavar="N", help="completions a prompt (1)")
    add("--best-of", type=int, metavar="N",
        help="draw this many, return the n likeliest")  # fmt: skip
    add("--beam-width", type=int, metavar="N", help="beam search with N beams")
    add(
        "--length-penalty",
        type=float,
        metavar="X",
        help="of a beam search: score = log-probability / length ** X (1.0)",
    )
    add("--early-stopping", choices=("false", "true", "never"),
        help="of a beam search: whether N finished beams end it (false)")  # fmt: skip
    add("--stop", action="append", default=[], metavar="S", help="end before this text; repeatable")
    add("--stop-token-id", action="append", type=int, default=[], metavar="I",
        help="end with this token; repeatable")  # fmt: skip
    add("--ignore-eos", action="store_true", help="go on after the model's end of text")
    add("--presence-penalty", type=float, default=0.0, metavar="X",
        help="taken off the logit of every token in the output so far (0.0)")  # fmt: skip
    add("--frequency-penalty", type=float, default=0.0, metavar="X",
        help="the same, times how often it is there (0.0)")  # fmt: skip
    add("--repetition-penalty", type=float, default=1.0, metavar="X",
        help="above 1.0: tokens of prompt and output get unlikelier (1.0)")  # fmt: skip
    add("--logit-bias", action="append", default=[], metavar="ID=V",
        help="add V to a token's logit; repeatable")  # fmt: skip
    add("--logprobs", type=int, metavar="K",
        help="log-probabilities of each token and of the K likeliest, with jsonl")  # fmt: skip
    add("--prompt-logprobs", type=int, metavar="K", help="the same for the prompt's tokens")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--format", choices=("text", "jsonl"), default="text",
        help="text alone (default), or an object a prompt")  # fmt: skip
    add("-o", "--output", metavar="FILE", help="write results here (-: stdout)")
    add("--no-stream", action="store_true", help="print a completion only when it is whole")
    add("--quiet", action="store_true", help="no progress on stderr")
    add("--block-map", metavar="FILE",
        help="draw which request owned which block, step by step: .svg or .png")  # fmt: skip
    add("--stats", action="store_true", help="print the engine's counters on stderr as JSON")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--block-size", type=int, default=16, metavar="N", help="tokens a KV block (%(default)s)")
    add("--num-blocks", type=int, metavar="N", help="blocks in the pool (what memory allows)")
    add("--kv-memory", metavar="SIZE", help="or its size, as 2GiB")
    add("--max-model-len", type=int, metavar="N",
        help="most tokens of a prompt and its completion (the model's)")  # fmt: skip
    add("--max-num-seqs", type=int, default=64, metavar="N",
        help="most sequences to run at once (%(default)s)")  # fmt: skip
    add("--max-num-batched-tokens", type=int, default=2048, metavar="N",
        help="most prompt tokens a step (%(default)s)")  # fmt: skip
    add("--no-prefix-caching", action="store_true", help="share no blocks between prompts")
    add("--preemption", choices=("auto", "recompute", "swap"), default="auto",
        help="how a request gives way when blocks run out (auto: the cheaper)")  # fmt: skip
    add("--swap-blocks", type=int, metavar="N",
        help="blocks in host memory (for --preemption swap as in the pool, else 0)")  # fmt: skip
    add("--attention", choices=("auto", "xla", "native", "reference", "pallas"),
        default="auto",
        help="auto: pallas on a GPU, native on a CPU that has it, else xla")  # fmt: skip
    add("--tensor-parallel-size", type=int, default=1, metavar="N",
        help=f"GPUs to split a model over (1; more {_LATER})")  # fmt: skip


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise ConfigError(
            f"got --logit-bias {text!r}, wanted a token id and a number; write it as 42=-100"
        ) from None
