"""``fxguard.testing``: stability in a dtype, finiteness, searches, profiles of headroom."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxguard import testing
from support import zoo
from support.stories.overflows import OVERFLOW
from support.stories.rounded import PRECISION

from ..folders import empty_folder
from ..records import Cases, Record, raised_by
from .forecasts import of_a_story
from .stories import model_of

NAMES = ("cnn", "lstm", "encoder", "twice", "in_place", "t5", "llama", "vit")
DTYPES = ("float16", "bfloat16", "float32")
STORIES = {**OVERFLOW, **PRECISION}

# The option that asks for a backward had another name once.
KNOWN = inspect.signature(testing.assert_finite).parameters
GRADIENTS = "gradients" if "gradients" in KNOWN else "backward"


def cases() -> Cases:
    """Models of the zoo and stories of half precision."""
    for name in NAMES:
        for dtype in DTYPES:
            run = functools.partial(stable_in_the_zoo, name, dtype)
            yield f"stable/{name}/{dtype}", run
            if name not in ("in_place", "t5", "llama", "vit"):
                yield f"stable/{name}/{dtype}/backward", functools.partial(run, **{GRADIENTS: True})
    for place, name in enumerate(STORIES):
        yield f"stable/{name}", functools.partial(stable_story, name, **{GRADIENTS: place % 2 == 1})
        if place % 2:
            yield f"finite/{name}", functools.partial(finite, name, **{GRADIENTS: place % 4 == 1})
        if place % 6 == 3:
            yield f"profile/{name}", functools.partial(profile, name)
    for function in SEARCHED:
        yield f"overflow/{function.__name__}", functools.partial(searched, function)


def told(found: testing.Stability) -> Record:
    """The text, and the numbers of all operations."""
    return {"text": str(found), "stable": bool(found), "all": list(map(str, found.deviations))}


def stable_in_the_zoo(name: str, dtype: str, **options: Any) -> Record:
    """A model of the zoo against float64."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)
    model = entry.model()
    return told(testing.numerically_stable(model, *args, dtype=dtype, **options, **kwargs))


def stable_story(name: str, **options: Any) -> Record:
    """A story on its own numbers, in half precision."""
    model, inputs, _ = of_a_story(name)
    return told(testing.numerically_stable(model, *inputs, **options))


def finite(name: str, **options: Any) -> Record:
    """The assertion on a story."""
    story = STORIES[name]
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in story.inputs]
    made = testing.assert_finite(model_of(story.forward), *leaves, **options)
    return {"made": str(made)}


def profile(name: str) -> Record:
    """The file of a story in float32, and what is said of half precision and of larger numbers."""
    model, inputs, _ = of_a_story(name)
    with empty_folder() as folder:
        file = folder / "profile.txt"
        testing.check_profile(model, inputs, file, update=True)
        larger = tuple(x * 8 if x.is_floating_point() else x for x in inputs)
        half = tuple(x.half() if x.is_floating_point() else x for x in inputs)
        tried = (inputs, larger, half)
        said = [raised_by(functools.partial(checked, model, x, file)) for x in tried]
        return {"file": file.read_text("utf-8").splitlines(), "said": said}


def checked(model: nn.Module, inputs: Any, file: Path) -> Record:
    """Nothing, where the profile of a model is that of a file."""
    testing.check_profile(model, inputs, file)
    return {}


def softmax_by_hand(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def healthy(x: Tensor) -> Tensor:
    return torch.tanh(x)


def small_layer(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (4,)) * 3


SEARCHED: tuple[Callable[[Tensor], Tensor], ...] = (softmax_by_hand, norm, healthy, small_layer)


def searched(function: Callable[[Tensor], Tensor]) -> Record:
    """What a search with a fixed seed finds."""
    strategy = testing.tensors(torch.float16, (2, 4), min_value=-1e4, max_value=1e4)
    found = testing.find_overflow(function, strategy, max_examples=40, seed=1)
    return {"found": str(found)}
