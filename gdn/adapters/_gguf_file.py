"""Reads a GGUF file's header and single tensors, trusting nothing that the file says.

The header is parsed here, every count and length checked against the bytes that are left, because the `gguf`
package's reader maps and expands the whole header (vocabularies included) before anything can be checked.  The
package supplies the block sizes of the quantised types and their dequantisation.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import re
import stat
import struct
from typing import NamedTuple

import numpy as np

STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
MAX_NAME = 65535        # bytes of a key or a tensor's name; the format's own limit for keys
MAX_ENTRIES = 1 << 20   # key-value pairs, tensors
MAX_ITEMS = 1 << 24     # strings in one array: each costs a read, however short it is
MAX_KEPT = 1 << 16      # longer strings and arrays (vocabularies) are stepped over


class TensorInfo(NamedTuple):
    """A tensor as the header describes it: ``ne`` in ggml's order, fastest first; ``start`` in bytes of its part's file."""

    ne: tuple
    type: int
    start: int
    part: int = 0


class _Part:
    """One file: ``meta`` (key to scalar, string or list; long ones left out) and ``tensors`` (name to TensorInfo)."""

    def __init__(self, path):
        self.path = os.fsdecode(path)
        if not stat.S_ISREG(os.stat(self.path).st_mode):
            raise ValueError(f"{self.path}: not a regular file")
        self.file = open(self.path, "rb")
        try:
            self.size = os.fstat(self.file.fileno()).st_size
            self._read_header()
        except BaseException:
            self.file.close()
            raise

    def error(self, text):
        return ValueError(f"{self.path}: {text}")

    def _read_header(self):
        if self._take(4, "the magic number") != b"GGUF":
            raise self.error("not a GGUF file")
        version = self._number("<I", "the version")
        if version not in (2, 3):
            kind = "big-endian GGUF" if version in (2 << 24, 3 << 24) else f"GGUF version {version}"
            raise self.error(f"{kind}, expected little-endian version 2 or 3")
        n_tensors = self._count("tensors", 24)
        n_pairs = self._count("key-value pairs", 13)
        self.meta = {}
        for _ in range(n_pairs):
            key = self._name("key")
            if key in self.meta:
                raise self.error(f"key {key!r} occurs twice")
            self.meta[key] = self._value(self._number("<I", key), key)
        infos = {}
        for _ in range(n_tensors):
            name = self._name("tensor name")
            if name in infos:
                raise self.error(f"tensor {name!r} occurs twice")
            infos[name] = self._info(name)
        self._place(infos)

    def _place(self, infos):
        """Offsets count from the first aligned byte after the header; every tensor has to end inside the file."""
        from gguf.constants import GGML_QUANT_SIZES

        alignment = self.meta.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 30 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, expected a power of two")
        data = -(-self.file.tell() // alignment) * alignment
        self.tensors = {}
        for name, info in infos.items():
            block, block_bytes = GGML_QUANT_SIZES.get(info.type, (1, 0))    # types not known here may lie unused
            n_bytes = math.prod(info.ne) // block * block_bytes
            start = data + info.start
            if info.start % alignment:
                raise self.error(f"tensor {name}: offset {info.start} is no multiple of {alignment}")
            if start + n_bytes > self.size:
                raise self.error(f"tensor {name}: bytes {start} to {start + n_bytes} of a file of {self.size} bytes")
            self.tensors[name] = info._replace(start=start)

    def _info(self, name):
        n_dims = self._number("<I", name)
        if not 1 <= n_dims <= 4:
            raise self.error(f"tensor {name}: {n_dims} dimensions, expected 1 to 4")
        ne = tuple(self._number("<Q", name) for _ in range(n_dims))
        type = self._number("<I", name)
        return TensorInfo(ne, type, self._number("<Q", name))

    def _require_bytes(self, n, what):
        if n > self.size - self.file.tell():
            raise self.error(f"truncated or damaged at byte {self.file.tell()} of {self.size}: {what} needs {n} bytes")

    def _take(self, n, what):
        self._require_bytes(n, what)
        return self.file.read(n)

    def bytes_at(self, start, n, name):
        self.file.seek(start)
        return self._take(n, f"tensor {name}")

    def _skip(self, n, what):
        self._require_bytes(n, what)
        self.file.seek(n, os.SEEK_CUR)

    def _number(self, form, what):
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _count(self, what, least):
        n = self._number("<Q", f"the number of {what}")
        if n > min(MAX_ENTRIES, self.size // least):
            raise self.error(f"{n} {what} in a file of {self.size} bytes")
        return n

    def _name(self, what):
        n = self._number("<Q", what)
        if not 0 < n <= MAX_NAME:
            raise self.error(f"{what} of {n} bytes, expected 1 to {MAX_NAME}")
        return self._text(n, what)

    def _text(self, n, what):
        try:
            return self._take(n, what).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is no UTF-8: {error}") from None

    def _value(self, type, key):
        if type in SCALARS:
            return self._number(SCALARS[type], key)
        if type == STRING:
            return self._string(key)
        if type == ARRAY:
            return self._array(key)
        raise self.error(f"key {key!r}: value type {type} is unknown")

    def _string(self, key):
        n = self._number("<Q", key)
        return self._text(n, key) if n <= MAX_KEPT else self._skip(n, key)

    def _array(self, key):
        item, n = self._number("<I", key), self._number("<Q", key)
        if item == STRING:
            if n > min(MAX_ITEMS, self.size // 8):
                raise self.error(f"key {key!r}: {n} strings in a file of {self.size} bytes")
            return self._skip_strings(n, key)
        if item not in SCALARS:
            raise self.error(f"key {key!r}: array of value type {item}, expected scalars or strings")
        width = struct.calcsize(SCALARS[item])
        if n > MAX_KEPT:
            return self._skip(n * width, key)
        return list(struct.unpack(f"<{n}{SCALARS[item][1]}", self._take(n * width, key)))

    def _skip_strings(self, n, key):
        """Steps over n strings in pieces of the file: a vocabulary is passed once for each layer that is read."""
        piece, at = b"", 0                  # `at` may lie beyond the piece, never beyond the file
        for _ in range(n):
            if at + 8 > len(piece):
                self.file.seek(at - len(piece), os.SEEK_CUR)
                piece, at = self.file.read(1 << 16), 0
            length = int.from_bytes(piece[at:at + 8], "little")
            if at + 8 > len(piece) or length > self.size:
                raise self.error(f"truncated or damaged: strings of {key}")
            at += 8 + length
        self.file.seek(at - len(piece), os.SEEK_CUR)
        self._require_bytes(0, key)


class GGUFFile(_Part):
    """A file, or all parts of a split one whose first is given: ``meta`` of the first, ``tensors`` of all.

    A context manager.  ValueError if a file is no GGUF file, is truncated, contradicts itself or the other parts, or is
    one part of several but not the first; OSError as the system raises it.
    """

    def __init__(self, path):
        super().__init__(path)
        self.parts = [self]
        try:
            if self.meta.get("split.count", 0) not in (0, 1):
                self._open_parts(self.meta["split.count"])
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for part in self.parts:
            part.file.close()

    def _open_parts(self, count):
        named = re.fullmatch(r"(.*)-00001-of-([0-9]{5})\.gguf", self.path, re.DOTALL)
        if type(count) is not int or not named or int(named[2]) != count or self.meta.get("split.no") != 0:
            raise self.error(f"one part of {count!r}, number {self.meta.get('split.no')!r} from 0; expected the first, "
                             f"by a name that ends in -00001-of-N.gguf")
        for no in range(1, count):
            part = _Part(f"{named[1]}-{no + 1:05}-of-{named[2]}.gguf")
            self.parts.append(part)
            says = [part.meta.get(key) for key in ("split.no", "split.count")]
            if says != [no, count]:
                raise part.error(f"split.no and split.count are {says}, expected {[no, count]}")
            twice = self.tensors.keys() & part.tensors.keys()
            if twice:
                raise part.error(f"{', '.join(sorted(twice))} in an earlier part too")
            self.tensors |= {name: info._replace(part=no) for name, info in part.tensors.items()}
        n_tensors = self.meta.get("split.tensors.count", len(self.tensors))
        if n_tensors != len(self.tensors):
            raise self.error(f"split.tensors.count is {n_tensors!r}, the parts have {len(self.tensors)} tensors")

    def require(self, name, ne):
        """TensorInfo of a tensor whose extents are ``ne``; axes of extent 1 may lie anywhere."""
        if name not in self.tensors:
            raise self.error(f"tensor {name} is missing, expected with ne = {list(ne)}")
        info = self.tensors[name]
        if [n for n in info.ne if n != 1] != [n for n in ne if n != 1]:
            raise self.error(f"tensor {name} has ne = {list(info.ne)}, expected {list(ne)}")
        return info

    def row_bytes(self, name, ne):
        """Bytes of a row of the tensor.  ValueError: its type is unknown, holds no weights, or packs no rows of ne[0]."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.require(name, ne)
        if info.type not in GGML_QUANT_SIZES:
            raise self.error(f"tensor {name}: type {info.type} is unknown to the gguf package")
        type = GGMLQuantizationType(info.type)
        block, block_bytes = GGML_QUANT_SIZES[type]
        if ne[0] % block:
            raise self.error(f"tensor {name}: rows of {ne[0]} values, but {type.name} packs {block} in a block")
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), type)
        except NotImplementedError as error:                   # the package's word for a type it cannot unpack
            raise self.error(f"tensor {name}: {error}") from None
        return ne[0] // block * block_bytes

    def read(self, name, ne):
        """The tensor in float32, its shape ``ne`` reversed: rows first.  Errors as of `require` and `row_bytes`."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info, row_bytes = self.require(name, ne), self.row_bytes(name, ne)
        data = self.parts[info.part].bytes_at(info.start, math.prod(ne[1:]) * row_bytes, name)
        values = dequantize(np.frombuffer(bytearray(data), np.uint8).reshape(-1, row_bytes), GGMLQuantizationType(info.type))
        return np.ascontiguousarray(values, np.float32).reshape(tuple(ne)[::-1])
