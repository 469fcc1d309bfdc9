"""What runs the operations of a script, in C and in Python: the same records, and nothing kept."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxguard.batch.loss import Loss
from fxguard.measure import native
from fxguard.records import Role
from fxguard.script import operations
from fxguard.script.noted import noted_at
from fxguard.script.operations import (
    MOST_DEPTH,
    MOST_KNOWN,
    UNKNOWN,
    PlainOperations,
    is_record,
    kind_of_code,
    operations_with,
    pair_of,
    place_of,
)


class Heard:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.bad: list[Any] = []
        self.others: list[Any] = []
        self.errors: list[BaseException] = []
        self.objections: list[BaseException] = []
        self.kind_of: Callable[[Any], int] = kind_of_code
        self.pair_of = pair_of

    def turned_bad(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        self.bad.append(func)

    def other(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.others.append(func)

    def inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **(kwargs or {}))

    def apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        return "apart"

    def raised(self, error: BaseException, func: Any, args: Any, kwargs: Any) -> None:
        self.errors.append(error)

    def objected(self, error: BaseException) -> None:
        self.objections.append(error)

    def otherwise(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Mode(TorchFunctionMode):
    """A mode whose operations go to what it is given."""

    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self.leaves: dict[int, weakref.ref[Tensor]] = {}
        self.all = operations_with(heard, self.leaves)
        self.all.is_direct = True
        self.all.__self__ = self
        vars(self)["__torch_function__"] = self.all


@pytest.fixture(params=["C", "Python"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both are tried."""
    if request.param == "Python":
        monkeypatch.setattr(native, "Operations", None)
        monkeypatch.setattr(operations, "PAIRS_IN_C", False)
    elif native.Operations is None:
        pytest.skip("the C extension is not built")
    return request.param


def program(keep: dict[str, Any]) -> None:
    """Operations of many kinds."""
    x = keep["x"] = torch.linspace(-1, 1, 6).reshape(2, 3)
    y = keep["y"] = torch.cat([x, x * 2], dim=1)
    y[0, 1:2] = 3.0
    keep["one"], keep["two"] = y.chunk(2, 1)
    keep["sum"] = torch.sum(input=y, dim=(0, 1), keepdim=True)
    w = keep["w"] = torch.ones(3, requires_grad=True)
    keep["loss"] = torch.nn.functional.softplus(x @ w, beta=2).mean()
    keep["bad"] = torch.log(x - x)
    keep["whole"] = x.long()


def told(record: Any) -> Any:
    """What a record says, without identities."""
    if is_record(record):
        numbers = repr(record.pair), record.depth, record.path, record.dtype
        return record.func, place_of(record), *numbers, told(record.args), told(record.kwargs)
    if isinstance(record, (tuple, list)):
        return type(record), [told(each) for each in record]
    if isinstance(record, dict):
        return {name: told(each) for name, each in record.items()}
    return "unknown" if record is UNKNOWN else record


def test_both_forms_keep_the_same_records(form: str) -> None:
    """Functions, places, arguments, magnitudes, depths; at the nodes of autograd, too."""
    found = []
    for make in operations_with, PlainOperations:
        heard, keep = Heard(), dict[str, Any]()
        mode = Mode(heard)
        mode.all = vars(mode)["__torch_function__"] = make(heard, mode.leaves)
        mode.all.is_direct, mode.all.__self__ = True, mode
        with mode:
            program(keep)
        records = {name: told(mode.all.of(each)) for name, each in keep.items()}
        record, given = noted_at(keep["loss"].grad_fn)
        assert records.pop("whole") is None
        assert all(each is not None for each in records.values())
        assert [id(x) for x, _ in given.values()] == []
        node = keep["loss"].grad_fn.next_functions[0][0].next_functions[0][0]
        assert [x is keep["w"] for x, _ in noted_at(node)[1].values()] == [False, True]
        assert list(mode.leaves) == [id(keep["w"])]
        found.append((records, told(record), mode.all.count, heard.bad, heard.others))
    assert found[0] == found[1]
    assert found[0][3] == [torch.log]
    assert found[0][0]["loss"][1][0] == __file__


def test_results_arguments_and_exceptions_are_those_of_the_function() -> None:
    """The same objects come back, and the same error, behind what is told of it."""
    heard = Heard()
    run = operations_with(heard, {}).run
    error = KeyError("mine")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    def gives(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    one = object()
    args, kwargs = run(gives, (one, 2), {"name": one})
    assert args[0] is one
    assert kwargs["name"] is one
    assert run(gives, (), None) == ((), {})
    with pytest.raises(KeyError) as raised:
        run(fails, (), {})
    assert raised.value is error
    mode = Mode(heard)
    with pytest.raises(RuntimeError, match="size of tensor") as wrong, mode:
        torch.ones(2) + torch.ones(3)
    assert heard.errors == [wrong.value]
    assert run(Tensor.backward, (), None) == "apart"


def test_what_fails_while_it_is_looked_at_is_told_and_the_script_goes_on() -> None:
    """The result is there; an error that is raised anew comes out."""
    heard = Heard()
    mistake = ValueError("of whoever looks")

    def objects(code: Any) -> int:
        raise mistake

    heard.kind_of = objects
    with Mode(heard):
        assert torch.ones(2).tolist() == [1, 1]
    assert heard.objections == [mistake]

    def raises(error: BaseException) -> None:
        raise error

    heard.objected = raises  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="of whoever looks"), Mode(heard):
        torch.ones(2)


def test_nothing_is_kept() -> None:
    """No tensor, no argument, and no operation of the past."""
    mode = Mode(Heard())
    big, dims = torch.ones(100), (0, -1)
    before = sys.getrefcount(big), sys.getrefcount(dims), sys.getrefcount(mode.all)
    with mode:
        made = torch.sum(big, dim=0, keepdim=True)
        gone = weakref.ref(made)
        del made
    assert gone() is None
    with mode:
        for _ in range(3 * MOST_KNOWN):
            torch.amax(big[None], dims)
    assert sys.getrefcount(big) == before[0]
    assert sys.getrefcount(mode.all) < before[2] + 3
    # Records of tensors that are gone stay until there are many.
    assert sys.getrefcount(dims) < before[1] + 2 * MOST_KNOWN


def test_memory_does_not_grow() -> None:
    """A chain that never ends takes what its last part takes."""
    mode, x = Mode(Heard()), torch.ones(3)

    def more(times: int) -> Tensor:
        y = x
        for _ in range(times):
            y = torch.maximum(y * 0.5, x)
        return y

    with mode:
        more(3 * MOST_KNOWN)
        tracemalloc.start()
        try:
            more(MOST_KNOWN)
            gc.collect()  # whose turn would come at another moment each time
            first, _ = tracemalloc.get_traced_memory()
            more(8 * MOST_KNOWN)
            gc.collect()
            second, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # Of up to so many records, wherever the table is on its way to the next time it forgets.
    # Sixteen times as many were made, of 1.1 kB each.
    assert second - first < 2000 * 2 * MOST_KNOWN


def test_a_long_chain_is_let_go() -> None:
    """With gradients it is as long as that of autograd, and goes one by one."""
    mode, w = Mode(Heard()), torch.ones(1, requires_grad=True)
    with mode:
        y = w
        for _ in range(3000 if isinstance(mode.all, PlainOperations) else 30_000):
            y = y + 0
    record = mode.all.of(y)
    assert record is not None
    assert record.depth > 10 * MOST_DEPTH
    del y, record, mode
    gc.collect()


def test_a_mode_and_its_hooks_are_let_go() -> None:
    """They refer to each other."""
    heard = Heard()
    mode = Mode(heard)
    with mode:
        torch.ones(2)
    references = weakref.ref(heard), weakref.ref(mode)
    del heard, mode
    gc.collect()
    assert [each() for each in references] == [None, None]


def test_a_tensor_that_came_in_the_place_of_another_has_no_record() -> None:
    """Nor has one that was written since; a write that was seen has its own record."""
    mode = Mode(Heard())
    with mode:
        x = torch.ones(2)
        y = x + 1
        assert mode.all.of(y) is not None
        y.mul_(2)
        written = mode.all.of(y)
    assert written is not None
    assert written.func == Tensor.mul_
    assert is_record(written.args[0])
    y.mul_(2)
    assert mode.all.of(y) is None
    assert mode.all.of(torch.ones(2)) is None


def test_tensors_that_count_no_writes_are_followed() -> None:
    """As everything is under inference mode."""
    heard = Heard()
    mode = Mode(heard)
    with torch.inference_mode(), mode:
        y = (torch.zeros(2) / 0).sum()
    record = mode.all.of(y)
    assert not heard.objections
    assert record is not None
    assert is_record(record.args[0])


OTHERS: dict[str, Callable[[], Any]] = {
    "empty": lambda: torch.ones(0) + 1,
    "meta": lambda: torch.ones(2, device="meta") + 1,
    "complex": lambda: torch.ones(2, dtype=torch.complex64) + 1,
    "sparse": lambda: torch.eye(2).to_sparse() * 2,
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2,
    "vmap": lambda: torch.func.vmap(torch.sin)(torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_cannot_be_read_is_left(make: Callable[[], Any]) -> None:
    """No error comes of it."""
    heard = Heard()
    with Mode(heard):
        make()
    assert not heard.objections
    assert not heard.bad


def test_numbers_that_cannot_be_read_are_counted() -> None:
    """Those that may be bad: not booleans, and nothing that is empty."""
    mode = Mode(Heard())
    with mode:
        x = torch.ones(2)
        _ = x > 0, x.to(torch.complex64), x.to_sparse(), x[:0], x.long()
        _ = torch.ones(2, device="meta")
    assert mode.all.unread == 2
    assert mode.all.count == 2


def test_keywords_are_let_go() -> None:
    """Also of an operation that made integers while something was bad."""
    heard = Heard()
    run = Mode(heard).all
    run.has_bad = True
    kwargs = {"dim": 0}
    before = sys.getrefcount(kwargs)
    for _ in range(10):
        run.run(torch.argmax, (torch.ones(3),), kwargs)
    assert sys.getrefcount(kwargs) == before
    assert heard.others.count(torch.argmax) == 10


def test_c_asks_python_of_what_may_belong_to_a_loss(form: str) -> None:
    """As `Loss.may_read` says: tensors and weights of it, containers, views, backwards, writes."""
    if form == "Python":
        pytest.skip("it asks of everything")
    asked: list[Any] = []

    class Asks(Heard):
        def otherwise(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return super().otherwise(func, types, args, kwargs)

    loss, known, weight = Loss(0), torch.ones(2, 2), torch.ones(2, requires_grad=True)
    loss.batch.given_later(known, "output")
    loss.weights.maps.append({id(weight): (Role.WEIGHT, "w")})  # type: ignore[arg-type]
    other = torch.zeros(2)
    mode = Mode(Asks())
    mode.all.is_direct, mode.all.followed = False, loss.followed(lambda: "a compiler")
    said: list[Any] = []
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        *((torch.add, (other, 1), {}), (torch.add, (known, 1), {})),
        *((torch.add, (other, weight), {}), (torch.add, (other,), {"other": known})),
        *((torch.cat, ([other, other],), {}), (Tensor.size, (known,), {})),
        *((Tensor.dim, (weight,), {}), (torch.numel, (known,), {})),
        *((Tensor.item, (known[0, 0],), {}), (Tensor.sum, (known,), {"dim": (0, 1)})),
        *((Tensor.grad.__get__, (weight,), {}), (Tensor.T.__get__, (known,), {})),
        *((Tensor.T.__get__, (torch.ones(2, 2),), {}), (Tensor.grad.__set__, (weight, other), {})),
        *((Tensor.grad.__set__, (known, None), {}), (Tensor.backward, (weight.sum(),), {})),
    ]
    for func, args, kwargs in calls:
        before = len(asked)
        mode.all(func, (), args, kwargs)
        said.append(len(asked) > before)
    assert said == [loss.may_read(*call) for call in calls]
    assert True in said
    assert False in said
    mode.all.followed = None
    mode.all(torch.add, (), (other, 1))
    assert asked[-1] is torch.add
    with pytest.raises(TypeError):
        mode.all.followed = ({}, [])


class TellsLater(Heard):
    """Numbers of tensors that are not in memory come later."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Any] = []
        self.pair_of = lambda tensor: Later() if tensor.is_meta else pair_of(tensor)  # type: ignore

    def waits(self, record: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        self.waiting.append((record, record.func, len(args), kwargs, type(result)))


class Later:
    """As `LatePair`."""

    pair = (1.0, 2.0)


def test_numbers_that_come_later() -> None:
    """A record has them once somebody asks; what made no numbers is told as long as some wait."""
    heard = TellsLater()
    mode = Mode(heard)
    with mode:
        x = torch.ones(2, device="meta")
        y = torch.add(x, 1, alpha=2)
        parts = y.split(1)
        assert not heard.others
        mode.all.awaits = True
        y.argmax()
        torch.ones(2).sum().item()
    assert [func for _, func, *_ in heard.waiting][:2] == [torch.ones, torch.add]
    assert heard.waiting[1][2:] == (2, {"alpha": 2}, Tensor)
    record = mode.all.of(y)
    assert record is heard.waiting[1][0]
    assert isinstance(record.later, Later)
    assert record.pair == (1.0, 2.0)
    assert [mode.all.of(part).path for part in parts] == [0, 1]  # type: ignore[union-attr]
    assert {getattr(func, "__name__", "") for func in heard.others} >= {"argmax", "item"}
    assert mode.all.unread == 0
    there = torch.ones(2)
    with mode:
        known = there * 2
    record = mode.all.of(known)
    assert record is not None
    assert record.later is None
    assert record.pair == (2.0, 2.0)


def test_what_waits_keeps_no_tensor(form: str) -> None:
    """Neither the record nor what has its numbers."""
    mode = Mode(TellsLater())
    mode.all.__self__ = None
    for _ in range(50):
        y = mode.all.run(torch.add, (torch.ones(3, device="meta"), 1), {})
    later = weakref.ref(mode.all.of(y).later)  # type: ignore[union-attr]
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
    assert later() is not None
