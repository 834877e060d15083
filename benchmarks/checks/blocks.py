"""Random operations on the blocks without a fault, and what admission and a decode row cost.

    python -m benchmarks.checks.blocks           100,000 operations
    python -m benchmarks.checks.blocks --quick   3,000

Operations are done in any order, also in the middle of a plan, on pools so small that blocks run
out all the time; after each the books must agree, and after each step every slot of every table
must show what was written there. One pool in four hashes all prefixes to the same key.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from functools import partial

from benchmarks.checks.block_model import BlockModel
from benchmarks.common.report import first_line, save
from benchmarks.common.timing import Spread, timed
from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.prefix_cache import hash_tokens

OPERATIONS_A_POOL = 250
PROMPT_TOKENS, BLOCK_SIZE, ROWS = 4000, 16, 256
WEIGHTS = {
    "open": 6,
    "plan": 16,
    "dispatch": 6,
    "read": 4,
    "fork": 3,
    "release": 3,
    "swap_out": 1.5,
    "swap_in": 2.5,
    "drop_swapped": 0.2,
    "reset": 0.1,
}
MOST_RUNNING = 8


def constant_hash(parent_key: int, token_ids: tuple[int, ...]) -> int:
    return 0


def small_pool(rng: random.Random) -> BlockModel:
    """4 to 32 blocks of 1 to 7 slots, with and without host blocks and prefix cache."""
    num_swap_blocks = rng.choice((0, 4, 16))
    config = CacheConfig(rng.randint(4, 32), rng.choice((1, 2, 3, 4, 7)), num_swap_blocks)
    blocks = BlockManager(
        config,
        enable_prefix_caching=rng.random() < 0.85,
        hash_tokens=rng.choice((hash_tokens, hash_tokens, hash_tokens, constant_hash)),
    )
    return BlockModel(config, blocks)


def count_evictions(model: BlockModel, counts: Counter[str]) -> None:
    """Notes from here on each cached block that is given up for room."""
    cache = model.blocks._prefixes
    evict = cache.evict

    def counted() -> int:
        counts["evicted blocks"] += 1
        return evict()

    cache.evict = counted


def operate(model: BlockModel, rng: random.Random) -> None:
    """One random operation on random sequences."""
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    running, swapped = list(model.running), list(model.swapped)
    if name == "open":
        token_ids = rng.choices((0, 1), (4, 1), k=rng.randint(1, 16))
        salt = rng.choice((None, None, "x"))
        model.open(token_ids, salt, rng.choice((1, len(token_ids))))
    elif name == "dispatch":
        model.dispatch(num_unknown=rng.choice((0, 1)))
    elif name == "read":
        model.read()
    elif name == "reset":
        model.reset()
    elif name == "plan" and running:
        for seq_id in rng.sample(running, rng.randint(1, len(running))):
            if not model.plan_row(seq_id, rng.choices((0, 1), k=rng.choice((1, 1, 1, 4)))):
                model.release(rng.choice(list(model.running)))  # as an engine would
                break
    elif name == "fork" and 0 < len(running) < MOST_RUNNING:
        model.fork(rng.choice(running))
    elif name == "release" and running:
        model.release(rng.choice(running))
    elif name == "swap_out" and running:
        gang = rng.sample(running, min(len(running), rng.randint(1, 3)))
        model.swap_out(gang, hold=rng.random() < 0.3)
    elif name == "swap_in" and swapped:
        model.swap_in(rng.sample(swapped, rng.randint(1, len(swapped))))
    elif name == "drop_swapped" and swapped:
        model.drop_swapped(rng.choice(swapped))


def run_operations(num_operations: int, seed: int) -> Counter[str]:
    """Counts of what happened. Raises AssertionError at the first fault."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    peak_saved = 0
    for _ in range(num_operations // OPERATIONS_A_POOL):
        model = small_pool(rng)
        count_evictions(model, counts)
        while model.num_done < OPERATIONS_A_POOL:
            operate(model, rng)
            model.blocks.check_integrity()
        peak_saved = max(peak_saved, model.blocks.pool.peak_saved)
        model.end()
        counts["pools"] += 1
        counts.update(model.counts)
    counts["blocks saved by sharing, at most"] = peak_saved
    return counts


def admission_seconds(rounds: int) -> dict[str, Spread]:
    """Of a 4,000-token prompt: a full hit, a full miss, and the release."""
    rng = random.Random(0)
    blocks = BlockManager(CacheConfig(50_000, BLOCK_SIZE), enable_prefix_caching=True)
    prompt = [rng.randrange(49_152) for _ in range(PROMPT_TOKENS)]
    other = [rng.randrange(49_152) for _ in range(PROMPT_TOKENS)]
    blocks.open(0, PROMPT_TOKENS, blocks.match(prompt))
    blocks.store(0, PROMPT_TOKENS, prompt)
    blocks.free(0, until_step=None)
    found: dict[str, list[float]] = {"hit": [], "miss": [], "release": []}

    def admit(seq_id: int, tokens: list[int], want: int) -> None:
        hit = blocks.match(tokens)
        assert hit.num_tokens == want
        assert blocks.num_needed(PROMPT_TOKENS, hit) <= blocks.num_free
        blocks.open(seq_id, PROMPT_TOKENS, hit)

    want = (PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    for seq_id in range(1, rounds + 1):
        found["hit"].append(timed(partial(admit, seq_id, prompt, want)))
        found["release"].append(timed(partial(blocks.free, seq_id, until_step=None)))
        found["miss"].append(timed(partial(admit, seq_id, other, 0)))
        blocks.free(seq_id, until_step=None)
    return {name: Spread(tuple(values)) for name, values in found.items()}


def decode_seconds(num_blocks: int, steps: int) -> Spread:
    """Of the block side of one step of 256 decode rows: write, table, store, with a full pool."""
    blocks = BlockManager(CacheConfig(num_blocks, BLOCK_SIZE), enable_prefix_caching=True)
    token_ids = {seq_id: [seq_id] * 100 for seq_id in range(ROWS)}
    for seq_id, tokens in token_ids.items():
        blocks.open(seq_id, 100, blocks.match(tokens))
        blocks.store(seq_id, 100, tokens)

    def step(step_id: int) -> None:
        for seq_id in token_ids:
            if blocks.num_blocks_to_write(seq_id, 1) > blocks.num_free:
                raise AssertionError("the pool is too small for the measurement")
            blocks.prepare_write(seq_id, 1)
            blocks.table(seq_id)
        blocks.take_moves()
        for seq_id, tokens in token_ids.items():
            tokens.append(7)
            blocks.store(seq_id, len(tokens), tokens, until_step=step_id)
        blocks.step_read(step_id)

    return Spread(tuple(timed(partial(step, step_id)) for step_id in range(1, steps + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_operations = 3_000 if options.quick else 100_000
    rounds = 5 if options.quick else 50
    start = time.perf_counter()
    counts = run_operations(num_operations, options.seed)
    seconds = time.perf_counter() - start
    for name, count in sorted(counts.items()):
        print(f"{count:>10,}  {name}")
    print(f"{num_operations:,} operations in {seconds:.1f} s: no fault")
    figures: dict[str, object] = {"operations": num_operations, "counts": dict(counts)}
    for name, spread in admission_seconds(rounds).items():
        figures[f"{name}_ms"] = spread.median * 1e3
        print(f"{PROMPT_TOKENS:,} tokens, {name}: {spread.median * 1e3:.3f} ms")
    for num_blocks in (5_000, 50_000):
        spread = decode_seconds(num_blocks, rounds * 3)
        figures[f"decode_{num_blocks}_ms"] = spread.median * 1e3
        print(f"{ROWS} decode rows, pool of {num_blocks:,}: {spread.median * 1e3:.3f} ms a step")
    if not options.quick:
        save("blocks", figures)


if __name__ == "__main__":
    main()
