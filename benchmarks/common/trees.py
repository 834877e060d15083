"""Runs one file in several trees of jaxpage: each time in a process that imports that tree's.

The file may use the standard library and what jaxpage has in every one of the trees. It reads one
JSON object, its job, from standard input and prints one, in which "jaxpage" is `jaxpage.__file__`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_in_tree(tree: Path, file: str, job: dict[str, Any], *, cache: str) -> dict[str, Any]:
    """What the file answers. Raises CalledProcessError when it fails."""
    done = subprocess.run(
        [sys.executable, "-P", file],  # -P: the file's own folder must not stand before the tree
        input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True,
        cwd=tree, env=environment(tree, cache=cache),
    )  # fmt: skip
    answer = json.loads(done.stdout.splitlines()[-1])
    home = Path(answer["jaxpage"]).resolve()
    assert home == tree.resolve() / "jaxpage" / "__init__.py", f"{tree} ran {home}"
    return answer


def environment(tree: Path, *, cache: str) -> dict[str, str]:
    """Variables under which Python takes jaxpage from a tree, on a CPU, with a cache of its own."""
    ours = {
        "PYTHONPATH": str(tree.resolve()), "XDG_CACHE_HOME": cache, "JAX_PLATFORMS": "cpu"
    }  # fmt: skip
    return {**os.environ, **ours}
