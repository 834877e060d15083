"""A LLaMA small enough for the repository, trained until its text is visibly not noise.

`text.py` makes the text, `train.py` the model, `make_golden.py` what transformers says of it.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""A Hugging Face folder."""
