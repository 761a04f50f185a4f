"""Builds the native CPU backend where there is a C++ compiler; without one the install succeeds.

With LAPRUNE_REQUIRE_NATIVE set, as in the project's own setup, a failed build fails the install.
"""

import os
import sys

from setuptools import Extension, setup

FLAGS = (
    ["/O2", "/std:c++17", "/openmp:experimental"]
    if sys.platform == "win32"
    else [
        "-O3",
        "-std=c++17",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=fast",
        "-fopenmp-simd",
        "-fvisibility=hidden",
        "-pthread",
    ]
)

setup(
    ext_modules=[
        Extension(
            "laprune.backends._native",
            sources=["src/laprune/backends/native/native.cpp"],
            depends=[
                f"src/laprune/backends/native/{name}.hpp"
                for name in ("kernels", "pieces", "rows", "solver", "team")
            ],
            extra_compile_args=FLAGS,
            extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
            language="c++",
            optional=not os.environ.get("LAPRUNE_REQUIRE_NATIVE"),
        )
    ]
)
