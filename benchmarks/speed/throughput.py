"""Batched throughput, single stream and prefill: jaxpage beside Transformers, interleaved.

    python -m benchmarks.speed.throughput              the 16-request sample, three rounds
    python -m benchmarks.speed.throughput --sample 64  the 64-request sample, one round
    python -m benchmarks.speed.throughput --quick      seconds: a few tokens, no peer

Both run the same float32 weights on the same threads, outputs forced to the recorded lengths.
Transformers runs static batches of 16 in file order (sdpa), each padded to its longest prompt
and held until its longest answer ends.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

from benchmarks.common.report import Spread, first_line, interleave, save, timed
from benchmarks.common.sharegpt import Item, load_sample
from benchmarks.speed.roofline import measure_floors, model_floors
from jaxpage import LLM, SamplingParams

MODEL = "smollm2-135m"
PREFILL_TOKENS = 512
STREAM_TOKENS = 64
STREAM_CONTEXTS: tuple[int, ...] = (128, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--sample", type=int, choices=(16, 64), default=16)
    parser.add_argument("--rounds", type=int, default=None, help="3 for sample 16, 1 for 64")
    parser.add_argument("--quick", action="store_true", help="a few tokens, no peer")
    parser.add_argument("--no-peer", action="store_true", help="jaxpage alone")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.sample == 64 or args.quick else 3)
    if args.quick:
        items, prefill = quick_sample(), 32
        streams = {16: 4}
    else:
        items, prefill = load_sample(args.sample), PREFILL_TOKENS
        streams = dict.fromkeys(STREAM_CONTEXTS, STREAM_TOKENS)
    ours = Ours(args.model, "16MiB" if args.quick else "2GiB")
    engines: dict[str, Ours | Any] = {"jaxpage": ours}
    if not (args.quick or args.no_peer):
        from benchmarks.speed.transformers_peer import TransformersPeer

        engines["transformers"] = TransformersPeer(args.model)
    record = measure(engines, items, streams, prefill, rounds)
    record["floors"] = model_floors(ours.llm.config, **measure_floors(quick=args.quick))
    print_table(record)
    print("wrote", save(f"throughput_{args.sample}{'_quick' * args.quick}", record))


def quick_sample() -> list[Item]:
    """A handful of short requests, so that nothing here can rot."""
    return [Item(str(i), f"Request number {i} says", 6, 3 + i % 3) for i in range(4)]


class Ours:
    """jaxpage with a pool that holds the whole sample."""

    def __init__(self, model: str, kv_memory: str) -> None:
        self.llm = LLM(model, dtype="float32", kv_memory=kv_memory, max_num_seqs=64, seed=0)

    def batch(self, items: list[Item]) -> None:
        params = [_forced(item.output_tokens) for item in items]
        outputs = self.llm.generate([item.prompt for item in items], params, raise_on_error=True)
        for item, output in zip(items, outputs, strict=True):
            assert len(output.outputs[0].token_ids) == item.output_tokens

    def prefill(self, num_tokens: int) -> None:
        self.llm.generate(context(num_tokens), _forced(1), raise_on_error=True)

    def stream(self, num_tokens: int, new_tokens: int) -> float:
        """Seconds from the first new token to the last of `new_tokens` after it."""
        params = _forced(new_tokens + 1)
        output = self.llm.generate(context(num_tokens), params, raise_on_error=True)[0]
        metrics = output.metrics
        assert metrics is not None and metrics.finish_s and metrics.first_token_s
        return metrics.finish_s - metrics.first_token_s


def context(num_tokens: int) -> list[int]:
    """A prompt of that many ids; which ones does not matter to speed."""
    return [100 + 7 * i % 397 for i in range(num_tokens)]


def measure(
    engines: dict[str, Any],
    items: list[Item],
    streams: dict[int, int],
    prefill_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Tokens per second of every engine at every job, with spread."""
    jobs = {name: _jobs(engine, items, streams, prefill_tokens) for name, engine in engines.items()}
    table: dict[str, dict[str, Spread]] = {}
    stats: dict[str, Any] = {}
    for job in jobs["jaxpage"]:
        runs = {name: found[job] for name, found in jobs.items()}
        runs["jaxpage"]()  # compiles
        gc.collect()
        table[job] = interleave(runs, rounds=rounds)
        stats = stats or engines["jaxpage"].llm.stats().to_dict()  # of the batches alone
    return {
        "requests": len(items),
        "prompt_tokens": sum(item.prompt_tokens for item in items),
        "output_tokens": sum(item.output_tokens for item in items),
        "rounds": rounds,
        "stats": stats,
        "tokens_per_second": {
            job: {name: spread.values for name, spread in figures.items()}
            for job, figures in table.items()
        },
    }


def print_table(record: dict[str, Any]) -> None:
    """A Markdown table: tokens per second, and the ratio of the same rounds."""
    counts = f"{record['requests']} requests, {record['prompt_tokens']} prompt tokens"
    print(f"\n{counts}, {record['output_tokens']} output tokens, float32")
    print("\ntokens/s: median (least to most)\n")
    print("| job | jaxpage | transformers | ratio |\n|---|---|---|---|")
    for job, figures in record["tokens_per_second"].items():
        ours = Spread(tuple(figures["jaxpage"]))
        peer = figures.get("transformers")
        other = f"{Spread(tuple(peer))} | {ours / Spread(tuple(peer))}" if peer else "- | -"
        print(f"| {job} | {ours} | {other} |")
    print("\nFloors of a decode step on this machine:")
    for line in record["floors"]["lines"]:
        print("-", line)
    print("\nThe engine over the batches:", record["stats"])


def _jobs(
    engine: Any, items: list[Item], streams: dict[int, int], prefill_tokens: int
) -> dict[str, Callable[[], float]]:
    """What one engine is measured at, batches first; each call is a run, in tokens per second."""
    output_tokens = sum(item.output_tokens for item in items)

    def stream(size: int) -> Callable[[], float]:
        return lambda: streams[size] / engine.stream(size, streams[size])

    return {
        "batch": lambda: output_tokens / timed(lambda: engine.batch(items)),
        f"prefill {prefill_tokens}": lambda: (
            prefill_tokens / timed(lambda: engine.prefill(prefill_tokens))
        ),
        **{f"stream at {size}": stream(size) for size in streams},
    }


def _forced(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


if __name__ == "__main__":
    main()
