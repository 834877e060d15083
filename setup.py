"""Builds the native CPU kernels where a C++ compiler is there; all else is in pyproject.toml.

Without one, or without jaxlib's headers, the package installs as pure Python and computes in XLA.
In place, for a checkout: python setup.py build_ext --inplace
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path("jaxpage/native")
CALLS = ("ffi.cpp", "ffi_attention.cpp", "ffi_matmul.cpp", "parallel.cpp")
SOURCES = ("attention.cpp", "matmul_few.cpp", "matmul_many.cpp", "rowwise.cpp")
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno"]
SETS: dict[str, list[str]] = {"portable": []}
"""The kernels are compiled once for each of these sets of instructions."""
if platform.machine() in ("x86_64", "AMD64"):
    SETS["avx2"] = ["-mavx2", "-mfma"]
    SETS["avx512"] = ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma"]


class BuildKernels(build_ext):
    """Compiles the kernels several times, with flags of their own each time."""

    def build_extension(self, ext: Extension) -> None:
        headers = ["-isystem", _header_directory()]  # their warnings are not ours
        objects = self.compiler.compile(
            [str(HERE / name) for name in CALLS], self.build_temp, extra_postargs=[*FLAGS, *headers]
        )
        for name, flags in SETS.items():
            objects += self.compiler.compile(
                [str(HERE / source) for source in SOURCES],
                str(Path(self.build_temp) / name),
                macros=[("JAXPAGE_SET", name)],
                extra_postargs=[*FLAGS, *flags],
            )
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(path), target_lang="c++", extra_postargs=["-pthread"]
        )


def _header_directory() -> str:
    """Where jaxlib keeps XLA's headers for custom calls. Importing it would load all of XLA."""
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        raise CompileError("got no jaxlib at build time, wanted its headers; install jaxlib")
    return str(Path(jaxlib.origin).parent / "include")


KERNELS = Extension(
    "jaxpage.native._kernels",
    sources=[str(HERE / name) for name in (*CALLS, *SOURCES)],
    depends=[str(path) for path in sorted(HERE.glob("*.h"))],
    optional=True,  # where it does not compile, the package is pure Python
)

if __name__ == "__main__":  # benchmarks/checks/sanitize.py builds the same sources
    setup(ext_modules=[KERNELS], cmdclass={"build_ext": BuildKernels})
