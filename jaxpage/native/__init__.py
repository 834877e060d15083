"""Native CPU kernels as XLA custom calls: matrix products, what lies between them, paged
attention, and what sampling reads of all logits.

They exist where the package was built with a C++ compiler, for an XLA interface that the JAX at
hand takes; `is_built` tells. A leaf: knows arrays only, no step and no model. In a checkout:
python setup.py build_ext --inplace
"""

from jaxpage.native.kernels import (
    FEW_ROWS,
    gate,
    norm,
    paged_attention,
    product,
    rotate,
    summarise,
)
from jaxpage.native.library import MISSING, instruction_set, is_built

__all__ = [
    "FEW_ROWS",
    "MISSING",
    "gate",
    "instruction_set",
    "is_built",
    "norm",
    "paged_attention",
    "product",
    "rotate",
    "summarise",
]
