"""Builds the native CPU kernels where a C++ compiler is there; all else is in pyproject.toml.

Without one, or without jaxlib's headers, the package installs as pure Python and computes in XLA.
In place, for a checkout: python setup.py build_ext --inplace
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path("jaxpage/native")
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno"]
TABLES = {"kPortable": []}
"""The kernels are compiled once for each of these tables; a flag more a set of instructions."""
if platform.machine() in ("x86_64", "AMD64"):
    TABLES["kAvx2"] = ["-mavx2", "-mfma"]
    TABLES["kAvx512"] = ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma"]


class BuildKernels(build_ext):
    """Compiles one source several times, with flags of its own each time."""

    def build_extension(self, ext: Extension) -> None:
        import jax.ffi

        headers = ["-isystem", jax.ffi.include_dir()]  # their warnings are not ours
        objects = self.compiler.compile(
            [str(HERE / "ffi.cpp")], self.build_temp, extra_postargs=[*FLAGS, *headers]
        )
        for table, flags in TABLES.items():
            objects += self.compiler.compile(
                [str(HERE / "kernels.cpp")],
                str(Path(self.build_temp) / table),
                macros=[("JAXPAGE_KERNELS", table)],
                extra_postargs=[*FLAGS, *flags],
            )
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(path), target_lang="c++", extra_postargs=["-pthread"]
        )


setup(
    ext_modules=[Extension("jaxpage.native._kernels", [], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
