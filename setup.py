"""The part of fxguard that is in C, and its page on PyPI; all else is in pyproject.toml.

With ``FXGUARD_WITHOUT_C=1`` that part is left out, and a wheel is one for every system.
"""

import os
import re
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Extension(
    "fxguard.measure._native",
    ["fxguard/measure/_native.c"],
    depends=[  # which it includes
        "fxguard/measure/_attributes.h",
        "fxguard/measure/_operations.h",
        "fxguard/measure/_table.h",
        "fxguard/measure/_losses.h",
        "fxguard/measure/_norms.h",
        "fxguard/measure/_described.h",
    ],
    extra_compile_args=["-O3", "-g0"],  # at -O2 gcc does not vectorize its loops
    py_limited_api=True,
    optional=True,  # where there is no compiler fxguard is installed without it
)
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
RELATIVE = re.compile(r"(?<!`)(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]*)[^)\s]*\)")
NOTE = "\nThe files that this page names are in the source distribution (`fxguard-*.tar.gz`).\n"


def description() -> str:
    """README.md with the names of files in place of relative links and pictures.

    On PyPI no file stands beside it, and a relative link leads nowhere.
    """
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    parts = FENCE.split(readme)  # every second one is a block of code
    parts[::2] = [RELATIVE.sub(named, text) for text in parts[::2]]
    return "".join(parts) + NOTE


def named(link: re.Match) -> str:
    """What stands in place of one relative link or picture."""
    is_picture, text, file = link.groups()
    if is_picture:
        return f"(Picture: {text}; `{file}`)"
    return f"{text} (`{file}`)" if file else text


page = {"long_description": description(), "long_description_content_type": "text/markdown"}
if os.environ.get("FXGUARD_WITHOUT_C") == "1":
    setup(**page)
else:  # one wheel for all versions of Python
    setup(ext_modules=[NATIVE], options={"bdist_wheel": {"py_limited_api": "cp310"}}, **page)
