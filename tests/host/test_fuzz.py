"""Hundreds of small crowded engines, plainly at random: what shrinking strategies rarely reach.

The cases of test_random.py are few and begin simple. Here every round has samples, beams, shared
prefixes, joins and aborts in a pool that is too small for all of them.
"""

from __future__ import annotations

import random

import pytest

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.errors import RequestError
from jaxpage.host import Request
from jaxpage.host.policy import PreemptionCosts
from tests.host.driver import Driver
from tests.host.fake import VOCAB, beam_request, request

ROUNDS = 40


@pytest.mark.parametrize("first", range(0, 6 * ROUNDS, ROUNDS))
def test_crowded_engines_say_what_each_request_says_alone(first: int) -> None:
    preemptions = hits = 0
    for seed in range(first, first + ROUNDS):
        driver = run_round(random.Random(seed))
        counters = driver.scheduler.counters
        preemptions += counters.preemptions_recompute + counters.preemptions_swap
        hits += counters.prefix_hit_tokens
    assert preemptions and hits, "there was no crowd"


def run_round(rng: random.Random) -> Driver:
    driver, begun = random_driver(rng), [rng.randrange(VOCAB) for _ in range(12)]
    taken: dict[str, Request] = {}
    for index in range(rng.randint(2, 8)):
        entry = random_request(rng, str(index), begun)
        try:
            driver.add(entry)
        except RequestError:
            continue
        taken[entry.request_id] = entry
        for _ in range(rng.randint(0, 3)):
            driver.step()
            driver.scheduler.check_integrity()
        if rng.random() < 0.2:
            name = rng.choice(sorted(taken))
            del taken[name]
            abort(driver, name)
    driver.run()
    for entry in taken.values():
        driver.check_done(entry)
    driver.check_idle()
    return driver


def abort(driver: Driver, name: str) -> None:
    """Whatever it was doing; once the steps that were on their way are read it owns nothing."""
    num_samples = len(driver.news[name].samples)
    own = range(driver.seq_ids[name], driver.seq_ids[name] + num_samples)
    was_over = driver.news[name].is_over
    assert driver.scheduler.abort(name) != was_over
    driver.take_news()
    driver.scheduler.check_integrity()
    assert driver.news[name].is_over
    for block in driver.scheduler.block_map().blocks:
        assert not set(own) & set(block.seq_ids), f"block of an aborted request: {block}"
    while driver.in_flight:
        driver.scheduler.update(*driver.in_flight.popleft())
    driver.take_news()
    driver.scheduler.check_integrity()
    assert all(block.kind != "held" for block in driver.scheduler.block_map().blocks)


def random_driver(rng: random.Random) -> Driver:
    size = rng.choice([1, 2, 4, 7])
    config = EngineConfig(
        max_model_len=40,
        max_num_seqs=rng.randint(3, 8),
        max_num_batched_tokens=rng.choice([1, 4, 8, 64]),
        max_prefill_rows=rng.randint(1, 4),
        enable_prefix_caching=rng.random() < 0.6,
        preemption=rng.choice(["recompute", "swap", "auto"]),
    )
    cache = CacheConfig(
        num_blocks=rng.randint(-(-20 // size), -(-60 // size)),
        block_size=size,
        num_swap_blocks=rng.choice([0, 1, 4, 40]),
    )
    costs = PreemptionCosts(seconds_per_token=rng.choice([1e-6, 1.0]))
    return Driver(config, cache, depth=rng.randint(0, 1), costs=costs)


def random_request(rng: random.Random, name: str, begun: list[int]) -> Request:
    own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
    prompt = [*begun[: rng.randint(0, 12)], *own]
    priority = rng.choice([0, 0, 0, 1, -1])
    if rng.random() < 0.3:
        width, most = rng.randint(1, 4), rng.randint(1, 15)
        return beam_request(name, prompt, width, max_tokens=most, eos=(0,), priority=priority)
    return request(
        name,
        prompt,
        seed=rng.randint(0, 3),
        eos=(0,),
        priority=priority,
        n=rng.choice([1, 1, 2, 3]),
        max_tokens=rng.randint(0, 25),
        prompt_logprobs=rng.choice([None, None, 1]),
        presence_penalty=rng.choice([0.0, 0.5]),
    )
