"""What the pool gets: sizes as people write them, and the sums behind what fits."""

from __future__ import annotations

import pytest

from jaxpage.config import CacheConfig, ModelConfig
from jaxpage.device.kv_cache import block_bytes
from jaxpage.engine import sizing
from jaxpage.engine.sizing import CPU_DEFAULT_BYTES, parse_bytes, size_pool
from jaxpage.errors import CapacityError, ConfigError

MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
BLOCK_BYTES = block_bytes(MODEL, 16)


def pool(num_blocks: int | None = None, kv_memory: str | int | None = None) -> CacheConfig:
    """A pool for sequences that together hold 10,000 tokens at most."""
    return size_pool(
        MODEL, block_size=16, num_blocks=num_blocks, kv_memory=kv_memory, most_tokens=10_000
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1e9", 10**9),
        ("64 B", 64),
        ("1KiB", 2**10),
        ("1.5K", 1536),
        ("512 MiB", 2**29),
        ("2GB", 2**31),
        ("1T", 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, wanted: int) -> None:
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "lots", "0", "-1GiB", "2 GiB each", "1.2.3", "GiB", "1e400", "1e308T"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="got kv_memory="):
        parse_bytes(text)


def test_a_budget_holds_the_null_block_too() -> None:
    assert pool(kv_memory=10 * BLOCK_BYTES).num_blocks == 9
    assert pool(kv_memory=10 * BLOCK_BYTES - 1).num_blocks == 8


def test_the_default_is_bounded_by_what_is_free_and_by_what_can_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 40 * BLOCK_BYTES
    monkeypatch.setattr(sizing, "free_bytes", lambda: free)
    assert pool().num_blocks == 9, "a quarter of 40, less the null block"
    free = 100 * CPU_DEFAULT_BYTES
    assert pool().num_blocks == 10_000 // 16


def test_a_pool_that_cannot_fit_says_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda: 40 * BLOCK_BYTES)
    assert pool(num_blocks=39).num_blocks == 39
    with pytest.raises(CapacityError, match=r"got a KV pool of 40 blocks of 0\.008 MiB"):
        pool(num_blocks=40)
    with pytest.raises(CapacityError, match="got a KV pool of 0 blocks"):
        pool(kv_memory=BLOCK_BYTES)
    with pytest.raises(ConfigError, match="wanted one"):
        pool(num_blocks=4, kv_memory="1GiB")


def test_where_free_memory_is_unknown_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda: None)
    assert pool(num_blocks=10**9).num_blocks == 10**9
