"""Where pages lie around arrays, and that moving them changes nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device import huge_pages
from jaxpage.device.huge_pages import PAGE_BYTES, renew_zeros, use_huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages() -> bool:
    return sys.platform == "linux" and ENABLED.exists() and "[never]" not in ENABLED.read_text()


def flags_at(address: int) -> list[str]:
    """The flags of the mapping that the address is in; "hg": large pages are asked for."""
    is_in = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_in = int(found[1], 16) <= address < int(found[2], 16)
        elif is_in and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_spans_are_whole_pages_and_those_that_touch_are_one() -> None:
    page = PAGE_BYTES
    buffers = [(7 * page, page), (10, 20), (page + 5, page), (3 * page, 1), (20 * page + 1, 1)]
    got = huge_pages._whole_pages(buffers)
    assert got == [(0, 4 * page), (7 * page, 8 * page), (20 * page, 21 * page)]


def test_arrays_move_and_stay_the_same() -> None:
    if not has_huge_pages():
        pytest.skip("no large pages to be had")
    array = jnp.arange(16 * PAGE_BYTES // 4, dtype=jnp.int32)
    want = np.array(array)
    thread = use_huge_pages({"a": array, "small": jnp.ones(3)})
    assert thread is not None
    thread.join()
    np.testing.assert_array_equal(array, want)
    assert "hg" in flags_at(array.unsafe_buffer_pointer() + PAGE_BYTES)


def test_small_arrays_are_left_alone() -> None:
    assert use_huge_pages({"a": jnp.ones(5)}) is None
    assert renew_zeros({"a": jnp.zeros(5)}) is None


def test_renewed_zeros_are_zeros_and_hold_what_is_written() -> None:
    if not has_huge_pages():
        pytest.skip("no large pages to be had")
    arrays = [jnp.zeros((3 * PAGE_BYTES + 4 * n) // 4) for n in range(4)]
    beside = [jnp.ones(5000) for _ in range(4)]
    write = jax.jit(lambda array, value: array.at[::1000].set(value), donate_argnums=0)
    first = write(arrays[0], 1.0)  # before the thread is done, or after it
    thread = renew_zeros(arrays[1:])
    assert thread is not None
    second = write(arrays[1], 2.0)
    thread.join()
    for array, value in ((first, 1.0), (second, 2.0), (arrays[2], 0.0), (arrays[3], 0.0)):
        want = np.zeros(array.size, np.float32)
        want[::1000] = value
        np.testing.assert_array_equal(array, want)
    assert all((np.asarray(one) == 1).all() for one in beside)
    assert "hg" in flags_at(arrays[2].unsafe_buffer_pointer() + PAGE_BYTES)
