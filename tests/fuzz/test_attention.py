"""Attention at random: any shapes, strides, dtypes, masks and options, against the reference."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import wgattn
from tests.fuzz.depth import both_depths, explore, refusal
from tests.helpers import assert_close
from wgattn import reference
from wgattn.attention.paths import PATHS

DTYPES = [np.float32, np.float16, np.float64, np.dtype(">f4")]
HEAD_DIMS = [1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 64, 65, 128]
"""Few, since each is another kernel to compile."""


def laid_out(draw: st.DrawFn, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    """An array of that shape in memory of any order: axes swapped, steps of 2, reversed, broadcast, within a larger one whose rest is NaN, read-only."""
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 1, 2, -1, -2])] * len(shape)))
    wide = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    spread = [draw(st.sampled_from([False, False, False, True])) for _ in shape]
    sizes = [(1 if same else n) * abs(step) + 2 * more for n, step, more, same in zip(shape, steps, wide, spread, strict=True)]
    memory = np.full([sizes[axis] for axis in order], np.nan, dtype).transpose(np.argsort(order))
    cut = tuple(slice(int(more), int(more) + (1 if same else n) * abs(step), abs(step)) for n, step, more, same in zip(shape, steps, wide, spread, strict=True))
    view = memory[cut]
    view[...] = (scale * rng.standard_normal(view.shape)).astype(dtype)
    view = view[tuple(slice(None, None, -1 if step < 0 else 1) for step in steps)]
    view = np.broadcast_to(view, shape)
    assert view.shape == shape
    assert not np.isnan(view).any()
    return view


@st.composite
def calls(draw: st.DrawFn, few: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, options) of a call that is valid; `few`: of few kernels, since compiling them takes most of the time."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    B, Hkv, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    S, T = draw(st.sampled_from([1, 1, 2, 3, 7, 8, 9, 17, 33, 65])), draw(st.one_of(st.integers(1, 40), st.sampled_from([0, 1, 63, 64, 65, 129, 257])))
    D, H = draw(st.sampled_from([4, 5] if few else HEAD_DIMS)), Hkv * ratio
    Dv = D if few else draw(st.sampled_from([D, D, D, 4, 5, 16]))
    dtypes = draw(st.sampled_from([DTYPES[::2] + DTYPES[3:], DTYPES[1:2]])) if few else DTYPES  # one kind for queries and keys
    dtype, kv_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(dtypes))
    layout = draw(st.sampled_from(["bhsd", "bshd"]))
    shapes = {"query": (B, H, S, D), "key": (B, Hkv, T, D), "value": (B, Hkv, T, Dv)}
    arrays = {}
    for name, shape in shapes.items():
        shape = shape if layout == "bhsd" else (shape[0], shape[2], shape[1], shape[3])
        arrays[name] = laid_out(draw, rng, shape, dtype if name == "query" else kv_dtype)
    options: dict[str, Any] = {"layout": layout, "path": draw(st.sampled_from(["auto"] if few else ["auto", "auto", *PATHS]))}
    if draw(st.booleans()):
        columns = draw(st.sampled_from([T, T, 1, max(1, T // 2)]))
        shape = (*(draw(st.sampled_from([n, 1])) for n in (B, H, S)), columns)
        shape = shape[draw(st.integers(0, 3)) :] if T else ()
        if shape:
            kind = draw(st.sampled_from(["bool", "float32", "float16", "float64", "int8", "uint32"]))
            mask = laid_out(draw, rng, shape, np.float32)
            if kind.startswith("float"):
                hidden = laid_out(draw, rng, shape, np.float32) > 1
                mask = np.where(hidden, -np.inf, mask).astype(kind)
            else:
                mask = (mask < 1).astype(kind)
            options["attn_mask"] = mask
    options["is_causal"] = draw(st.booleans())
    options["causal_alignment"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    if draw(st.booleans()):
        options["window_size"] = draw(st.one_of(st.integers(1, 40), st.tuples(st.integers(-1, 20), st.integers(-1, 20))))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, 0.1, 1.0, -0.3]))
    extras = few and draw(st.booleans())
    if extras if few else draw(st.sampled_from([False, False, True])):
        options["sinks"] = laid_out(draw, rng, (H,), np.float64)
    if extras if few else draw(st.sampled_from([False, False, True])):
        options["alibi_slopes"] = np.abs(laid_out(draw, rng, (H,), np.float32))
    if extras if few else draw(st.sampled_from([False, False, True])):
        kind = draw(st.sampled_from(["int64", "uint8" if T < 256 else "int32"]))
        options["key_lengths"] = np.array(draw(st.lists(st.integers(0, T), min_size=B, max_size=B)), kind)
    return arrays, options


def expected(arrays: dict[str, np.ndarray], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The reference's answer, in the layout asked for."""
    options = dict(options)
    options.pop("path")
    swap = options.pop("layout") == "bshd"
    q, k, v = (a.swapaxes(1, 2) if swap else a for a in arrays.values())
    out, lse = reference.attention(q, k, v, options.pop("attn_mask", None), **options)
    return (out.swapaxes(1, 2) if swap else out), lse


@both_depths
def test_any_call_is_the_reference(depth, device):
    """NumPy arrays in, and tensors in: the same bits; inputs stay as they were."""

    def check(call: tuple[dict[str, Any], dict[str, Any]], on_device: bool) -> None:
        arrays, options = call
        before = {name: a.copy() for name, a in arrays.items()}
        found: list[Any] = []
        message = refusal(lambda: found.append(wgattn.sdpa(*arrays.values(), **options, return_lse=True, device=device)))
        if message is not None:
            assert options["path"] != "auto", message
            assert options["path"] in message
            return
        out, lse = found[0]
        wanted, wanted_lse = expected(arrays, options)
        half = any(a.dtype.itemsize == 2 for a in arrays.values())
        case = {name: (a.shape, a.strides, a.dtype) for name, a in arrays.items()} | options
        assert out.dtype == (np.float16 if arrays["query"].dtype == np.float16 else np.float32)
        assert lse.dtype == np.float32
        spread = 1 + np.abs(wanted).max(initial=0)
        assert_close(out, wanted, max_error=(4e-3 if half else 5e-5) * spread, **case)
        finite = np.isfinite(wanted_lse)
        np.testing.assert_array_equal(np.isfinite(lse), finite)
        assert_close(lse[finite], wanted_lse[finite], max_error=(1e-2 if half else 1e-4) * (1 + np.abs(wanted_lse[finite]).max(initial=0)), **case)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, before[name])
        if on_device and all(a.dtype.name in ("float32", "float16") and a.dtype.isnative for a in arrays.values()):
            tensors = [device.tensor(a) for a in arrays.values()]
            as_tensors = wgattn.sdpa(*tensors, **options, return_lse=True)
            np.testing.assert_array_equal(as_tensors[0].numpy(), out)
            np.testing.assert_array_equal(as_tensors[1].numpy(), lse)

    explore(check, calls(depth == "quick"), st.booleans(), depth=depth, quick=25, thorough=300)


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70000),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([np.zeros(3), np.zeros((1, 2, 3, 4), complex), np.zeros((1, 1, 1, 1), object), np.array("x"), [], [[1.0]], (1, 2), (-5, 3), (1, 2, 3), {}]),
)


@both_depths
def test_calls_that_cannot_be_meant_are_refused_in_words(depth, device):
    """One thing is wrong, or two: our error or a TypeError, or a result that is right; nothing else."""
    arrays = {name: np.ones((1, 2, 3, 4), np.float32) for name in ("query", "key", "value")}
    names = [*arrays, "attn_mask", "scale", "softcap", "window_size", "sinks", "alibi_slopes", "causal_alignment", "key_lengths", "layout", "path", "is_causal"]

    def check(wrong: dict[str, Any]) -> None:
        given = arrays | wrong
        positional = [given.pop(name) for name in arrays]
        try:
            out = wgattn.sdpa(*positional, **given, device=device)
        except (wgattn.WgattnError, TypeError) as error:
            assert str(error).strip()  # noqa: PT017
        else:
            assert np.isfinite(out).all()

    explore(check, st.dictionaries(st.sampled_from(names), WRONG, min_size=1, max_size=2), depth=depth, quick=150, thorough=5000)


@both_depths
def test_merging_parts_is_the_whole(depth, device):
    """Keys cut anywhere, also at an end."""

    def check(seed: int, T: int, cut: int, D: int, dtype: Any) -> None:
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal((2, 2, n, D)).astype(dtype) for n in (3, T, T))
        cut = cut % (T + 1)
        parts = [wgattn.sdpa(q, k[:, :, s], v[:, :, s], return_lse=True, device=device) for s in (slice(None, cut), slice(cut, None))]
        out, lse = wgattn.merge_state(*parts[0], *parts[1], device=device)
        wanted, wanted_lse = reference.attention(q, k, v)
        assert_close(out, wanted, max_error=4e-3 if dtype == np.float16 else 2e-5, T=T, cut=cut, D=D)
        assert_close(lse, wanted_lse, max_error=1e-2 if dtype == np.float16 else 1e-4, T=T, cut=cut, D=D)

    explore(
        check,
        st.integers(0, 2**32),
        st.integers(1, 70),
        st.integers(0, 100),
        st.sampled_from([1, 4, 5, 16]),
        st.sampled_from([np.float32, np.float16]),
        depth=depth,
        quick=25,
        thorough=1500,
    )


def test_tensors_of_another_device_are_refused(devices, device):
    other = devices["checked"]
    here, there = (d.tensor(np.ones((1, 1, 2, 4))) for d in (device, other))
    for arrays in ((here, there, here), (here, here, there), (there, here, here)):
        with pytest.raises(wgattn.ArgumentError, match="another device"):
            wgattn.sdpa(*arrays)
    with pytest.raises(wgattn.ArgumentError, match="another device"):
        wgattn.sdpa(here, here, here, device=other)
