"""The part of fxguard that is in C; all else about the package is in pyproject.toml.

With ``FXGUARD_WITHOUT_C=1`` it is left out, and a wheel is one for every system.
"""

import os

from setuptools import Extension, setup

NATIVE = Extension(
    "fxguard.measure._native",
    ["fxguard/measure/_native.c"],
    extra_compile_args=["-O3"],  # at -O2 gcc does not vectorize its loops
    py_limited_api=True,
    optional=True,  # where there is no compiler fxguard is installed without it
)

if os.environ.get("FXGUARD_WITHOUT_C") == "1":
    setup()
else:  # one wheel for all versions of Python
    setup(ext_modules=[NATIVE], options={"bdist_wheel": {"py_limited_api": "cp310"}})
