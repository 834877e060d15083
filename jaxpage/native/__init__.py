"""CPU kernels in C++, called from JAX programs as XLA custom calls.

Matrix products, RMS norm, SwiGLU, rotary positions, paged attention, and the argmax and logsumexp
of logits. They exist where the package was built with a C++ compiler, and work where JAX takes the
version of XLA's interface that they were built for: `is_built` tells. This package knows arrays,
and no step or model. To build in a checkout: python setup.py build_ext --inplace
"""

from jaxpage.native.kernels import (
    FEW_ROWS,
    argmax_logsumexp,
    matmul,
    paged_attention,
    rms_norm,
    rope_qkv,
    swiglu,
)
from jaxpage.native.library import MISSING, instruction_set, is_built

__all__ = [
    "FEW_ROWS",
    "MISSING",
    "argmax_logsumexp",
    "instruction_set",
    "is_built",
    "matmul",
    "paged_attention",
    "rms_norm",
    "rope_qkv",
    "swiglu",
]
