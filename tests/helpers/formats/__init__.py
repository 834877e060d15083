"""Writers of every checkpoint format that `convert` reads, for tests.

They are written from the formats' own descriptions and share no code with the readers, so that a
mistake in a reader can't cancel itself out. A model is a `ModelFiles`: the `config.json` of
Hugging Face and its named weights.
"""

from tests.helpers.formats.gguf_file import write_gguf
from tests.helpers.formats.huggingface import write_hf, write_hf_bin
from tests.helpers.formats.meta import write_meta
from tests.helpers.formats.model_files import ModelFiles, head_counts, random_model
from tests.helpers.formats.variants import VARIANTS, variant

__all__ = [
    "VARIANTS",
    "ModelFiles",
    "head_counts",
    "random_model",
    "variant",
    "write_gguf",
    "write_hf",
    "write_hf_bin",
    "write_meta",
]
