"""What attention="auto" stands for on a CPU, with the native kernels built and without."""

from __future__ import annotations

import logging

import pytest

from jaxpage import native
from jaxpage.device.attention.reference import make_attention
from jaxpage.engine.options import EngineOptions
from jaxpage.errors import ConfigError
from jaxpage.models.registry import build_model
from tests.models.toys import toy_config


def test_auto_is_native_where_it_is_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "is_built", lambda: True)
    assert EngineOptions().attention_backend() == "native"
    assert EngineOptions(attention="xla").attention_backend() == "xla"
    assert not caplog.records


def test_auto_without_it_is_xla_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "is_built", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert EngineOptions().attention_backend() == "xla"
        assert EngineOptions(attention="xla").attention_backend() == "xla"
    assert [record.getMessage() for record in caplog.records] == [native.MISSING]
    assert "\n" not in native.MISSING


def test_asking_for_what_is_not_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_built", lambda: False)
    with pytest.raises(ConfigError, match="build_ext --inplace"):
        make_attention("native", scale=0.123)
    with pytest.raises(ConfigError, match="build_ext --inplace"):
        build_model(toy_config(), ops="native")
    with pytest.raises(ConfigError, match="ops"):
        build_model(toy_config(), ops="eigen")  # type: ignore[arg-type]  # a wrong value
