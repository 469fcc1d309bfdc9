"""Ranges that are read in C, against numpy and against the slow way; what is left to that."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxguard.measure import native, traceable
from support.exact_ranges import WIDE_ENOUGH_FOR_TORCH, often
from support.needs import needs_program

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "fxguard/measure/_native.c"
OPERATIONS = ROOT / "tests/script/test_operations.py"

INTEGERS = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> str:
    """Without one nothing here can be built."""
    return needs_program("cc", "gcc", "clang")


def test_it_is_built() -> None:
    """Where there is a compiler, installing fxguard has built it."""
    assert native.is_built
    assert native.abs_min_max(torch.tensor([-3.0, 2.0])) == (2.0, 3.0)


@st.composite
def views(draw: Any) -> Tensor:
    """A tensor of any dtype and strides: in any order, with gaps, expanded, of one element."""
    dtype = draw(st.sampled_from([*(form.dtype for form in WIDE_ENOUGH_FOR_TORCH), *INTEGERS]))
    sizes = draw(st.lists(st.integers(1, 5), max_size=5))
    numbers = np.random.default_rng(draw(st.integers(0, 99))).normal(0, 90, math.prod(sizes))
    if isinstance(dtype, str):
        tensor = torch.from_numpy(numbers.astype(np.int64)).to(getattr(torch, dtype))
    else:
        tensor = torch.from_numpy(numbers).to(dtype)
    tensor = tensor.view(sizes).permute(draw(st.permutations(range(len(sizes)))))
    for axis in range(tensor.ndim):
        start, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
        if start < tensor.shape[axis]:
            tensor = tensor[(slice(None),) * axis + (slice(start, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(at := draw(st.integers(0, tensor.ndim)))
        tensor = tensor.expand(*(3 if axis == at else -1 for axis in range(tensor.ndim)))
    return tensor


@often
@given(views())
def test_every_view_is_read_by_its_own_elements(tensor: Tensor) -> None:
    """Whatever the order of the strides and the gaps between elements."""
    low, high = traceable.abs_min_max(tensor)
    assert native.abs_min_max(tensor) == (float(low), float(high))


@often
@given(
    st.sampled_from(INTEGERS[1:]).flatmap(
        lambda dtype: arrays.arrays(
            dtype, st.integers(1, 40), elements=arrays.from_dtype(np.dtype(dtype))
        )
    )
)
def test_integers_are_rounded_as_float32(values: np.ndarray) -> None:
    """The most negative one, too, whose magnitude its dtype does not hold."""
    magnitudes = [float(np.float32(abs(int(value)))) for value in values]
    assert native.abs_min_max(torch.from_numpy(values)) == (min(magnitudes), max(magnitudes))


def test_any_byte_of_a_bool_is_one() -> None:
    """Memory that was never written may hold others than 0 and 1."""
    tensor = torch.tensor([0, 151], dtype=torch.uint8).view(torch.bool)
    assert native.abs_min_max(tensor) == (0.0, 1.0)


@pytest.mark.parametrize("form", WIDE_ENOUGH_FOR_TORCH, ids=lambda form: str(form.dtype))
def test_every_number_of_16_bits_and_the_edges_of_others(form: Any) -> None:
    """The number that is given back has the bits of that in memory, subnormal ones too."""
    patterns = range(1 << 16) if form.bits == 16 else form.edges
    for pattern in patterns:
        number = abs(form.decode(pattern))
        found = native.abs_min_max(form.tensor([pattern]))
        assert found is not None
        assert found[1] == number or (math.isnan(found[1]) and math.isnan(number))


@pytest.mark.parametrize("dtype", [form.dtype for form in WIDE_ENOUGH_FOR_TORCH], ids=str)
@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 4097, (1 << 20) + 3])
def test_no_element_is_left_out(dtype: torch.dtype, size: int) -> None:
    """The ends of what one instruction reads, and of the pieces of a large tensor."""
    for place in {0, 1, size // 2, size - 2, size - 1} & set(range(size)):
        tensor = torch.full((size,), -2.0, dtype=dtype)
        tensor[place] = math.inf
        assert native.abs_min_max(tensor) == (math.inf if size == 1 else 2.0, math.inf)
        tensor[place] = math.nan
        found = native.abs_min_max(tensor)
        assert found is not None
        assert math.isnan(found[1])


@often
@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=9))
def test_pairs_are_packed_as_doubles(pairs: list[tuple[float, float]]) -> None:
    """Bit for bit, NaN and zeros with a sign, too."""
    found = native.packed(pairs)
    assert found is not None
    assert bytes(found) == np.array(pairs, dtype=np.float64).tobytes()


NO_PAIRS = {
    "no list": ((1.0, 2.0),),
    "an iterator": iter([(1.0, 2.0)]),
    "a number": [1.0],
    "none": [None],
    "a list of two": [[1.0, 2.0]],
    "one number": [(1.0,)],
    "three numbers": [(1.0, 2.0, 3.0)],
    "an integer": [(1, 2.0)],
    "a number of numpy": [(np.float64(1), np.float64(2))],
    "tensors": [(torch.tensor(1.0), torch.tensor(2.0))],
    "tensors behind numbers": [(1.0, 2.0), (torch.tensor(1.0), torch.tensor(2.0))],
}


@pytest.mark.parametrize("items", NO_PAIRS.values(), ids=NO_PAIRS)
def test_what_is_no_list_of_pairs_is_not_packed(items: Any) -> None:
    """It is left to others, and not one part of it is taken."""
    assert native.packed(items) is None


def test_packing_keeps_nothing() -> None:
    """Neither a list that is packed nor one that is not holds on to anything more."""
    pair, other = (float("1.5"), 2.5), object()
    for items in ([pair], [pair, other]):
        before = sys.getrefcount(pair), sys.getrefcount(other), sys.getrefcount(items)
        for _ in range(10):
            native.packed(items)
        assert (sys.getrefcount(pair), sys.getrefcount(other), sys.getrefcount(items)) == before


class Subclass(Tensor):
    """Its memory may mean anything."""


def functional() -> Any:
    return torch._to_functional_tensor(torch.ones(3))


OTHERS = {
    "no tensor": lambda: [1.0],
    "none": lambda: None,
    "empty": lambda: torch.ones(4, 3)[:0],
    "meta": lambda: torch.ones(3, device="meta"),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "without memory": lambda: torch._efficientzerotensor((3,)),
    "functional": functional,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_it_cannot_read_is_left_to_others(make: Any) -> None:
    """Never a number of other memory, and never an error."""
    assert native.abs_min_max(make()) is None
    assert native.abs_min_max(torch.ones(2)) == (1.0, 1.0)  # no error was left behind


def test_values_of_a_transform_are_left_to_others() -> None:
    """A batched tensor, and one that torch.func differentiates, have no memory of their own."""
    found: list[Any] = []

    def look(x: Tensor) -> Tensor:
        found.append(native.abs_min_max(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert found == [None, None]


def test_a_reader_asks_what_it_was_given_where_it_cannot_read() -> None:
    """What is not plain memory, and whatever a mode or a transform sees; its errors are its own."""
    asked: list[Any] = []

    def otherwise(value: Any) -> Any:
        asked.append(value)
        return "otherwise"

    def wrong(value: Any) -> Any:
        raise KeyError(value)

    reader, plain = native.reading_or(otherwise), torch.tensor([-3.0, 2.0])
    assert reader(plain) == (2.0, 3.0)
    assert not asked
    for make in OTHERS.values():
        assert reader(make()) == "otherwise"
    assert len(asked) == len(OTHERS)
    with _Raises():
        assert reader(plain) == "otherwise"
    assert asked.pop() is plain

    def look(x: Tensor) -> Tensor:
        assert reader(x) == reader(plain) == "otherwise"  # the transform may be of anybody
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    assert reader(plain) == (2.0, 3.0)
    with pytest.raises(KeyError, match="nothing"):
        native.reading_or(wrong)("nothing")


@often
@given(st.lists(st.tuples(st.floats(), st.floats(min_value=0) | st.just(math.nan)), max_size=9))
def test_magnitudes_that_were_packed_are_finite_or_not(pairs: list[tuple[float, float]]) -> None:
    """The larger ones decide: where one is NaN or inf the value is bad, whatever the smaller is."""
    numbers = native.packed(pairs)
    assert numbers is not None
    assert native.all_finite(numbers) is bool(np.isfinite([high for _, high in pairs]).all())


def test_a_reason_for_no_number_is_no_bad_number() -> None:
    """An empty tensor is healthy; and nothing but what was packed is looked at."""
    numbers = native.packed([(traceable.EMPTY, traceable.EMPTY), (0.0, sys.float_info.max)])
    assert numbers is not None
    assert native.all_finite(numbers)
    wrong: Any = b"\0" * 16
    with pytest.raises(TypeError):
        native.all_finite(wrong)


def test_autograd_and_modes_do_not_notice() -> None:
    """Nothing is dispatched: no node, no version, no call that a mode would see."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    result = weight * 2
    before = result._version, result.grad_fn
    with _Raises():
        assert native.abs_min_max(result) == (2.0, 4.0)
        assert native.abs_min_max(weight) == (1.0, 2.0)
    assert (result._version, result.grad_fn) == before


class _Raises(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class Holder:
    """Something with two containers."""

    def __init__(self, *items: int) -> None:
        self.first: list[int] = []
        self.last = dict.fromkeys(items)


def test_a_container_with_something_is_found() -> None:
    """In any object, under any of the names; what is gone has nothing, and each has to have all."""
    assert native.any_filled is not None
    holders = [Holder(), Holder(), Holder(1)]
    references = list(map(weakref.ref, holders))
    assert native.any_filled(references, ("first", "last"))
    assert not native.any_filled(references, ("first",))
    assert not native.any_filled(references[:2], ("first", "last"))
    del holders[2]
    assert not native.any_filled(references, ("first", "last"))
    with pytest.raises(KeyError, match="other"):
        native.any_filled(references, ("first", "other"))


def test_a_state_tells_of_each_write() -> None:
    """As torch tells it; what is gone, or does not count its writes, is left to others."""
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3)), torch.empty(0), torch.eye(2)[1:]]
    references = tuple(map(weakref.ref, tensors))
    tensors[0].add_(1)
    versions, places = tuple(x._version for x in tensors), tuple(x.data_ptr() for x in tensors)
    assert versions[0] == 1
    assert native.state_of(references) == (versions, places)
    assert native.versions_of(tuple(tensors)) == versions
    with torch.inference_mode():
        uncounted = torch.ones(1)
    for other in uncounted, torch.eye(2).to_sparse():
        assert native.state_of((*references, weakref.ref(other))) is None
    assert [native.versions_of((*tensors, other)) for other in (uncounted, 3)] == [None, None]
    del tensors[0]
    assert native.state_of(references) is None


class Other(Tensor):
    """A type of tensor that C leaves to others."""


def test_tensors_are_finite_where_c_has_read_them_all() -> None:
    """A NaN or inf in any of them is noticed, and so is a tensor that C leaves to others."""
    fine = torch.ones(2), torch.zeros(3, 4).T, torch.tensor([3, 4])
    assert native.are_finite(fine)
    assert native.are_finite(())
    bad = torch.tensor([1.0, math.nan]), torch.tensor(-math.inf), torch.full((2,), math.inf).half()
    unread = (
        torch.ones(2).as_subclass(Other),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
    )
    for other in (*bad, *unread, torch.ones(0), torch.ones(2) * 1j, 3):
        assert not native.are_finite((*fine, other))


def test_leaves_without_a_hook_are_noticed() -> None:
    """A leaf that requires a gradient has to have the hook that was noted, and not another one."""
    assert native.all_hooked is not None
    leaf, fixed = torch.ones(2, requires_grad=True), torch.ones(2)
    values = (leaf, fixed, leaf * 2, 3, None)
    handle = leaf.register_hook(lambda gradient: None)
    assert native.all_hooked(values, {id(leaf): handle})
    assert not native.all_hooked(values, {})
    assert not native.all_hooked((*values, fixed.as_subclass(Other)), {id(leaf): handle})
    fixed.requires_grad_()
    assert not native.all_hooked(values, {id(leaf): handle})
    handle.remove()
    other = leaf.register_hook(lambda gradient: None)
    assert not native.all_hooked(values[:1], {id(leaf): handle})
    assert native.all_hooked(values[:1], {id(leaf): other})


def test_a_tensor_is_below_the_largest_of_the_same_run() -> None:
    """One that is 0, or not finite, is below nothing, and neither is what C cannot read."""
    now = [1]
    known = [(1, 4.0)]
    is_below = native.below(known, lambda: now[0])
    numbers = [1.0, 4.0, 0.0, math.inf, math.nan]
    assert [is_below(torch.tensor([number])) for number in numbers] == [True] + [False] * 4
    assert not is_below(None)
    assert not is_below(torch.eye(2).to_sparse())
    assert torch.func.vmap(lambda x: x * is_below(x))(torch.ones(2)).tolist() == [0, 0]
    known[0] = 1, 0.5
    assert not is_below(torch.ones(1))
    known[0] = 1, 2.0
    now[0] = 2
    assert not is_below(torch.ones(1))


def test_what_gives_the_number_of_the_run_may_raise() -> None:
    """Its error is the caller's."""
    is_below = native.below([(1, 4.0)], lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        is_below(torch.ones(1))


def test_many_threads_at_once() -> None:
    """Each reads its own large tensor while the others do."""
    wrong: list[float] = []

    def work(size: float) -> None:
        tensor = torch.full((1 << 19,), -size)
        wrong.extend(size for _ in range(20) if native.abs_min_max(tensor) != (size, size))

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


LARGE = {
    "dense": lambda x: x,
    "transposed": lambda x: x.view(1024, -1).T,
    "gaps": lambda x: x.view(1024, -1)[:, 1:-1],
    "every other": lambda x: x[::2],
    "a short last axis": lambda x: x.view(3, 1024, 1024)[:, 1:, 1:],
}


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("view", LARGE.values(), ids=LARGE)
def test_a_large_tensor_is_read_whole(view: Any, threads: int) -> None:
    """However it lies, and however many threads torch has: each element, and no other."""
    base = torch.full((3 << 20,), -2.0)
    tensor, before = view(base), torch.get_num_threads()
    others = base.clone()
    view(others).fill_(0)
    base[others != 0] = math.nan  # what is not in the view
    places = torch.randint(0, tensor.numel(), (20,), generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(threads)
    try:
        assert native.abs_min_max(tensor) == (2.0, 2.0)
        for place in (0, tensor.numel() - 1, *places.tolist()):
            at = np.unravel_index(place, tensor.shape)
            tensor[at] = 3.0
            assert native.abs_min_max(tensor) == (2.0, 3.0)
            tensor[at] = 1.0
            assert native.abs_min_max(tensor) == (1.0, 2.0)
            tensor[at] = 2.0
    finally:
        torch.set_num_threads(before)


def test_large_tensors_go_to_the_threads_of_torch() -> None:
    """Torch's function is found: nothing here would be wrong without it, only slow."""
    assert native._parallel_for()


def _read_in_child(queue: Any) -> None:
    torch.set_num_threads(1)  # as DataLoader does in its workers
    queue.put(native.abs_min_max(torch.full((1 << 19,), -3.0)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_reads_too() -> None:
    """No thread of ours is left behind by a fork, and none of torch's is waited for."""
    assert native.abs_min_max(torch.ones(1 << 19)) == (1.0, 1.0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == (3.0, 3.0)
    child.join()


def file_of(library: str, compiler: str) -> str:
    """Where the compiler has a library."""
    command = [compiler, f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


RUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fxguard.measure._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules["fxguard.measure._native"] = module
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no sanitizers here")
def test_sanitizers_find_nothing(tmp_path: Path, compiler: str) -> None:
    """With an extension that looks at each access: this file, and operations of scripts."""
    include = sysconfig.get_paths()["include"]
    library = tmp_path / "_native.abi3.so"
    flags = ["-g", "-O1", "-shared", "-fPIC", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror", f"-I{include}"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    # The sanitizer looks for the function that throws exceptions of C++ when it is loaded.
    runtime = " ".join(file_of(name, compiler) for name in ("libasan.so", "libstdc++.so.6"))
    command = [sys.executable, "-c", RUN, str(library), "-q", "-p", "no:cacheprovider"]
    command += ["-s", "-m", "not slow", "-k", "not forked", __file__, str(OPERATIONS)]
    env = dict(os.environ, LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
