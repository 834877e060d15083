"""What varies by model, as one value: a `Family`. Only a family's own file knows its name.

A family is data: its config, its module, what each file format calls its settings and tensors, and
how its parameters are cut over devices. `jaxpage.formats` reads files by these tables, `registry`
builds models by them. This file knows no single family and no file: both import it.

    from jaxpage.models.family import Family, Layout, Rule
    from jaxpage.models.registry import register

    register(Family(name="toy", module=Toy, layouts={"huggingface": Layout(...)}, sharding=...))

Every family's tree has three names that readers and the engine look for: `layers_{i}` are the
layers, all of one shape, `embed/embedding` is the embedding [V, D], and `lm_head/kernel` the head
[V, D], absent when it is tied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import PartitionSpec

from jaxpage.config import ModelConfig
from jaxpage.errors import ConfigError
from jaxpage.fields import Fields

Format = Literal["huggingface", "gguf", "meta"]
"""A kind of file that many families are stored in."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One stored tensor and the part of a leaf that it fills.

    `{i}` stands for the layer's number; a tensor without a target is known and dropped.
    """

    source: str
    target: str | None
    part: tuple[slice, ...] = ()
    """Slices of the leaf's first axes; () is the whole leaf. In the file the leading axes of a part
    are one axis of rows: a part [K, G, H, D] is stored as [K * G * H, D]."""
    interleaved: bool = False
    """True if the file keeps the two numbers of a rotary pair side by side in a head, the third
    axis of the part; ours, as in Hugging Face's files, are H / 2 apart."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one file format stores a family."""

    names: tuple[str, ...]
    """What the format calls the family; the first is written. Meta's files state none: ""."""
    rules: tuple[Rule, ...]
    """Every tensor that its files may hold."""
    read: Callable[[Fields, dict[str, Any]], ModelConfig]
    """(the file's settings, the arguments of ModelConfig that the format's reader found in them) to
    the config; the reader then sets `architecture`. ConfigError for what does not fit."""
    write: Callable[[ModelConfig, dict[str, Any]], dict[str, Any]] | None = None
    """The inverse: (the config, the settings that the format's writer took from it) to the settings
    to write. None for a layout that is only read."""
    keys: frozenset[str] = frozenset()
    """Settings that `read` looks at, or may pass over, beside those that every decoder has. Any
    other key is refused: it may change the arithmetic."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of absent settings; a key that is not here either must be in the file."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model: all that is particular to it."""

    name: str
    """As in `ModelConfig.architecture`, and in `model_type` of Hugging Face's config.json."""
    module: Callable[..., Any]
    """config -> a Linen module with `__call__`, `logits` and `head` like Llama's: a
    `jaxpage.device.ops.Model`."""
    layouts: Mapping[Format, Layout]
    """The formats that it is read from."""
    sharding: tuple[tuple[str, PartitionSpec], ...]
    """(regular expression, spec) of leaves: a leaf takes the first whose expression is found in its
    path. The mesh axis is called "model"."""
    config: type[ModelConfig] = ModelConfig
    """A subclass of ModelConfig if the family has more settings; each further field is a flag, a
    number, a text, None, or a tuple of one of these."""

    def spec(self, path: str) -> PartitionSpec:
        """How the leaf of a path, `a/b/c`, is cut over devices."""
        for pattern, spec in self.sharding:
            if re.search(pattern, path):
                return spec
        raise ConfigError(
            f"got the parameter {path}, wanted a row of {self.name}'s sharding for it; add one"
        )
