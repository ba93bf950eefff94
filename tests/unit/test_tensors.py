"""Tensors as bytes: every dtype, every way to lie in memory, bit for bit."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy._core._rational_tests import rational

from asymcheck import Checkpointer, CorruptCheckpoint, IncompatibleCheckpoint, StateError
from asymcheck.device.tensors import Target, can_cast, copy_out, dense_order, new_tensor, slabs
from asymcheck.storage.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def _all_dtypes() -> list[torch.dtype]:
    found = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    return sorted(found, key=str)


def _is_quantized(dtype: torch.dtype) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.empty(1, dtype=dtype).is_quantized


DTYPES = [d for d in _all_dtypes() if not _is_quantized(d)]
QUANTIZED = [d for d in _all_dtypes() if _is_quantized(d)]


def _elements(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Random bits as elements: NaNs with payloads, denormals, infinities, negative zeros."""
    numbers = np.random.default_rng(seed)
    high = 2 if dtype == torch.bool else 256
    raw = numbers.integers(0, high, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)


def _bits(tensor: torch.Tensor) -> bytes:
    """The values in row-major order, read out of the storage element by element."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    raw = storage.numpy().tobytes()
    size, out = tensor.itemsize, []
    for place in itertools.product(*(range(n) for n in tensor.shape)):
        at = tensor.storage_offset() + sum(
            i * stride for i, stride in zip(place, tensor.stride(), strict=True)
        )
        out.append(raw[at * size : (at + 1) * size])
    return b"".join(out)


def _layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    def some(count: int) -> torch.Tensor:
        return _elements(dtype, count, seed=count)

    dense = some(24).view(2, 3, 4)
    found = {
        "contiguous": dense,
        "view of the same storage": dense.view(6, 4),
        "transposed": some(12).view(3, 4).t(),
        "channels_last": some(120).view(2, 4, 5, 3).permute(0, 3, 1, 2),
        "permuted": some(60).view(3, 4, 5).permute(1, 2, 0),
        "expanded": some(4).view(1, 4).expand(3, 4),
        "expanded inside": some(6).view(2, 1, 3).expand(2, 4, 3),
        "one element expanded": some(1).view(()).expand(2, 3),
        "overlapping": some(6).as_strided((4, 3), (1, 1)),
        "overlapping apart": some(40).as_strided((3, 3, 2), (9, 3, 6)),
        "slice of a big storage": some(5000)[10:20],
        "every third": some(40)[1::3],
        "inner block": some(80).view(8, 10)[2:5, 3:7],
        "sizes of one": some(6).view(1, 6, 1, 1),
        "0-dim": some(1).view(()),
        "0-dim inside": some(9)[4],
        "empty": some(0).view(0, 5),
        "parameter": torch.nn.Parameter(some(5), requires_grad=False),
    }
    if dtype.is_complex:
        numbers = some(12).view(3, 4)
        found |= {
            "real part": numbers.real,
            "imaginary part": numbers.imag,
            "conjugate": numbers.conj(),
            "imaginary part of the conjugate": numbers.conj().imag,
        }
    return found


def _saved(state: Mapping[str, object]) -> MemoryStore:
    store = MemoryStore("tensors")
    with Checkpointer(store, state=state) as ckpt:
        ckpt.save(1)
    return store


def _restore(store: MemoryStore, state: Mapping[str, object], **options: object) -> Checkpointer:
    with Checkpointer(store, state=state, read_only=True) as ckpt:
        ckpt.restore(**options)
    return ckpt


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layout_of_every_dtype_comes_back_where_there_was_nothing(
    dtype: torch.dtype,
) -> None:
    before = _layouts(dtype)
    fresh: dict[str, torch.Tensor] = {}
    _restore(_saved({"all": dict(before)}), {"all": fresh})
    assert list(fresh) == list(before)
    for name, tensor in before.items():
        found = fresh[name]
        assert type(found) is torch.Tensor, name
        assert found.dtype == tensor.dtype, name
        assert found.shape == tensor.shape, name
        assert _bits(found) == _bits(tensor), name
        if dense_order(tensor) is None:
            assert found.is_contiguous(), name
        else:
            assert found.stride() == tensor.stride(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layout_of_every_dtype_comes_back_into_live_memory_of_any_layout(
    dtype: torch.dtype,
) -> None:
    before = _layouts(dtype)
    store = _saved(before)
    for style in ("same", "contiguous", "reversed", "slice"):
        live = {name: _live_like(tensor, style) for name, tensor in before.items()}
        places = {name: (t.data_ptr(), t.stride()) for name, t in live.items()}
        _restore(store, live)
        for name, tensor in before.items():
            assert _bits(live[name]) == _bits(tensor), (style, name)
            assert (live[name].data_ptr(), live[name].stride()) == places[name]


def _live_like(tensor: torch.Tensor, style: str) -> torch.Tensor:
    """A tensor of zeros of the same shape and dtype, laid out in one of four ways."""

    def zeros(*shape: int) -> torch.Tensor:
        size = math.prod(shape) * tensor.itemsize
        return torch.zeros(size, dtype=torch.uint8).view(tensor.dtype).view(shape)

    shape = tensor.shape
    if style == "same":
        reach = sum((n - 1) * s for n, s in zip(shape, tensor.stride(), strict=True) if n)
        found = zeros(reach + 1).as_strided(shape, tensor.stride())
        found = found.conj() if tensor.is_conj() else found
        return found._neg_view() if tensor.is_neg() else found
    if style == "reversed":
        return zeros(*reversed(shape)).permute(tuple(range(len(shape) - 1, -1, -1)))
    if style == "slice":
        around = zeros(*(n + 3 for n in shape))
        return around[tuple(slice(1, n + 1) for n in shape)]
    return zeros(*shape)


def test_what_lies_around_a_live_slice_is_left_alone() -> None:
    around = torch.full((6, 7), 9, dtype=torch.int16)
    _restore(_saved({"x": torch.arange(6, dtype=torch.int16).view(2, 3)}), {"x": around[1:3, 2:5]})
    expected = torch.full((6, 7), 9, dtype=torch.int16)
    expected[1:3, 2:5] = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert torch.equal(around, expected)


def test_a_payload_of_a_nan_survives_also_without_one_dense_run_of_memory() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC0BEEF, 0x7FFFFFFF, 0x7F812345], dtype=torch.int32)
    nans = torch.cat([patterns, patterns | -(2**31)]).view(torch.float32)
    state = {"flat": nans, "apart": nans.repeat(2).view(8, 2)[:, 1], "turned": nans.view(2, 4).t()}
    live = {name: torch.zeros_like(t) for name, t in state.items()}
    live["turned"] = torch.zeros(4, 2)
    _restore(_saved(state), live)
    assert {n: _bits(t) for n, t in live.items()} == {n: _bits(t) for n, t in state.items()}


def test_a_large_tensor_that_lies_across_chunks_comes_back_into_another_layout() -> None:
    rows, columns = 3001, 2003  # 24 MB: the chunks' edges fall inside rows
    tensor = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    store = _saved({"x": tensor, "turned": tensor.t()})
    live = {"x": torch.zeros(columns, rows, dtype=torch.int32).t()}
    live["turned"] = torch.zeros(columns, rows, dtype=torch.int32)
    _restore(store, live)
    assert torch.equal(live["x"], tensor)
    assert torch.equal(live["turned"], tensor.t())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 100])
def test_elements_of_sixteen_bytes_need_no_memory_aligned_to_sixteen(count: int) -> None:
    numbers = _elements(torch.complex128, count)
    kinds = {
        "plain": numbers,
        "conjugate": numbers.conj(),
        "apart": numbers.repeat(2).view(-1, 2).t(),
    }
    state: dict[str, torch.Tensor] = {}
    for name, tensor in kinds.items():
        state |= {f"eight bytes before {name}": torch.ones(1).double(), name: tensor}
    live = {name: torch.zeros_like(t) for name, t in state.items()}
    live["plain"] = torch.zeros(count, dtype=torch.complex128).conj()
    store = _saved(state)
    _restore(store, live)
    assert {n: _bits(t) for n, t in live.items()} == {n: _bits(t) for n, t in state.items()}
    narrow = {name: torch.zeros_like(live[name], dtype=torch.complex64) for name in kinds}
    _restore(_saved(kinds), narrow, dtype_policy="cast")
    for name, tensor in kinds.items():
        assert _bits(narrow[name]) == _bits(tensor.to(torch.complex64))


def test_a_parameter_that_needs_gradients_stays_the_same_leaf() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    live = torch.nn.Parameter(torch.zeros(3, 4))
    live.grad = torch.ones(3, 4)
    inside = {"w": live}
    _restore(_saved({"w": weight, "inside": {"w": weight}}), {"w": live, "inside": inside})
    assert _bits(live) == _bits(weight)
    assert inside["w"] is live
    assert live.requires_grad
    assert live.is_leaf
    assert torch.equal(live.grad, torch.ones(3, 4))


def test_a_tensor_of_inference_mode_is_saved_and_restored() -> None:
    with torch.inference_mode():
        value, live = torch.randn(3, 4), torch.zeros(4, 3).t()
    assert live.is_inference()
    _restore(_saved({"x": value}), {"x": live})
    assert _bits(live) == _bits(value)


def _pack_bytes(store: MemoryStore) -> int:
    return sum(entry.nbytes for entry in store.list() if entry.name.endswith(".pack"))


def test_one_tensor_under_two_names_is_stored_once_and_a_view_of_it_apart() -> None:
    tensor = torch.randn(1000)
    many = {"a": tensor, "b": tensor, "c": tensor.detach(), "d": tensor.view(10, 100)}
    store = _saved(many)
    assert 4000 <= _pack_bytes(store) - _pack_bytes(_saved({"a": tensor})) < 5000
    live = {name: torch.zeros(1000) for name in "abc"} | {"d": torch.zeros(10, 100)}
    _restore(store, live)
    assert {_bits(t) for t in live.values()} == {_bits(tensor)}


def test_two_tensors_into_one_is_refused_whichever_is_first() -> None:
    store = _saved({"a": torch.zeros(3), "b": torch.ones(3)})
    both = torch.full((3,), 7.0)
    with pytest.raises(IncompatibleCheckpoint, match="b: live one tensor with a"):
        _restore(store, {"a": both, "b": both})
    assert torch.equal(both, torch.full((3,), 7.0))


@pytest.mark.parametrize("many", [False, True], ids=["in one chunk", "in two chunks"])
def test_different_values_for_one_live_element_are_never_taken_silently(many: bool) -> None:
    columns = 1_050_000 if many else 5
    value = torch.arange(columns).to(torch.complex128).repeat(2, 1)
    good, value = value, value.clone()
    value[1, -1] = 9
    live = torch.zeros(1, columns, dtype=torch.complex128).expand(2, columns)
    with pytest.raises(CorruptCheckpoint, match=r"elements share memory.*build it anew"):
        _restore(_saved({"x": value}), {"x": live})
    _restore(_saved({"x": good}), {"x": live})
    assert torch.equal(live, good)


# --- what is refused --------------------------------------------------------


class _Wrapped(torch.Tensor):
    """Values in another tensor, as quantized and float8 subclasses have them."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class _Flattens(torch.Tensor):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def _quantized(dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.empty(4, dtype=dtype)


def _quantized_with_scale() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)


def _csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def _nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"to_dense\(\)"),
    "sparse csr": (_csr, r"to_dense\(\)"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), r"to_dense\(\)"),
    "meta": (lambda: torch.empty(3, device="meta"), "no values"),
    "meta parameter": (lambda: torch.nn.Linear(2, 2, device="meta").weight, "no values"),
    "quantized": (_quantized_with_scale, "scale and zero point"),
    "nested": (lambda: _nested(torch.strided), "parts in a list"),
    "nested jagged": (lambda: _nested(torch.jagged), "supported"),
    "uninitialised": (lambda: torch.nn.LazyLinear(3).weight, "forward pass"),
    "uninitialised buffer": (lambda: torch.nn.LazyBatchNorm1d().running_mean, "forward pass"),
    "wrapping subclass": (lambda: _Wrapped(torch.ones(3)), "_Wrapped"),
    "flattening subclass": (lambda: torch.ones(3).as_subclass(_Flattens), "_Flattens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_run_of_values_is_refused_by_its_path_before_any_byte_is_written(
    name: str, tmp_path: Path
) -> None:
    make, hint = REFUSED[name]
    state: dict[str, object] = {"deep": [torch.ones(1000), {"er": make()}], "after": torch.ones(3)}
    with Checkpointer(tmp_path / "run", state={"x": state}) as ckpt:
        with pytest.raises(StateError, match=hint) as caught:
            ckpt.save(1)
        assert caught.value.key == "x/deep/[1]/er"
        assert list((tmp_path / "run").glob("step-*")) == []
        del state["deep"]
        ckpt.save(1)
    assert len(list((tmp_path / "run").glob("step-*"))) == 1


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_every_quantized_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(StateError, match="scale and zero point"):
        _saved({"x": _quantized(dtype)})


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_saved_is_no_place_to_load_into_either(name: str) -> None:
    make, _ = REFUSED[name]
    live = make()
    shape = () if "uninitialised" in name or "nested" in name else tuple(live.shape)
    store = _saved({"x": torch.ones(shape), "y": torch.ones(2)})
    other = torch.zeros(2)
    with pytest.raises((StateError, IncompatibleCheckpoint), match="x"):
        _restore(store, {"y": other, "x": live}, dtype_policy="cast")
    assert torch.equal(other, torch.zeros(2))


# --- casting ----------------------------------------------------------------


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_a_cast_that_was_asked_for_does_what_torch_does_and_nothing_else_is_cast(
    source: torch.dtype,
) -> None:
    value = torch.tensor([0, 1, 1, 0], dtype=torch.uint8).repeat_interleave(source.itemsize)
    if source.is_floating_point or source.is_complex:
        value = torch.tensor([0.0, 1.5, -2.0, 0.25])
        value = value.to(source) if can_cast("float32", source) else _elements(source, 4)
    else:
        value = value.view(source)
    store = _saved({"x": value})
    for target in DTYPES:
        live = torch.zeros(4 * target.itemsize, dtype=torch.uint8).view(target)
        if source == target:
            continue
        with pytest.raises(IncompatibleCheckpoint) as caught:
            _restore(store, {"x": live})
        names = (str(target).removeprefix("torch."), str(source).removeprefix("torch."))
        assert caught.value.mismatched == (("x", *names),)
        if can_cast(names[1], target):
            assert not (source.is_complex and not target.is_complex)
            report = _restore(store, {"x": live}, dtype_policy="cast").report
            assert report.cast_keys == ("x",)
            assert _bits(live) == _bits(value.to(target)), target
        else:
            with pytest.raises(IncompatibleCheckpoint):
                _restore(store, {"x": live}, dtype_policy="cast")
            assert _bits(live) == bytes(4 * target.itemsize)


def test_the_usual_casts_are_possible_and_dropping_an_imaginary_part_is_not() -> None:
    usual = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
    assert all(can_cast(str(a).removeprefix("torch."), b) for a in usual for b in usual)
    assert can_cast("float32", torch.complex64)
    assert not can_cast("complex64", torch.float32)
    assert not can_cast("no_such_dtype", torch.float32)


# --- numpy ------------------------------------------------------------------

NUMPY = {
    "float": np.linspace(0, 1, 12).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "steps": np.arange(20)[::3],
    "backwards": np.arange(20)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "big-endian": np.arange(5, dtype=">i4"),
    "half": np.arange(5, dtype=np.float16),
    "long double": np.arange(5, dtype=np.longdouble),
    "complex": np.arange(5) * 1j,
    "bool": np.array([True, False]),
    "text": np.array(["a", "bcd", "\0x", "é😀"]),
    "bytes": np.array([b"a", b"bc"]),
    "void": np.array([b"abc", b"d\0e"], dtype="V3"),
    "date": np.array(["2024-01-01", "NaT"], dtype="M8[D]"),
    "duration": np.array([1, 2], dtype="m8[ns]"),
    "0-dim": np.array(3.5),
    "empty": np.empty((0, 5), np.int8),
    "no text": np.array(["", ""]),
}


class _Void(np.void):
    """Bytes that mean something to somebody."""


def test_every_kind_of_numpy_array_comes_back() -> None:
    fresh: dict[str, np.ndarray] = {}
    live = {k: np.zeros(v.shape, v.dtype) for k, v in NUMPY.items()}
    arrays = dict(live)
    store = _saved({"all": dict(NUMPY)})
    _restore(store, {"all": fresh})
    _restore(store, {"all": live})
    for name, array in NUMPY.items():
        assert live[name] is arrays[name], name
        for found in (fresh[name], live[name]):
            assert type(found) is np.ndarray
            assert found.dtype.str == array.dtype.str, name
            assert found.shape == array.shape, name
            assert found.tobytes() == array.tobytes(), name


def test_a_live_array_keeps_its_memory_whatever_its_layout() -> None:
    around = np.zeros((6, 8))
    live = {"x": around[1:4, ::2]}
    top = np.asfortranarray(np.zeros((3, 4)))
    value = np.arange(12.0).reshape(3, 4)
    before = live["x"]
    _restore(_saved({"in": {"x": value}, "top": value}), {"in": live, "top": top})
    assert live["x"] is before
    assert np.array_equal(around[1:4, ::2], value)
    assert np.array_equal(top, value)
    assert around.sum() == value.sum()


def test_elements_of_an_odd_size_may_lie_across_chunks() -> None:
    value = np.arange(1_500_000).astype("U3")  # 18 MB in elements of 12 bytes
    live = {"x": np.zeros_like(value)}
    fresh: dict[str, np.ndarray] = {}
    store = _saved({"x": {"x": value}})
    _restore(store, {"x": live})
    _restore(store, {"x": fresh})
    assert np.array_equal(live["x"], value)
    assert np.array_equal(fresh["x"], value)


@pytest.mark.parametrize(
    "array",
    [
        np.array([{}, None]),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["a", "bc"], dtype=np.dtypes.StringDType()),
        np.array([rational(1, 2)]),  # as bfloat16 is: a type of another package, text "<V8"
        np.zeros(2, dtype=(_Void, 8)),
    ],
    ids=["objects", "structured", "variable text", "of another package", "own scalars"],
)
def test_an_array_that_holds_more_than_plain_values_is_refused(array: np.ndarray) -> None:
    with pytest.raises(StateError, match=r"plain columns") as caught:
        _saved({"x": {"y": array}})
    assert caught.value.key == "x/y"


@pytest.mark.parametrize("value", [rational(1, 2), np.zeros(1, dtype=(_Void, 8))[0]])
def test_a_scalar_of_another_packages_type_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(StateError, match="cannot be saved") as caught:
        _saved({"x": {"y": value}})
    assert caught.value.key == "x/y"


def test_a_live_array_that_cannot_take_the_values_is_reported() -> None:
    store = _saved({"x": np.arange(3)})
    for live in (np.arange(4), np.arange(3.0)):
        with pytest.raises(IncompatibleCheckpoint, match=r"x: live numpy:.*checkpoint numpy:<i8"):
            _restore(store, {"x": live})
    fixed = np.arange(3)
    fixed.flags.writeable = False
    with pytest.raises(StateError, match="read-only"):
        _restore(store, {"x": fixed})


# --- properties -------------------------------------------------------------

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_slabs_are_the_range_in_order_and_nothing_else(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = np.arange(count).reshape(shape)
    pieces = [numbers[slab].reshape(-1) for slab in slabs(shape, start, stop)]
    found = np.concatenate([np.empty(0, np.int64), *pieces])
    assert found.tolist() == list(range(start, stop))
    assert len(pieces) <= 2 * len(shape) + 1
    assert all(piece.size for piece in pieces)


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape = draw(shapes)
    strides = tuple(draw(st.integers(0, 12)) for _ in shape)
    return shape, strides, draw(st.integers(0, 3))


def _strided_zeros(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    reach = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    raw = torch.zeros(reach * dtype.itemsize, dtype=torch.uint8)
    return raw.view(dtype).as_strided(shape, strides, offset)


@given(
    strided(),
    st.sampled_from([torch.int32, torch.bfloat16, torch.int4, torch.complex128, torch.bool]),
    st.integers(0, 1000),
    st.data(),
)
def test_any_strides_are_copied_out_and_put_back_in_pieces_of_any_size(
    layout: tuple[tuple[int, ...], tuple[int, ...], int],
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    shape, strides, offset = layout
    source = _strided_zeros(dtype, shape, strides, offset)
    whole = source.as_strided((source.untyped_storage().nbytes() // dtype.itemsize,), (1,), 0)
    whole.copy_(_elements(dtype, whole.numel(), seed)) if dtype != torch.int4 else None
    order = dense_order(source) or ()
    image = np.zeros(source.numel() * dtype.itemsize, np.uint8)
    copy_out(source, order, image)
    if not order:
        assert image.tobytes() == _bits(source)
    other = _strided_zeros(dtype, shape, strides, offset)
    fresh = new_tensor(dtype, shape, order, torch.device("cpu"))
    count = source.numel()
    cuts = sorted(data.draw(st.sets(st.integers(0, count), max_size=4)) | {0, count})
    targets = [Target("x", other, dtype, order), Target("x", fresh, dtype, order)]
    for lo, hi in itertools.pairwise(cuts):
        for target in targets:
            target.put(lo * dtype.itemsize, image[lo * dtype.itemsize : hi * dtype.itemsize])
    assert _bits(other) == _bits(source)
    assert _bits(fresh) == _bits(source)


@given(strided(), st.data())
def test_a_value_that_another_element_shares_is_put_or_refused_never_lost(
    layout: tuple[tuple[int, ...], tuple[int, ...], int], data: st.DataObject
) -> None:
    live = _strided_zeros(torch.int16, *layout)
    count = live.numel()
    values = np.array(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), "i2")
    cut = data.draw(st.integers(0, count))
    target = Target("some/key", live, torch.int16, ())
    wanted: dict[int, set[int]] = {}
    for place, value in zip(np.ndindex(live.shape), values.tolist(), strict=True):
        at = sum(i * s for i, s in zip(place, live.stride(), strict=True))
        wanted.setdefault(at, set()).add(value)

    def put_all() -> None:
        target.put(0, values[:cut].view(np.uint8))
        target.put(2 * cut, values[cut:].view(np.uint8))

    if all(len(each) == 1 for each in wanted.values()):
        put_all()
        assert live.reshape(-1).tolist() == values.tolist()
    else:
        with pytest.raises(IncompatibleCheckpoint, match="some/key"):
            put_all()


@given(shapes, st.permutations(range(4)))
def test_a_dense_tensor_has_an_order_that_makes_it_again(
    shape: tuple[int, ...], order: list[int]
) -> None:
    order = [d for d in order if d < len(shape)]
    tensor = torch.empty([shape[d] for d in order]).permute(
        [order.index(d) for d in range(len(order))]
    )
    found = dense_order(tensor)
    assert found is not None
    again = new_tensor(torch.float32, tensor.shape, found, torch.device("cpu"))
    assert again.shape == tensor.shape
    # The stride along a dimension of one element means nothing.
    meant = [d for d, size in enumerate(shape) if size > 1]
    assert [again.stride(d) for d in meant] == [tensor.stride(d) for d in meant]
