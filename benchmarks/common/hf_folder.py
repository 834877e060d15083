"""A model as the Hugging Face folder that Transformers loads: `convert --to hf` in float32."""

from __future__ import annotations

from pathlib import Path


def write_hf_folder(model: str, folder: Path) -> Path:
    """Writes the model there and returns the folder. Raises SystemExit where that fails."""
    from convert.__main__ import main

    code = main([model, str(folder), "--to", "hf", "--dtype", "float32"])
    if code:
        raise SystemExit(code)
    return folder
