"""Every program that an engine can ask for."""

from __future__ import annotations

from jaxpage.device.types import StepShape
from jaxpage.engine.step_shapes import StepShapes


def all_shapes(shapes: StepShapes) -> tuple[StepShape, ...]:
    """Of the forward pass, as long as no draw reads more than the last token of its row."""
    rows, tokens = shapes.decode_rows.sizes, shapes.prefill_tokens.sizes
    return (
        *(shapes.decode(count) for count in rows),
        *(shapes.decode(count, with_groups=True) for count in rows[1:] if shapes.has_groups),
        *(shapes.prefill(count) for count in tokens),
        *(shapes.mixed(single, count) for single in shapes.mixed_rows.sizes for count in tokens),
    )
