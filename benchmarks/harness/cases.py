"""One case: a model, a dtype, a mode, a forward or a training step, and every tool on it."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from harness.memory import cuda_bytes, peak_bytes, size_of
from harness.models import MODELS, SHAPES, Inputs, Shape, with_own_code
from harness.timing import FirstCall, Rounds, Spread, clock_of, first_call, interleaved, spread
from harness.tools import EAGER, FXGUARD, PLAIN, TOOLS, Tool, absent

__all__ = ["FORWARD", "TRAINING", "Case", "Measured", "Result", "measure"]

FORWARD, TRAINING = "forward", "training"
WARM_UP = 24  # calls before the first that is measured: then a small model is captured whole


@dataclass(frozen=True, slots=True)
class Case:
    """What is run.

    Attributes:
        model: a key of ``MODELS``.
        shape: its size.
        dtype: of weights and inputs, as torch calls it.
        mode: a key of ``MODES``.
        work: ``"forward"`` in evaluation without gradients, or ``"training"``: forward in training
            and backward. The optimizer, the same for all, is left out.
    """

    model: str
    shape: Shape
    dtype: str
    mode: str
    work: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One tool.

    Attributes:
        seconds: of one call.
        ratio: to the plain model's call of the same round.
        over_plain: seconds above that call.
        first: what the first call took.
        peak_bytes: the most memory in use during a call, weights and inputs included.
    """

    tool: str
    seconds: Spread
    ratio: Spread
    over_plain: Spread
    first: FirstCall
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """All tools on one case.

    Attributes:
        parameters: how many numbers the model's weights are.
        rounds: how often each tool was timed.
        tools: those that ran, the plain model first.
        left_out: those that could not, with the reason.
    """

    case: Case
    parameters: int
    rounds: int
    tools: tuple[Measured, ...]
    left_out: dict[str, str]

    @property
    def plain(self) -> Measured:
        """The model without any tool."""
        return self.tools[0]


def measure(case: Case, tools: Sequence[Tool], rounds: Rounds, device: str) -> Result:
    """Run every tool that works in this mode on copies of one model, side by side.

    Raises:
        fxguard.NonFiniteError: when fxguard detects something; all runs here are healthy.
    """
    torch._dynamo.reset()
    if case.mode not in EAGER:
        wake_compiler(case.mode, case.work, device)
    model, inputs = MODELS[case.model].build(case.shape, getattr(torch, case.dtype), device)
    model.train(case.work == TRAINING)
    calls: dict[str, Callable[[], None]] = {}
    first: dict[str, FirstCall] = {}
    held: dict[str, int] = {}  # bytes between calls
    left_out: dict[str, str] = {}
    for tool in tools:
        before = cuda_bytes(device)
        if case.mode not in tool.modes or (tool.training_only and case.work == FORWARD):
            continue
        if reason := absent(tool):
            left_out[tool.name] = reason
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                call, first[tool.name] = start(tool, case, copy.deepcopy(model), inputs, device)
        except Exception as error:
            if tool.name.startswith((PLAIN, FXGUARD)):
                raise
            left_out[tool.name] = f"raises {in_one_line(error)}"
        else:
            calls[tool.name] = call
            weights = size_of([*model.parameters(), *model.buffers()])
            held[tool.name] = cuda_bytes(device) - before if device == "cuda" else weights
    repeat = MODELS[case.model].repeat
    clock = clock_of(device)
    times = interleaved(
        {name: repeated(call, repeat) for name, call in calls.items()}, clock, rounds
    )
    read = size_of(inputs.values())
    measured = []
    for name, values in times.items():
        pairs = list(zip(values, times[PLAIN], strict=True))
        measured.append(
            Measured(
                name,
                spread(values).scaled(1 / repeat),
                spread([own / plain for own, plain in pairs]),
                spread([own - plain for own, plain in pairs]).scaled(1 / repeat),
                first[name],
                held[name] + read + peak_bytes(calls[name], device),
            )
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Result(case, parameters, len(times[PLAIN]), tuple(measured), left_out)


def start(
    tool: Tool, case: Case, model: nn.Module, inputs: Inputs, device: str
) -> tuple[Callable[[], None], FirstCall]:
    """Make a tool ready: what calls it, and what its first call took."""
    run = tool.build(with_own_code(model), case.mode)
    once = call_of(run, inputs, case.work)
    graphs = case.mode not in EAGER and device == "cuda"

    def call() -> None:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with tool.around():
            once()

    with contextlib.nullcontext() if case.mode in EAGER else empty_caches(device):
        taken = first_call(call, device)
    for _ in range(WARM_UP):
        call()
    return call, taken


def forward(model: Any, inputs: Inputs) -> None:
    with torch.no_grad():
        model(**inputs)


def training_step(model: Any, inputs: Inputs) -> None:
    output = model(**inputs)
    loss: Tensor = output.sum() if isinstance(output, Tensor) else output.loss
    loss.backward()
    model.zero_grad(set_to_none=True)


def call_of(model: Any, inputs: Inputs, work: str) -> Callable[[], None]:
    """A forward without gradients, or one with its backward."""
    once = training_step if work == TRAINING else forward
    return functools.partial(once, model, inputs)


def repeated(call: Callable[[], None], times: int) -> Callable[[], None]:
    """A call that is short is timed many times over."""
    if times == 1:
        return call

    def calls() -> None:
        for _ in range(times):
            call()

    return calls


@functools.cache
def wake_compiler(mode: str, work: str, device: str) -> None:
    """Compile a small model for nothing: whoever is first in a process pays for the others."""
    case = Case("vit", SHAPES["small"]["vit"], "float32", mode, work)
    model, inputs = MODELS[case.model].build(case.shape, torch.float32, device)
    start(TOOLS[PLAIN], case, model.train(work == TRAINING), inputs, device)


@contextlib.contextmanager
def empty_caches(device: str) -> Iterator[None]:
    """Let Inductor find nothing that it compiled before, on disk neither.

    What it does once for each cache, such as compiling its C++ headers, is done before. It works
    in this process alone, so that all of its time is seen.
    """
    with torch._inductor.config.patch(compile_threads=1), fresh_cache():
        x = torch.ones(8, requires_grad=True, device=device)
        torch.compile(lambda x: (x * 2).sin().sum())(x).backward()
        yield


def in_one_line(error: Exception) -> str:
    """An error's type and the start of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:100]}" if text else type(error).__name__
