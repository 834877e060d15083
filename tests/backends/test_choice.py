"""Which backend a name, or "auto" on a CPU, stands for, with the native kernels and without."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jaxpage import backends, native
from jaxpage.backends import BACKENDS, as_backend
from jaxpage.backends.native import Native
from jaxpage.backends.xla import Xla
from jaxpage.device.ops import Backend
from jaxpage.engine.options import EngineOptions
from jaxpage.errors import ConfigError


def test_auto_is_native_where_it_is_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "is_built", lambda: True)
    assert EngineOptions().backend() == Native()
    assert EngineOptions(attention="xla").backend() == Xla()
    assert not caplog.records


def test_auto_without_it_is_xla_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "is_built", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert EngineOptions().backend() == Xla()
        assert EngineOptions(attention="xla").backend() == Xla()
    assert [record.getMessage() for record in caplog.records] == [native.MISSING]
    assert "\n" not in native.MISSING


def test_asking_for_what_is_not_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "is_built", lambda: False)
    with pytest.raises(ConfigError, match="build_ext --inplace"):
        as_backend("native")
    with pytest.raises(ConfigError, match="eigen"):
        as_backend("eigen")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_a_value_that_programs_can_be_keyed_by(name: str) -> None:
    made = BACKENDS[name]()
    assert isinstance(made, Backend)
    assert made == BACKENDS[name]() and hash(made) == hash(BACKENDS[name]())
    assert made != BACKENDS[name](shares_prefixes=False)
    assert as_backend(made) is made


def test_whether_rows_share_their_prefixes_is_the_backends() -> None:
    assert EngineOptions(attention="xla").backend().reads_groups
    for name in ("xla", "reference"):
        own = EngineOptions(attention=name, shared_prefix_decode=False).backend()
        assert own == BACKENDS[name](shares_prefixes=False) and not own.reads_groups
    with pytest.raises(ConfigError, match="beside a backend"):
        EngineOptions(attention=Xla(), shared_prefix_decode=False).checked()


class Unhashable(Xla):
    """An equality of its own takes the hash away."""

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("given", [Xla, Unhashable(), 3, None])
def test_what_is_no_backend_is_refused_at_once(given: Any) -> None:
    with pytest.raises(ConfigError, match="wanted a name or a backend"):
        EngineOptions(attention=given).checked()
    with pytest.raises(ConfigError, match="wanted a name or a backend"):
        as_backend(given)
