"""The safetensors format: a header that names the tensors, and their bytes behind it.

Read here rather than by the safetensors library, because a conversion needs to know where the bytes lie, and because a
damaged file should end in one line that says what is wrong with it. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headfold.convert.errors import CheckpointError
from headfold.convert.files import io_errors

if TYPE_CHECKING:
    import torch

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_JSON_BYTES = 100_000_000
_MAX_JSON_DEPTH = 100
_MAX_DIMENSIONS = 64  # torch's limit
_MAX_NAME_LENGTH = 1000


DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: safetensors' name of its dtype, its shape, and its bytes start..end-1 within its file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: safetensors' name of its dtype, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


Layout = dict[str, list[TensorSpec]]
"""The tensors of each output file, in order."""


def torch_dtype(name: str) -> torch.dtype | None:
    """torch's dtype for safetensors' name of it; None where torch has none."""
    import torch

    return getattr(torch, _TORCH_DTYPES.get(name, ""), None)


def dtype_name(dtype: torch.dtype) -> str | None:
    """safetensors' name of a torch dtype; None where it has none."""
    return {value: key for key, value in _TORCH_DTYPES.items()}.get(str(dtype).removeprefix("torch."))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if there is none."""
    with io_errors(path, "read", CheckpointError):
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes are too many for this file")
        data = path.read_bytes()
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, place: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises CheckpointError, which begins with `place`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_refuse_duplicates)
    except _DuplicateKey as error:
        raise CheckpointError(f"{place}: the key {error.key[:200]!a} stands there twice") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers too long, nested too deep
        raise CheckpointError(f"{place}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{place}: not a JSON object but {type(value).__name__}")
    _refuse_depth(value, place)
    return value


def _refuse_depth(value: dict[str, Any], place: str) -> None:
    """Less deep than the parser can go, so that whatever copies or writes it by recursion can go there too."""
    level: list[Any] = [value]
    for _ in range(_MAX_JSON_DEPTH):
        items = (item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent))
        level = [item for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise CheckpointError(f"{place}: not usable JSON (nested more than {_MAX_JSON_DEPTH} levels deep)")


def encode_json(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """JSON in UTF-8, in the order of its keys. What UTF-8 cannot hold (lone surrogates) stays escaped, as it came."""
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(value, indent=indent, separators=separators, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent, separators=separators).encode()


class _DuplicateKey(Exception):
    def __init__(self, key: str):
        self.key = key


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return result


def read_header(path: Path, shard: str) -> tuple[dict[str, str], list[TensorEntry], bytes]:
    """Metadata, entries in the order of their data, and the raw header of a safetensors file, all of it verified."""
    with io_errors(path, "read", CheckpointError), path.open("rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        if file_size < 8:
            raise CheckpointError(f"{path}: {file_size} bytes are no safetensors file; download it again")
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: a header of {header_size:,} bytes; this is no safetensors file")
        if header_size > file_size - 8:
            raise CheckpointError(
                f"{path}: truncated: a header of {header_size:,} bytes in a file of {file_size:,}; download it again"
            )
        raw = file.read(header_size)
    header = parse_json_object(raw, f"{path} (header)")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a table of strings")
    data_start = 8 + header_size
    entries = [_entry(path, shard, name, value, data_start) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = data_start
    for entry in entries:
        if entry.start != position:
            problem = "overlap" if entry.start < position else "leave a gap"
            raise CheckpointError(
                f"{path}: the bytes of the tensors {problem}: {entry.name} begins at byte {entry.start - data_start}, "
                f"the one before it ends at {position - data_start}"
            )
        position = entry.end
    if position != file_size:
        state = "truncated" if position > file_size else "too long"
        raise CheckpointError(
            f"{path}: {state}: the header describes {position:,} bytes, the file has {file_size:,}; download it again"
        )
    return metadata, entries, raw


def _entry(path: Path, shard: str, name: str, value: Any, data_start: int) -> TensorEntry:
    """One entry of a header, its types and size checked."""

    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {name[:200]!a}: {what}")

    if not is_tensor_name(name):
        raise bad("not a usable name for a tensor")
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        raise bad("dtype, shape or data_offsets is missing")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"its dtype {ascii(dtype)[:40]} is not known")
    if not _is_size_list(shape) or len(shape) > _MAX_DIMENSIONS:
        raise bad("its shape is not a list of sizes")
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad("its data_offsets are not two numbers in order")
    num_bits, num_bytes = math.prod(shape) * DTYPE_BITS[dtype], offsets[1] - offsets[0]
    if num_bits != 8 * num_bytes:
        raise bad(f"its offsets hold {num_bytes} bytes, which {dtype} of shape {str(shape)[:100]} does not take")
    return TensorEntry(name, shard, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def is_tensor_name(name: str) -> bool:
    """Whether a tensor may be called so: names stand in messages, and in headers, where __metadata__ is no tensor."""
    return 0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable() and name != "__metadata__"


def _is_size_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def encode_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """A safetensors header (its length included) for tensors in this order, and the first byte of each in the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for spec in specs:
        offsets = [position, position + spec.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        position = offsets[1]
    data = encode_json(header)
    data += b" " * (-len(data) % 8)
    starts = {spec.name: 8 + len(data) + header[spec.name]["data_offsets"][0] for spec in specs}
    return len(data).to_bytes(8, "little") + data, starts
