"""Runs NVIDIA's assembler and disassembler and reads what they print."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NEWEST_PTX = (8, 8)
"""The newest PTX that the assembler of CUDA 12.9 reads. Newer texts, so far, differ in their first
line only."""
PLACES = {
    "ptxas": ("nvidia.cuda_nvcc", "nvidia.cu12", "nvidia.cu13"),
    "nvdisasm": ("nvidia.cuda_nvdisasm", "nvidia.cu13", "nvidia.cu12", "nvidia.cuda_nvcc"),
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes of a multiprocessor."""

    registers: int
    """Of one thread."""
    spill_bytes: int
    """Stored and loaded by a thread because its registers did not suffice."""
    static_shared_bytes: int


def find_tool(name: str) -> str:
    """The path of `ptxas` or `nvdisasm`. Raises FileNotFoundError, which says what to install."""
    for package in PLACES[name]:
        top, _, rest = package.partition(".")
        found = importlib.util.find_spec(top)
        for place in (found.submodule_search_locations or ()) if found else ():
            tool = Path(place, rest, "bin", name)
            if tool.exists():
                return str(tool)
    if path := shutil.which(name):
        return path
    raise FileNotFoundError(
        f"got no {name}, wanted NVIDIA's; install the extra `check`: pip install jaxpage[check]"
    )


def entry_names(ptx: str) -> list[str]:
    """The kernels that a PTX text defines."""
    return re.findall(r"\.entry\s+([\w$]+)", ptx)


def assemble(ptx: Path, work: Path) -> tuple[dict[str, Usage], str]:
    """(usage of each kernel, the disassembly) of one PTX file."""
    text = ptx.read_text(encoding="utf-8")
    target = re.search(r"^\.target\s+(\w+)", text, re.M)
    assert target is not None, f"{ptx} names no target"
    own, binary = work / f"{ptx.stem}.own.ptx", work / f"{ptx.stem}.cubin"
    own.write_text(readable(text), encoding="utf-8")
    said = _run([find_tool("ptxas"), "-v", f"-arch={target[1]}", str(own), "-o", str(binary)])
    return parse_usage(said.stderr), _run([find_tool("nvdisasm"), "-c", str(binary)]).stdout


def readable(ptx: str) -> str:
    """The text with its version lowered to what the assembler reads."""
    found = re.search(r"^\.version\s+(\d+)\.(\d+)", ptx, re.M)
    if found is None or (int(found[1]), int(found[2])) <= NEWEST_PTX:
        return ptx
    newest = ".".join(map(str, NEWEST_PTX))
    return f"{ptx[: found.start()]}.version {newest}{ptx[found.end() :]}"


def parse_usage(said: str) -> dict[str, Usage]:
    """What `ptxas -v` printed, by kernel."""
    usage = {}
    for part in said.split("Compiling entry function")[1:]:
        name = re.search(r"'([^']+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if name is None or registers is None or spill is None:
            raise ValueError(f"got {part!r} from ptxas, wanted registers and spills of a kernel")
        shared = re.search(r"(\d+) bytes smem", part)
        usage[name[1]] = Usage(
            registers=int(registers[1]),
            spill_bytes=int(spill[1]) + int(spill[2]),
            static_shared_bytes=int(shared[1]) if shared else 0,
        )
    return usage


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")
    return done
