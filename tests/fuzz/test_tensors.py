"""Arrays to the device and back: any shape, order, dtype and values, on tensors of their own and in arenas."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import wgattn
from tests.fuzz.depth import both_depths, explore
from wgattn import ArgumentError, CapacityError, ShapeError
from wgattn.gpu import Arena
from wgattn.gpu.tensor import DTYPES

ANY_DTYPE = st.one_of(
    st.sampled_from([np.dtype(d) for d in ("f4", "f2", "u4", "i4", "f8", "i8", "bool", ">f4", ">i4", ">f8")]),
    st.sampled_from([np.dtype(d) for d in ("i1", "u1", "u2", "u8", "c8", "O", "U2", "S3", "M8[s]")]),
    arrays_of.scalar_dtypes(),
)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """An array of any dtype, dense or a view: transposed, with steps, reversed, broadcast."""
    dtype = draw(ANY_DTYPE)
    array = np.zeros(draw(arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)), dtype)
    if dtype.kind in "biuf":
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        raw = rng.integers(0, 256, array.nbytes, np.uint8) if dtype.kind != "b" else rng.integers(0, 2, array.nbytes, np.uint8)
        array = np.frombuffer(raw.tobytes(), dtype).reshape(array.shape) if array.size else array
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    array = array[(..., *(slice(None, None, draw(st.sampled_from([1, 1, 2, -1]))) for _ in array.shape))]
    return np.broadcast_to(array, (2, *array.shape)) if draw(st.sampled_from([False, False, True])) else array


@both_depths
def test_values_come_back_or_are_refused(depth, device):
    """Bit for bit where the dtype is one that is stored; rounded where floats become shorter; nothing wraps, and no part of a number is lost."""
    arena = Arena(device, 1 << 16)

    def check(array: np.ndarray, wanted: str | None, in_arena: bool) -> None:
        make = arena if in_arena else device
        try:
            tensor = make.tensor(array, wanted)
        except (TypeError, ArgumentError) as error:
            assert any(word in str(error) for word in (str(array.dtype), array.dtype.name, "fit"))  # noqa: PT017
            assert not (array.dtype.isnative and array.dtype in DTYPES.values() and wanted is None)
            return
        back = tensor.numpy()
        assert back.shape == array.shape
        assert back.dtype == (DTYPES[wanted] if wanted else tensor.dtype)
        if array.dtype.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                np.testing.assert_array_equal(back, array.astype(tensor.dtype))
        elif back.dtype.kind == "f":
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(back, array.astype(back.dtype))
        else:
            assert [int(x) for x in back.ravel()] == [int(x) for x in array.ravel()]
        if array.dtype == back.dtype:
            assert back.tobytes() == array.tobytes()
        tensor.write(np.zeros(array.shape, tensor.dtype))
        assert not tensor.numpy().any()

    explore(check, views(), st.one_of(st.none(), st.sampled_from(sorted(DTYPES))), st.booleans(), depth=depth, quick=150, thorough=10_000)


NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([2**16, 2**31, 2**32, 2**40, 2**63, 2**64, -(2**63)]), st.sampled_from([1.0, 2.5, None, "3", True]))


@both_depths
def test_shapes_that_cannot_be_are_refused(depth, device):
    arena = Arena(device, 1 << 16)

    def check(shape: list[Any], dtype: str, in_arena: bool) -> None:
        make = arena if in_arena else device
        whole = all(isinstance(n, int) for n in shape) and min(shape, default=0) >= 0 and math.prod(n or 1 for n in shape) < 2**60
        try:
            tensor = make.empty(tuple(shape), dtype)
        except ShapeError:
            assert not whole
        except CapacityError as error:
            assert math.prod(shape) * DTYPES[dtype].itemsize > device.profile.max_binding
            assert str(math.prod(shape) * DTYPES[dtype].itemsize) in str(error)  # noqa: PT017
        else:
            assert whole
            assert tensor.size == math.prod(shape)
            if tensor.size < 1000:
                assert tensor.numpy().shape == tuple(int(n) for n in shape)

    explore(check, st.lists(NUMBERS, max_size=4), st.sampled_from(sorted(DTYPES)), st.booleans(), depth=depth, quick=150, thorough=5000)


@both_depths
def test_reshape_is_numpys(depth, device):
    def check(shape: tuple[int, ...], other: list[int]) -> None:
        array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        tensor = device.tensor(array)
        try:
            wanted = array.reshape(other)
        except ValueError:
            with pytest.raises(ShapeError):
                tensor.reshape(*other)
            return
        np.testing.assert_array_equal(tensor.reshape(*other).numpy(), wanted)
        np.testing.assert_array_equal(tensor.reshape(tuple(other)).numpy(), wanted)

    shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    explore(check, shapes, st.lists(st.integers(-1, 12), max_size=3), depth=depth, quick=100, thorough=3000)


def test_tensors_are_refused_where_they_do_not_belong(device):
    tensor = device.tensor(np.ones(3))
    for wrong in (1 + 2j, "x", None, np.datetime64("2020")):
        with pytest.raises(TypeError):
            tensor.write(np.full(3, wrong))
    for wrong in (0.5, np.nan, np.inf):
        with pytest.raises(ArgumentError, match="fractions"):
            device.tensor(np.ones(3), "u32").write(np.full(3, wrong))
    with pytest.raises(ArgumentError, match=r"-1 to -1 .* uint32"):
        device.tensor(np.ones(3, int), "u32").write(-np.ones(3, int))
    with pytest.raises(wgattn.ArgumentError):
        np.asarray(tensor)
    assert tensor.numpy().all()
