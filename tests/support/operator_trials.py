"""Runs one sample of PyTorch's operator database plain and guarded, and compares the two.

What is compared against is torch alone: the same module without fxguard. What differs between two
plain runs is torch's own chance. What differs between Python and TorchDynamo without fxguard is
TorchDynamo's own. Both are counted and set apart; anything else that differs is a mistake.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fxguard
from fxguard.guard.guard import GuardedModel

__all__ = ["Operation", "Result", "Subject", "operations", "try_operation", "try_subject"]

SCALES = (1e-3, 30.0)  # of a healthy sample; what they leave finite is healthy as well
LARGE = (1e2, 1e3, 1e6, 1e12, 1e25, 1e37)  # until something overflows
SEED = 7
NO_NAN = frozenset(["linalg.eigvals"])  # torch 2.13 on a CPU ends the process when it is given one


@contextlib.contextmanager
def flags_stay_open() -> Iterator[None]:
    """Import torch's test utilities without their switch that freezes all global flags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        yield


# What is tried.


@dataclass(frozen=True)
class Subject:
    """One module and one call of it."""

    make: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    raises: bool = False  # whether torch refuses the call


class Calls(nn.Module):
    """One operation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, first: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.function(first, *args, **kwargs)


@dataclass(frozen=True)
class Operation:
    """An entry of a database: its samples in one dtype, and calls that have to raise."""

    name: str
    dtypes: frozenset[torch.dtype]
    samples: Callable[[torch.dtype], Iterator[Subject]]
    errors: Callable[[], Iterator[Subject]] = lambda: iter(())


def operations(database: str) -> list[Operation]:
    """Everything that one of the three databases holds."""
    with flags_stay_open():
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
        from torch.testing._internal.hop_db import hop_db
    if database == "module_db":
        return [module_entry(info) for info in module_db if not info.is_lazy]
    return [function_entry(info) for info in {"op_db": op_db, "hop_db": hop_db}[database]]


def function_entry(info: Any) -> Operation:
    def samples(dtype: torch.dtype) -> Iterator[Subject]:
        gradients = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        for sample in info.sample_inputs("cpu", dtype, requires_grad=gradients):
            args = (sample.input, *sample.args)
            yield Subject(lambda: Calls(info.op), args, sample.kwargs)

    def errors() -> Iterator[Subject]:
        if info.error_inputs_func is not None:
            for error in info.error_inputs("cpu"):
                sample = error.sample_input
                args = (sample.input, *sample.args)
                yield Subject(lambda: Calls(info.op), args, sample.kwargs, raises=True)

    dtypes = frozenset(info.supported_dtypes("cpu")) or frozenset([torch.float32])
    return Operation(info.full_name, dtypes, samples, errors)


def module_entry(info: Any) -> Operation:
    def samples(dtype: torch.dtype) -> Iterator[Subject]:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=training
            )
            for given in inputs:
                built, called = given.constructor_input, given.forward_input

                def make(built: Any = built, training: bool = training) -> nn.Module:
                    torch.manual_seed(SEED)
                    return info.module_cls(*built.args, **built.kwargs).to(dtype).train(training)

                yield Subject(make, called.args, called.kwargs)

    return Operation(info.name, frozenset(info.supported_dtypes("cpu")), samples)


# What came of a run.


@dataclass(frozen=True)
class Ran:
    """Everything that a run of a module leaves behind."""

    bits: tuple[Any, ...]  # of each leaf of the output, then of each gradient, then random state
    outputs: tuple[Tensor, ...]
    error: Exception | None = None
    gradients: int = 0


def bits(value: Any) -> Any:
    """What is equal when two leaves agree in every bit, NaN included."""
    if not isinstance(value, Tensor):
        return repr(value)
    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.copy_(dense(value).reshape(-1))
    raw = flat.view(torch.uint8).numpy().tobytes()
    return type(value), value.dtype, value.shape, value.layout, raw


def copied(value: Any, scale: float = 1.0) -> Any:
    """The same arguments in memory of their own, floating-point numbers times ``scale``."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf_copy = leaf.detach().clone()
        if scale != 1.0 and is_float(leaf):
            leaf_copy = leaf_copy * scale
        return leaf_copy.requires_grad_(leaf.requires_grad)

    return tree_map(copy, value)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def finite(values: Any) -> bool:
    """Whether no floating-point tensor holds NaN or inf."""
    return all(bool(dense(v).isfinite().all()) for v in tree_leaves(values) if is_float(v))


def dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def run(model: Any, call: tuple[Any, Any], parameters: list[Tensor], backward: bool) -> Ran:
    """Run a module on copies of its arguments; an exception is a result as well."""
    args, kwargs = copied(call)
    torch.manual_seed(SEED)
    state: list[Any] = []
    try:
        with torch.set_grad_enabled(backward):
            output = model(*args, **kwargs)
        outputs = tree_leaves(output)
        state = [bits(leaf) for leaf in outputs]
        tensors = tuple(leaf.detach() for leaf in outputs if isinstance(leaf, Tensor))
    except Exception as error:
        return Ran((), (), error)
    random = bits(torch.get_rng_state())
    gradients: list[Any] = []
    ends = [leaf for leaf in outputs if is_float(leaf) and leaf.requires_grad]
    starts = [*tree_leaves((args, kwargs)), *parameters]
    starts = [leaf for leaf in starts if isinstance(leaf, Tensor) and leaf.requires_grad]
    if backward and ends and starts:
        try:
            gradients = list(
                torch.autograd.grad(
                    ends, starts, [torch.ones_like(end) for end in ends], allow_unused=True
                )
            )
        except Exception as error:
            return Ran((*state, random), tensors, error)
    return Ran((*state, random, *map(bits, gradients)), tensors, None, len(gradients))


def same(one: Ran, other: Ran) -> bool:
    """Equal in every bit, or ended by exceptions of one type."""
    return type(one.error) is type(other.error) and one.bits == other.bits


# The comparison.


@dataclass
class Result:
    """What was counted, what was set apart, and what is wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    apart: dict[str, set[str]] = field(default_factory=dict)  # the reason, and the names
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.counts.update(other.counts)
        self.wrong += other.wrong
        for reason, names in other.apart.items():
            self.apart.setdefault(reason, set()).update(names)

    def set_apart(self, reason: str, name: str) -> None:
        self.counts[reason] += 1
        self.apart.setdefault(reason, set()).add(name)


@dataclass
class Trial:
    """One module, plain and guarded."""

    name: str
    subject: Subject
    mode: str
    result: Result
    reports: list[fxguard.types.Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call = (self.subject.args, self.subject.kwargs)
        torch._dynamo.reset()
        self.model = self.subject.make()
        self.plain = self.compiled(self.model)
        self.guarded_model = fxguard.instrument(
            self.subject.make(), on_detect=self.reports.append, replay=self.mode == "replay"
        )
        self.guarded = self.compiled(self.guarded_model)

    def compiled(self, model: nn.Module) -> Any:
        """What is called: in one of the modes the user compiles it."""
        return torch.compile(model, backend="aot_eager") if self.mode == "aot_eager" else model

    def run_plain(self, call: Any, backward: bool = False) -> Ran:
        return run(self.plain, call, list(self.model.parameters()), backward)

    def run_guarded(self, call: Any, backward: bool = False) -> Ran:
        self.reports.clear()
        stance = "force_eager" if self.mode == "python" else "default"
        with torch.compiler.set_stance(stance):
            return run(self.guarded, call, list(self.guarded_model.parameters()), backward)

    def mistake(self, what: str) -> None:
        self.result.wrong.append(f"{self.name} ({self.mode}): {what}")

    # Healthy.

    def fails_without_fxguard(self) -> bool:
        """Whether TorchDynamo fails by itself on what fails when guarded."""
        failed = self.run_guarded(self.call, True).error and self.run_by_dynamo().error
        return failed is not None

    def same(self) -> Ran | None:
        """Compare a run; the plain one where the two agree and there is an output to go on with."""
        counts = self.result.counts
        plain, again = self.run_plain(self.call, True), self.run_plain(self.call, True)
        ours = self.run_guarded(self.call, True)
        if not same(plain, again) or "empty" in self.name:  # uninitialised memory may repeat itself
            self.result.set_apart("not deterministic in torch", self.name)
            return None
        counts["compared"] += 1
        counts["compared gradients"] += plain.gradients
        counts["exceptions"] += plain.error is not None
        if same(plain, ours):
            return None if plain.error else plain
        dynamo = self.run_by_dynamo()
        if same(dynamo, ours):
            self.result.set_apart("as TorchDynamo alone", self.name)
            return None if dynamo.error else dynamo
        how = f"{plain.error!r} / {ours.error!r} / {dynamo.error!r} by TorchDynamo"
        self.mistake(f"differs: {how if plain.error or ours.error else 'other bits'}")
        return None

    def run_by_dynamo(self) -> Ran:
        torch._dynamo.reset()
        backend = "aot_eager" if self.mode == "aot_eager" else "eager"
        model = self.subject.make()
        ran = run(torch.compile(model, backend=backend), self.call, list(model.parameters()), True)
        torch._dynamo.reset()
        return ran

    def healthy(self, plain: Ran) -> None:
        """No alarm, and the ranges of the root's frame are those of the plain output."""
        if not finite(plain.outputs) or not finite(self.call):
            self.result.counts["samples that are not finite themselves"] += 1
            return
        self.result.counts["healthy samples"] += 1
        if self.reports:
            self.mistake(f"false alarm: {self.reports[0].message}")
        self.ranges(plain)

    def ranges(self, plain: Ran) -> None:
        """What the last frame says of the outputs, against their smallest and largest magnitude."""
        if self.mode == "replay":
            return  # healthy batches have no numbers there
        frames = fxguard.guard_of(self.guarded_model).frames()
        wanted = [range_of(tensor) for tensor in plain.outputs]
        found = [
            (row.abs_min, row.abs_max) if row.abs_max is not None else row.note
            for row in frames[-1].rows
            if row.label.startswith("output") and row.note not in ("not a tensor", "None")
        ]
        self.result.counts["ranges"] += len(wanted)
        if len(found) != len(wanted) or not all(map(close, found, wanted)):
            self.mistake(f"ranges {found} instead of {wanted}")

    def scaled(self) -> None:
        """Other healthy numbers in the same shapes: no alarm either."""
        for scale in SCALES:
            call = copied(self.call, scale)
            plain = self.run_plain(call)
            if plain.error is None and finite(plain.outputs) and finite(call):
                self.run_guarded(call)
                self.result.counts["scaled samples"] += 1
                if self.reports:
                    self.mistake(f"false alarm at {scale:g} times: {self.reports[0].message}")

    # Bad.

    def planted(self) -> None:
        """A NaN in an argument is blamed on the argument."""
        leaves = tree_leaves(self.call)
        position = next((i for i, v in enumerate(leaves) if is_plantable(v)), None)
        if position is None or not finite(self.call) or self.name in NO_NAN:
            return
        call = with_nan(copied(self.call), position)
        plain = self.run_plain(call)
        if plain.error is not None or finite(plain.outputs):
            self.result.counts["planted NaN that reach nothing, or raise"] += 1
            return
        ours = self.run_guarded(call)
        self.result.counts["planted NaN"] += 1
        if ours.error is not None:
            self.mistake(f"a planted NaN: {ours.error!r}")
        elif not self.reports:
            self.mistake("a planted NaN is not reported")
        elif not any(holds_input(origin) for origin in self.reports[0].origins):
            self.mistake(f"a planted NaN: {self.reports[0].message}")
        else:
            first = next(o for o in self.reports[0].origins if holds_input(o))
            if first.nan_count not in (None, 1):
                self.mistake(f"a planted NaN is counted {first.nan_count} times")

    def overflow(self) -> None:
        """Finite arguments, and a result that is not: the operation is blamed."""
        for scale in LARGE:
            call = copied(self.call, scale)
            if not finite(call):
                return
            plain = self.run_plain(call)
            if plain.error is not None or finite(plain.outputs):
                continue
            self.run_guarded(call)
            self.result.counts["overflows"] += 1
            if not self.reports:
                self.mistake(f"bad at {scale:g} times its numbers, and not reported")
            else:
                self.blamed(plain, self.reports[0], scale)
            return

    def blamed(self, plain: Ran, report: fxguard.types.Report, scale: float) -> None:
        origin = report.origins[0]
        if not origin.is_operation:
            self.mistake(f"at {scale:g} times: {origin.message}, and every argument is finite")
            return
        self.result.counts["overflows blamed on the operation"] += 1
        frames = fxguard.guard_of(self.guarded_model).frames()
        alone = sum(frame.source is not None for frame in frames) == 1
        bad = [t for t in plain.outputs if is_float(t) and not finite(t)]
        if not alone or len(bad) != 1 or bad[0].is_complex() or origin.nan_count is None:
            return
        numbers = dense(bad[0])
        wanted = (
            int(numbers.isnan().sum()),
            int(numbers.isposinf().sum()),
            int(numbers.isneginf().sum()),
        )
        self.result.counts["counts of bad elements"] += 1
        found = (origin.nan_count, origin.posinf_count, origin.neginf_count)
        if found != wanted:
            self.mistake(f"at {scale:g} times: counts {found} instead of {wanted}")


def range_of(tensor: Tensor) -> Any:
    """Smallest and largest magnitude, from float64; "empty" without elements."""
    numbers = dense(tensor)
    if not numbers.numel():
        return "empty"
    numbers = numbers.to(torch.complex128 if numbers.is_complex() else torch.float64).abs()
    return float(numbers.min()), float(numbers.max())


def close(found: Any, wanted: Any) -> bool:
    """Equal up to the modulus of a complex number and what float64 knows of an integer."""
    if isinstance(found, str) or isinstance(wanted, str):
        return bool(found == wanted)
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found, wanted, strict=True))


def is_plantable(value: Any) -> bool:
    return is_float(value) and value.numel() > 0 and value.layout is torch.strided


def with_nan(call: Any, position: int) -> Any:
    """The same arguments with a NaN in the first element of one tensor."""
    numbers = itertools.count()

    def plant(leaf: Any) -> Any:
        if next(numbers) != position:
            return leaf
        leaf = leaf.detach()
        leaf[(0,) * leaf.dim()] = math.nan
        return leaf

    return tree_map(plant, call)


def holds_input(origin: fxguard.types.Origin) -> bool:
    """Whether an argument is blamed."""
    return not origin.is_operation and not origin.what.startswith(("weight", "buffer", "constant"))


def try_operation(operation: Operation, mode: str, dtype: torch.dtype, limit: int) -> Result:
    """So many samples of an operation, and as many calls that it refuses."""
    result = Result()
    torch.manual_seed(SEED)
    for subject in itertools.islice(operation.samples(dtype), limit):
        try_subject(operation.name, subject, mode, result)
    if dtype is torch.float32:
        for subject in itertools.islice(operation.errors(), limit):
            try_subject(operation.name, subject, mode, result)
    return result


def try_subject(name: str, subject: Subject, mode: str, result: Result) -> None:
    """Everything that one sample is good for.

    A fault of fxguard while it captures is no reason to leave the operation to Python. One of
    TorchDynamo is, and so is what torch refuses: then the operation is tried as users have it.
    """
    result.counts["calls that torch refuses" if subject.raises else "samples"] += 1
    for leave_what_fails in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GuardedModel, "fallback", leave_what_fails)
            trial = Trial(name, subject, mode, result)
            if not leave_what_fails and trial.fails_without_fxguard():
                continue
            plain = trial.same()
            if plain is not None:
                trial.healthy(plain)
                trial.scaled()
                trial.planted()
                trial.overflow()
        return
