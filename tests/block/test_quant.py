"""Block formats: the repacking into planes loses nothing, and kernels dequantise as the gguf package does."""

import re

import gguf
import numpy as np
import pytest

from tests.helpers import assert_untouched, poison, split_canary, with_canary
from wgattn.block.linear import Matrix, padded
from wgattn.block.quant import CHUNK, FORMATS, QuantizedTensor, format_of, quantize, rows_that_fit, stack_rows
from wgattn.errors import ShapeError, Unsupported
from wgattn.gpu import Device, Recording, StepState

KINDS = list(FORMATS)
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
BLOCKED = [kind for kind in KINDS if FORMATS[kind].block > 1]
SIMPLE = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4}  # blocks of 32, and the bytes of f16 scales that they begin with
SCALES = {kind: list(range(0, n, 2)) for kind, n in SIMPLE.items()} | {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # where a block's f16 scales are
EXTREME = np.array([0.0, -0.0, 65504.0, -65504.0, 2**-14, 2**-24, -(2**-24), 1023 * 2**-24, 1.0, -1.0], np.float16)  # with the smallest normal and denormals


def finite_half(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random bits of finite f16, a fifth of them extreme."""
    bits = rng.integers(0, 1 << 16, count, np.uint16)
    bits[(bits >> 10 & 31) == 31] &= 0xFBFF  # no inf, no NaN
    values = bits.view(np.float16)
    return np.where(rng.random(count) < 0.2, rng.choice(EXTREME, count), values)


def random_raw(rng: np.random.Generator, rows: int, columns: int, kind: str) -> QuantizedTensor:
    """A matrix of random bytes, but for scales and floats that are finite; F32 and BF16 have no denormals, which GPUs may flush."""
    if kind in ("F32", "BF16"):
        data = (rng.choice([-1, 1], (rows, columns)) * 2.0 ** rng.uniform(-125, 127, (rows, columns))).astype(np.float32)
        return QuantizedTensor(data if kind == "F32" else (data.view(np.uint32) >> 16).astype(np.uint16), (rows, columns), kind)
    if kind == "F16":
        return QuantizedTensor(finite_half(rng, rows * columns), (rows, columns), kind)
    form = FORMATS[kind]
    blocks = rng.integers(0, 256, (rows * columns // form.block, form.block_bytes), np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = finite_half(rng, len(blocks)).view(np.uint8).reshape(-1, 2)
    return QuantizedTensor(blocks, (rows, columns), kind)


def widen(kind: str, columns: int) -> int:
    """As many columns, or blocks where these are longer."""
    return columns // 32 * FORMATS[kind].block if FORMATS[kind].block > 32 else columns


# ---- planes


def plane_bytes(words: np.ndarray, count: int) -> np.ndarray:
    """The first bytes of a plane; what follows is padding to a whole word."""
    data = words.view(np.uint8)
    assert words.dtype == np.uint32
    assert 0 <= data.size - count < 4
    assert not data[count:].any()
    return data[:count]


def nibble_bytes(words: np.ndarray, blocks: int) -> np.ndarray:
    """(blocks, 16) bytes as GGUF has them: column i in the low nibble, i + 16 in the high one."""
    codes = np.zeros((blocks, 32), np.uint8)
    words = words.reshape(blocks, 4)
    for column in range(32):
        word, place = divmod(column, 8)
        shift = 8 * (place % 4) + 4 * (place // 4)
        codes[:, column] = words[:, word] >> shift & 15
    return codes[:, :16] | codes[:, 16:] << 4


def fifth_bits(data: np.ndarray, blocks: int) -> np.ndarray:
    """(blocks, 4) bytes as GGUF has them: column i at bit i."""
    words = data.view(np.uint32).reshape(blocks)
    bits = np.zeros((blocks, 32), np.uint8)
    for column in range(32):
        group, byte = divmod(column, 4)
        bits[:, column] = words >> (8 * byte + group) & 1
    return np.packbits(bits, axis=1, bitorder="little")


def raw_of(planes: dict[str, np.ndarray], rows: int, columns: int, kind: str) -> np.ndarray:
    """The inverse of `QuantizedTensor.planes`."""
    if kind in FLOATS:
        dtype = np.dtype(FLOATS[kind])
        assert list(planes) == ["weights_codes_plane"]
        values = plane_bytes(planes["weights_codes_plane"], rows * padded(columns) * dtype.itemsize).view(dtype).reshape(rows, -1)
        assert not values[:, columns:].any()
        return np.ascontiguousarray(values[:, :columns]).view(np.uint8)
    blocks = rows * columns // 32
    scales = plane_bytes(planes["weights_scales_plane"], blocks * SIMPLE[kind]).reshape(blocks, -1)
    if kind == "Q8_0":
        pieces = [scales, plane_bytes(planes["weights_codes_plane"], blocks * 32).reshape(blocks, 32)]
    elif kind in ("Q5_0", "Q5_1"):
        pieces = [scales, fifth_bits(plane_bytes(planes["weights_bits_plane"], blocks * 4), blocks), nibble_bytes(planes["weights_codes_plane"], blocks)]
    else:
        pieces = [scales, nibble_bytes(planes["weights_codes_plane"], blocks)]
    return np.concatenate(pieces, axis=1).reshape(rows, -1)


@pytest.mark.parametrize("kind", [*FLOATS, *SIMPLE])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (1, 3), (3, 1), (5, 3), (7, 2), (2, 8)])
def test_planes_lose_nothing(rng, kind, rows, blocks):
    matrix = random_raw(rng, rows, 32 * blocks, kind)
    planes = matrix.planes()
    np.testing.assert_array_equal(raw_of(planes, rows, 32 * blocks, kind), matrix.raw)
    assert sum(p.nbytes for p in planes.values()) < matrix.nbytes + 4 * len(planes)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("columns", [1, 5, 15, 16, 17, 100])
def test_rows_of_floats_are_padded_with_zeros(rng, kind, columns):
    matrix = random_raw(rng, 3, columns, kind)
    np.testing.assert_array_equal(raw_of(matrix.planes(), 3, columns, kind), matrix.raw)


def test_planes_are_the_buffers_of_the_shader_part(device: Device):
    for kind in KINDS:
        form = FORMATS[kind]
        source = device.kernel("block/embed", "step", *form.parts, **form.options).source
        planes = {name for name, _ in source.buffers if name.startswith("weights_")}
        assert planes == set(QuantizedTensor(bytes(form.row_bytes(256)), (1, 256), kind).planes()), kind


# ---- dequantisation on the device


def embed(device: Device, matrix: QuantizedTensor, tokens: list[int], columns: int, spare: int = 16) -> np.ndarray:
    """Rows of a matrix through `block/embed.wgsl`, checking that nothing else is written."""
    on_device, chunk, stride = Matrix(device, matrix), len(tokens) + 2, padded(columns) + spare
    state, y = StepState(device, chunk), with_canary(device, poison((chunk, stride)))
    kernel = device.kernel("block/embed", "step", *matrix.format.parts, **matrix.format.options)
    recording = Recording(device)
    for piece in on_device:
        buffers = {"step": state.step, "tokens": state.tokens, "y": y, **piece.planes}
        recording.add(kernel, (chunk,), buffers, {"columns": columns, "rows": piece.rows, "y_stride": stride, "first_row": piece.first_row})
    state.write(0, tokens)
    recording.replay()
    rows, canary = split_canary(y, (chunk, stride))
    case = {"kind": matrix.kind, "shape": matrix.shape, "tokens": tokens, "device": device}
    assert_untouched(canary, **case, where="beyond the end")
    assert_untouched(rows[len(tokens) :], **case, where="tokens beyond the step's count")
    assert_untouched(rows[: len(tokens), padded(columns) :], **case, where="columns beyond the padding")
    assert not rows[: len(tokens), columns : padded(columns)].any(), case
    return rows[: len(tokens), :columns]


@pytest.mark.parametrize("variant", ["software", "checked"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_dequantise_like_gguf(devices, rng, kind, variant):
    """Bit for bit (up to the sign of zero): scale * code is exact in f32 in all formats, and an offset is added with one rounding."""
    for rows, columns in ((1, 32), (7, 96), (300, 32), (9, 2080)):
        columns = widen(kind, columns)
        matrix = random_raw(rng, rows, columns, kind)
        tokens = [0, rows - 1, *rng.integers(0, rows, 60).tolist()]
        with np.errstate(over="ignore"):
            expected = gguf.quants.dequantize(matrix.raw, gguf.GGMLQuantizationType[kind]).astype(np.float32).reshape(rows, columns)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(embed(devices[variant], matrix, tokens, columns), expected[tokens], err_msg=f"{kind} {rows} x {columns}")
        np.testing.assert_array_equal(matrix.dequantize(), expected)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("columns", [1, 5, 17, 100])
def test_rows_of_floats_may_have_any_length(device: Device, rng, kind, columns):
    matrix = random_raw(rng, 9, columns, kind)
    np.testing.assert_array_equal(embed(device, matrix, [8, 0, 3], columns), matrix.dequantize()[[8, 0, 3]])


@pytest.mark.parametrize("kind", SIMPLE)
def test_every_code_is_right_in_every_column(device: Device, kind):
    """Each column takes each value of its bits, with a scale of 1: a swapped nibble or bit cannot hide."""
    low, high = {"Q8_0": (-128, 128), "Q4_0": (-8, 8), "Q4_1": (0, 16), "Q5_0": (-16, 16), "Q5_1": (0, 32)}[kind]
    expected = (np.arange(high - low)[:, None] + 7 * np.arange(64)) % (high - low) + low
    blocks = (expected - (0 if kind == "Q8_0" else low)).astype(np.int8).view(np.uint8).reshape(-1, 32)
    nibbles = (blocks[:, :16] & 15) | (blocks[:, 16:] & 15) << 4
    fifth = ((blocks.astype(np.uint32) >> 4 & 1) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)[:, None].view(np.uint8)
    scales = np.tile(np.array([1, 0], np.float16)[: SIMPLE[kind] // 2].view(np.uint8), (len(blocks), 1))
    pieces = [scales, blocks] if kind == "Q8_0" else [scales, fifth, nibbles] if kind.startswith("Q5") else [scales, nibbles]
    matrix = QuantizedTensor(np.concatenate(pieces, axis=1), expected.shape, kind)
    np.testing.assert_array_equal(embed(device, matrix, list(range(len(expected))), 64), expected)
    np.testing.assert_array_equal(matrix.dequantize(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_in_pieces_gives_the_same_rows(devices, rng, kind):
    device = devices["small_binding"]
    columns = max(64, FORMATS[kind].block)
    matrix = random_raw(rng, 3 * (1 << 20) // (FORMATS[kind].row_bytes(columns)) + 5, columns, kind)
    pieces = Matrix(device, matrix).pieces
    assert len(pieces) > 1
    edges = [row for p in pieces for row in (p.first_row, p.first_row + p.rows - 1)]
    np.testing.assert_array_equal(embed(device, matrix, edges, columns), matrix.dequantize()[edges])


def test_a_token_that_no_piece_holds_writes_nothing(device: Device, rng):
    matrix = random_raw(rng, 5, 32, "F32")
    state, y = StepState(device, 3), with_canary(device, poison((3, 32)))
    recording = Recording(device)
    for first in (5, 100):  # rows 5..9 and 100..104 of some larger matrix
        buffers = {"step": state.step, "tokens": state.tokens, "y": y, **Matrix(device, matrix).pieces[0].planes}
        kernel = device.kernel("block/embed", "step", *matrix.format.parts, **matrix.format.options)
        recording.add(kernel, (3,), buffers, {"columns": 32, "rows": 5, "y_stride": 32, "first_row": first})
    state.write(0, [4, 10, 102])
    recording.replay()
    rows, _ = split_canary(y, (3, 32))
    assert_untouched(rows[:2])
    np.testing.assert_array_equal(rows[2], matrix.dequantize()[2])


# ---- QuantizedTensor, quantize, stack_rows, rows_that_fit


@pytest.mark.parametrize("kind", KINDS)
def test_data_may_come_as_bytes_or_arrays(rng, kind):
    matrix = random_raw(rng, 3, 256, kind)
    data = matrix.raw.tobytes()
    strided = np.repeat(matrix.raw, 2, axis=1)[:, ::2]
    for given in (data, bytearray(data), memoryview(data), matrix.raw, matrix.raw.reshape(-1), strided):
        again = QuantizedTensor(given, (3, 256), kind)
        np.testing.assert_array_equal(again.raw, matrix.raw)
    assert (matrix.kind, matrix.shape, matrix.nbytes) == (kind, (3, 256), len(data))
    assert repr(matrix) == f"QuantizedTensor(3 x 256, {kind})"


@pytest.mark.parametrize("kind", ["IQ2_XXS", "q8_0", "", "I32"])
def test_an_unknown_kind_is_told_with_those_there_are(kind):
    for call in (lambda: QuantizedTensor(b"", (0, 0), kind), lambda: quantize(np.ones((1, 32)), kind), lambda: format_of(kind)):
        with pytest.raises(Unsupported, match=re.escape(f"type {kind} cannot be used; supported are {', '.join(FORMATS)}.")):
            call()


@pytest.mark.parametrize("kind", BLOCKED)
@pytest.mark.parametrize("columns", [1, 16, 33, 48])
def test_rows_must_be_whole_blocks(kind, columns):
    for call in (lambda: QuantizedTensor(bytes(1000), (1, columns), kind), lambda: quantize(np.ones((2, columns)), kind)):
        with pytest.raises(ShapeError, match=f"{kind} row must be a multiple of {FORMATS[kind].block} columns long, not {columns}"):
            call()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [-1, 1, 40])
def test_the_number_of_bytes_must_be_right(kind, wrong):
    wanted = 3 * FORMATS[kind].row_bytes(256)
    with pytest.raises(ShapeError, match=rf"{kind} matrix of shape \(3, 256\) takes {wanted} bytes; {wanted + wrong} were given"):
        QuantizedTensor(bytes(wanted + wrong), (3, 256), kind)


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32)])
def test_quantize_takes_matrices(shape):
    with pytest.raises(ShapeError, match=re.escape(str(shape))):
        quantize(np.ones(shape), "Q8_0")


@pytest.mark.parametrize(("kind", "error"), [("F32", 0), ("F16", 0), ("Q8_0", 1 / 254), ("Q5_0", 1 / 15), ("Q5_1", 2 / 62), ("Q4_1", 2 / 30), ("Q4_0", 1 / 7)])
def test_quantize_stays_close(rng, kind, error):
    array = rng.uniform(-1, 1, (5, 96)).astype(np.float32)
    matrix = quantize(array, kind)
    assert matrix.shape == (5, 96)
    assert np.abs(matrix.dequantize() - array).max() <= error + 2**-11 * (kind != "F32")  # half a step, and the rounding of the scale


@pytest.mark.parametrize("kind", KINDS)
def test_stack_rows_puts_matrices_above_one_another(rng, kind):
    matrices = [random_raw(rng, rows, 256, kind) for rows in (3, 1, 4)]
    stacked = stack_rows(matrices)
    assert (stacked.shape, stacked.kind) == ((8, 256), kind)
    np.testing.assert_array_equal(stacked.dequantize(), np.concatenate([m.dequantize() for m in matrices]))
    order = rng.permutation(8)
    np.testing.assert_array_equal(stack_rows(matrices, order).dequantize(), stacked.dequantize()[order])
    np.testing.assert_array_equal(stack_rows(matrices[:1], np.array([2, 0, 1])).dequantize(), matrices[0].dequantize()[[2, 0, 1]])
    np.testing.assert_array_equal(stack_rows(matrices[:1]).dequantize(), matrices[0].dequantize())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [32, 96, 2048])
@pytest.mark.parametrize("unit", [1, 2, 4])
def test_rows_that_fit(kind, columns, unit):
    columns = widen(kind, columns)
    matrix = QuantizedTensor(bytes(50 * FORMATS[kind].row_bytes(columns)), (50, columns), kind)
    seen = set()
    for limit in (0, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000):
        rows = rows_that_fit(matrix, limit, unit)
        seen.add(rows)
        assert rows % unit == 0
        assert rows < 50 + unit
        if rows > 0:
            part = QuantizedTensor(matrix.raw[:rows], (min(rows, 50), columns), kind)
            assert max(p.nbytes for p in part.planes().values()) <= limit
        if rows < 50:  # one unit more would not fit
            taller = QuantizedTensor(bytes((rows + unit) * FORMATS[kind].row_bytes(columns)), (rows + unit, columns), kind)
            assert max(p.nbytes for p in taller.planes().values()) > limit
    assert 0 in seen
    assert max(seen) >= 50


def test_chunks_are_what_the_kernels_take():
    assert CHUNK == 16
    assert all(form.block % CHUNK == 0 or form.block == 1 for form in FORMATS.values())
