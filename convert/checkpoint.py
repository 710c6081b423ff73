"""Checkpoint directories: read by the tensor, written by the tensor, and what is not changed is copied as bytes.

A directory in the Hugging Face layout is a config.json and either `model.safetensors` or shards with an index
(`.bin` files instead are read without running what a pickle may hold, and come out as safetensors). Nothing in a
directory is trusted: headers, offsets, indexes and links are checked before a tensor is read, and nothing outside the
directory is ever opened, but for the blobs that a hub cache links to.

torch is imported only where tensors are, so that copying can start before it.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headfold.convert.errors import CheckpointError, HeadfoldError, RefusedError, first_line
from headfold.convert.files import (
    copy_bytes,
    exchange,
    expanded,
    io_errors,
    lock_directory,
    read_into,
    remove_abandoned,
    settle_replaced,
    sync_directory,
    write_all,
)
from headfold.convert.header import (
    DTYPE_BITS,
    Layout,
    TensorEntry,
    TensorSpec,
    dtype_name,
    encode_header,
    encode_json,
    is_tensor_name,
    parse_json_object,
    read_header,
    read_json_object,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
RECORD_FILE = "headfold.json"
CARD_FILE = "README.md"

BLOCK_BYTES = 1 << 22
"""What goes through torch goes in blocks of about this size, so that memory does not grow with the model."""

_MAX_BESIDE_BYTES = 10_000_000
_COPY_PIECE_BYTES = 1 << 28
_NUM_COPY_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Beside the thread that merges. More than there are cores to spare spend their time on the kernel's locks."""

# Weights in other formats, or other copies of the weights: stale beside converted ones, so they are not carried over.
_OTHER_WEIGHTS = re.compile(
    r"(.*/)?(pytorch_model|tf_model|flax_model|rust_model|consolidated)[^/]*\.(bin|pt|safetensors|index\.json)"
    r"|original/.*|.*\.(pth|gguf|ggml|onnx|onnx_data|h5|msgpack|ot|mlmodel|tflite|llamafile)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass
class Checkpoint:
    """An opened checkpoint directory. Everything but the tensors' data has been read and verified."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    """Every stored tensor, shard by shard, in the order of the data."""
    metadata: dict[str, dict[str, str]] = field(repr=False)
    """The metadata of each shard's header."""
    index: dict[str, Any] | None = field(repr=False)
    """The index as it was read; None when there is a single file."""
    fingerprint: str
    """sha256 of the shards' names, sizes and headers."""
    warnings: list[str] = field(repr=False, default_factory=list)
    computed: dict[str, Callable[[int, int], torch.Tensor]] = field(repr=False, default_factory=dict)
    """Tensors that are not the bytes of a safetensors file: rows start..stop-1, as a new tensor in the stored dtype."""
    modified: dict[str, int] = field(repr=False, default_factory=dict)
    """When each shard was last written to, in nanoseconds, as it was opened."""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open and verify a directory. Raises CheckpointError with the first thing that is wrong."""
        checkpoint, problems = scan(path)
        if problems:
            more = f" (and {len(problems) - 1} more; see `headfold check`)" if len(problems) > 1 else ""
            raise CheckpointError(problems[0] + more)
        assert checkpoint is not None
        return checkpoint

    def shards(self) -> list[str]:
        """The weight files, in order."""
        return list(self.metadata)

    def total_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """One tensor in its stored dtype, or its rows start..stop-1 along the first dimension, as a new tensor."""
        import torch

        entry = self.tensors[name]
        start, stop = (0, entry.shape[0] if entry.shape else 1) if rows is None else rows
        assert 0 <= start <= stop <= (entry.shape[0] if entry.shape else 1), (entry, rows)
        if name in self.computed:
            return self.computed[name](start, stop)
        dtype = torch_dtype(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path / entry.file}: {name} is stored as {entry.dtype}, which cannot be read")
        shape = entry.shape if rows is None else (stop - start, *entry.shape[1:])
        row_bytes = entry.nbytes // entry.shape[0] if entry.shape and entry.shape[0] else entry.nbytes
        num_bytes = math.prod(shape) * DTYPE_BITS[entry.dtype] // 8
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        with io_errors(self.path / entry.file, "read"), (self.path / entry.file).open("rb", buffering=0) as file:
            file.seek(entry.start + start * row_bytes)
            read_into(file, memoryview(tensor.numpy().data))
        return tensor.view(dtype).reshape(shape)


def read_beside(directory: Path, name: str) -> bytes | None:
    """The bytes of a file beside the weights; None if there is none. Raises CheckpointError if it leads outside."""
    if not os.path.lexists(directory / name):
        return None
    path = contained(directory / name, directory)
    with io_errors(path, "read", CheckpointError):
        if path.stat().st_size > _MAX_BESIDE_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes are too many for this file")
        return path.read_bytes()


def read_record(path: str | Path) -> dict[str, Any]:
    """headfold.json of a directory; empty where there is none. Raises CheckpointError if it is no JSON object."""
    directory = _directory(path)
    data = read_beside(directory, RECORD_FILE)
    return {} if data is None else parse_json_object(data, str(directory / RECORD_FILE))


def load_config(path: str | Path) -> dict[str, Any]:
    """config.json of a directory, keys in their order. Needs no weights. Raises CheckpointError."""
    directory = _directory(path)
    with io_errors(directory, "read", CheckpointError):
        if not (directory / "config.json").exists():
            raise CheckpointError(f"{directory}: no config.json; not a Hugging Face checkpoint")
    config = read_json_object(contained(directory / "config.json", directory))
    nested = config.get("text_config")
    types = [
        config.get("model_type"),
        *([nested["model_type"]] if isinstance(nested, dict) and "model_type" in nested else []),
    ]
    if not all(isinstance(name, str) and re.fullmatch(r"[\w.-]{1,100}", name) for name in types):
        raise CheckpointError(f"{directory / 'config.json'}: no model_type, so the kind of model is not known")
    if config.get("transformers_weights") is not None:  # whatever is verified here would not be what is loaded
        raise CheckpointError(
            f"{directory / 'config.json'}: transformers_weights makes transformers load another file "
            f"({ascii(config['transformers_weights'])[:80]}) than the usual ones; remove the key if those are the model"
        )
    return config


def scan(path: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """Read everything but the tensors' data. Returns the checkpoint (if one can be made out) and all that is wrong."""
    problems: list[str] = []
    try:
        directory = _directory(path)
    except CheckpointError as error:
        return None, [str(error)]
    config: dict[str, Any] = {}
    try:
        config = load_config(directory)
    except CheckpointError as error:
        problems.append(str(error))
    try:
        with io_errors(directory, "read", CheckpointError):
            checkpoint = _scan_weights(directory, config, problems)
    except CheckpointError as error:
        return None, [*problems, str(error)]
    return checkpoint, problems


def _directory(path: str | Path) -> Path:
    directory = expanded(path)
    try:
        if directory.is_dir():
            return directory.resolve()
        exists = directory.exists()
    except (OSError, ValueError):  # a name that is too long, or has a NUL in it
        exists = False
    raise CheckpointError(f"{path}: {'a file, not a checkpoint directory' if exists else 'no such directory'}")


def contained(path: Path, directory: Path) -> Path:
    """`path` if it is a regular file whose data lies within the directory or in the hub cache that links it."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(f"{path}: a link that leads nowhere") from error
    homes = [directory]
    if directory.parent.name == "snapshots":  # a hub cache: snapshots/<commit>/file -> ../../blobs/<hash>
        homes.append(directory.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(f"{path}: links to {real}, outside the checkpoint; copy the file instead")
    if not real.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    return path


def _scan_weights(directory: Path, config: dict[str, Any], problems: list[str]) -> Checkpoint:
    names = sorted(entry.name for entry in os.scandir(directory))
    single, index_file = SINGLE_FILE, INDEX_FILE
    pickled = not any(name.endswith(".safetensors") for name in names) and INDEX_FILE not in names
    if pickled:
        single, index_file = PICKLED_FILE, PICKLED_INDEX_FILE
    if "adapter_config.json" in names:
        problems.append(f"{directory}: holds an adapter (adapter_config.json); merge it into the model first")
    if index_file in names and single in names:
        problems.append(
            f"{directory}: both {single} and {index_file}, and they may differ; remove the one that is not the model"
        )
    index: dict[str, Any] | None = None
    weight_map: dict[str, str] = {}
    if index_file in names:
        index = read_json_object(contained(directory / index_file, directory))
        weight_map = _weight_map(index, directory / index_file)
        shards = sorted(set(weight_map.values()))
    elif single in names:
        shards = [single]
    else:
        raise CheckpointError(_no_weights(directory, names))

    suffix = Path(single).suffix
    missing = [name for name in shards if name not in names]
    if missing:
        problems.append(
            f"{directory}: {index_file} names {len(shards)} files of which {len(missing)} are missing, "
            f"{missing[0]} first; complete the download"
        )
    # pytorch_model-00001-of-00002.bin, model-00001-of-00002.safetensors: part of the model by their name
    stray = [n for n in names if n.startswith(Path(single).stem) and n.endswith(suffix) and n not in shards]
    stray = [name for name in stray if name != single]
    if stray:
        place = f"the index {index_file} does not name it" if index else f"{single} is there too"
        problems.append(f"{directory}: {stray[0]} is not part of the model ({place}); remove it or mend the index")

    # What else lies there (tokenizer, generation_config ...) is read by name when the model is used.
    for name in names:
        if name not in (*shards, index_file, "config.json") and not _is_other_weights(name):
            try:
                if not (directory / name).is_dir():
                    contained(directory / name, directory)
            except CheckpointError as error:
                problems.append(str(error))

    digest = hashlib.sha256()
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, dict[str, str]] = {}
    computed: dict[str, Callable[[int, int], torch.Tensor]] = {}
    modified: dict[str, int] = {}
    for shard in shards:
        if shard in missing:
            continue
        try:
            path = contained(directory / shard, directory)
            modified[shard] = path.stat().st_mtime_ns
            if pickled:
                loaded = _load_pickle(path)
                header: dict[str, str] = {}
                entries = [_pickled_entry(shard, path, *item) for item in loaded.items()]
                computed.update({name: partial(_rows, tensor) for name, tensor in loaded.items()})
                identity = repr(entries).encode()
            else:
                header, entries, identity = read_header(path, shard)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        digest.update(f"{shard}\0{path.stat().st_size}\0{hashlib.sha256(identity).hexdigest()}\n".encode())
        metadata[shard] = header
        for entry in entries:
            if entry.name in tensors:
                problems.append(f"{directory}: {entry.name} is stored in {tensors[entry.name].file} and in {shard}")
            tensors[entry.name] = entry
    if not problems and index is not None:
        problems += _compare_with_index(directory, index_file, weight_map, tensors)
    checkpoint = Checkpoint(directory, config, tensors, metadata, index, digest.hexdigest(), [], computed, modified)
    if not problems and not tensors:
        problems.append(f"{directory}: no tensors in it")
    if index is not None and not problems:
        checkpoint.warnings += _compare_total_size(directory, index, index_file, checkpoint)
    return checkpoint


def _weight_map(index: dict[str, Any], path: Path) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map in it")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and re.fullmatch(r"[\w.-][\w. -]*", file)
        if not plain or not is_tensor_name(name) or not file.endswith((".safetensors", ".bin")):
            raise CheckpointError(
                f"{path}: {name[:200]!a} is said to be in {ascii(file)[:200]}, which is no file of this directory"
            )
    return weight_map


def _compare_with_index(
    directory: Path, index_file: str, weight_map: dict[str, str], tensors: dict[str, TensorEntry]
) -> list[str]:
    problems = []
    absent = [name for name, file in weight_map.items() if name not in tensors or tensors[name].file != file]
    if absent:
        problems.append(
            f"{directory}: {index_file} places {absent[0]} in {weight_map[absent[0]]}, where it is not "
            f"({len(absent)} such tensors)"
        )
    unnamed = [entry for entry in tensors.values() if entry.name not in weight_map]
    if unnamed:
        problems.append(
            f"{directory}: {unnamed[0].file} holds {unnamed[0].name}, which {index_file} does not name "
            f"({len(unnamed)} such tensors)"
        )
    return problems


def _compare_total_size(directory: Path, index: dict[str, Any], index_file: str, checkpoint: Checkpoint) -> list[str]:
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = checkpoint.total_bytes()
    if stated is None or stated == actual or checkpoint.computed:  # .bin files share the storage of tied tensors
        return []
    return [f"{directory / index_file}: total_size is {ascii(stated)[:40]}, but the tensors take {actual} bytes"]


def _no_weights(directory: Path, names: list[str]) -> str:
    other = [name for name in names if _is_other_weights(name)]
    found = f"found {', '.join(other[:3])}, which cannot be used" if other else "it holds no weights at all"
    return f"{directory}: no {SINGLE_FILE}, {INDEX_FILE} or {PICKLED_FILE}; {found}"


def _is_other_weights(file: str) -> bool:
    return bool(_OTHER_WEIGHTS.fullmatch(file)) or ("/" not in file and file.endswith(".safetensors"))


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .bin file; weights_only: nothing that the pickle asks for is run."""
    import torch

    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError, EOFError, RuntimeError, ...: whatever damage makes torch raise
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # torch first explains how to load it all the same, and says what it found in the last line but one
        reason = lines[-2] if isinstance(error, pickle.UnpicklingError) and len(lines) > 2 else lines[0]
        raise CheckpointError(f"{path}: not a file of weights alone ({reason[:200]})") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: holds other things than named tensors")
    for name, tensor in state.items():
        if not isinstance(name, str) or not is_tensor_name(name) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: holds other things than named tensors ({ascii(name)[:200]})")
        if not _is_plain(tensor):
            raise CheckpointError(f"{path}: {name} is no plain tensor; save the model as safetensors instead")
    return {name: tensor.detach() for name, tensor in state.items()}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what safetensors can hold: not sparse, nested or without data, nor more than its file holds,
    which it can be where a dimension is repeated by a stride of 0."""
    import torch

    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop].clone() if tensor.ndim else tensor.clone()


def _pickled_entry(shard: str, path: Path, name: str, tensor: torch.Tensor) -> TensorEntry:
    dtype = dtype_name(tensor.dtype)
    if dtype is None:
        raise CheckpointError(f"{path}: {name} is stored as {tensor.dtype}, which safetensors does not have")
    return TensorEntry(name, shard, dtype, tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())


def resolve_model(name_or_directory: str | Path, revision: str | None = None, *, only_config: bool = False) -> Path:
    """The local directory of a model: a directory as it is, or a hub name downloaded (or found in the hub's cache).

    `only_config` leaves the weights on the hub. Raises RefusedError for what is neither, and when the hub cannot be
    reached and its cache does not have the model.
    """
    name = str(name_or_directory)
    if not name:
        raise RefusedError("the name of the model is empty")
    path = expanded(name)
    try:
        if path.is_dir():
            return path
        if path.exists():
            raise RefusedError(f"{name}: a file, not a checkpoint directory")
    except (OSError, ValueError) as error:
        raise RefusedError(f"{name[:200]!r}: not a usable path ({error})") from error
    if not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name):
        raise RefusedError(f"{name}: no such directory")
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    def download(allow: list[str] | None = None, ignore: list[str] | None = None) -> Path:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=allow, ignore_patterns=ignore
        )
        return Path(folder)

    other = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx*", "*.h5", "*.msgpack", "*.ot", "consolidated*", "original/*"]
    try:
        if only_config:
            return download(allow=["config.json"])
        directory = download(ignore=other)
        if not any(directory.glob("*.safetensors")):
            directory = download(ignore=other[1:])
        return directory
    except GatedRepoError as error:
        raise RefusedError(f"{name}: access must be granted on the hub first (then log in: hf auth login)") from error
    except RevisionNotFoundError as error:
        raise RefusedError(f"{name}: no revision {revision!r} of it on the hub") from error
    except RepositoryNotFoundError as error:
        raise RefusedError(f"{name}: neither a directory here nor a model on the hub (or a private one)") from error
    except Exception as error:  # offline mode, name resolution, time-outs: as many classes as libraries below
        raise RefusedError(
            f"{name}: neither a directory here nor in the hub's cache, and the hub cannot be reached "
            f"({first_line(error)[:300]})"
        ) from error


# ---------------------------------------------------------------------------------------------------------- writing


class CheckpointWriter:
    """Writes a checkpoint of the source's names, order, shards and dtypes, with new shapes where they are given.

    The layout is fixed when the writer is made, so tensors and parts of them are written in any order; what is not
    written is copied from the source as bytes, by threads, inside the kernel where it can. Everything goes to
    OUTPUT.partial-*, which `finish` renames: as a context manager the writer removes it on any error, so that nothing
    half-written ever stands under the final name.
    """

    def __init__(
        self,
        source: Checkpoint,
        output: str | Path,
        *,
        shapes: Mapping[str, tuple[int, ...] | None] | None = None,
        layout: Layout | None = None,
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ):
        """A shape of None leaves a tensor out. `layout` replaces the source's names and dtypes altogether.
        `progress(done, total)` is called with bytes of tensors, from several threads but one at a time.

        Raises RefusedError before anything is written: the output exists (without `force`), is equal to, inside or
        around the source, or does not fit on the disk.
        """
        self.source = source
        self.output = Path(os.path.abspath(expanded(output)))
        self.layout = layout if layout is not None else _same_layout(source, shapes or {})
        self._force = force
        self._progress = progress
        self._places: dict[str, tuple[str, int]] = {}  # file and first byte of each tensor
        self._specs = {spec.name: spec for specs in self.layout.values() for spec in specs}
        self._missing = {name: spec.nbytes for name, spec in self._specs.items()}
        self.total_bytes = sum(self._missing.values())
        self._written_bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._copies: list[tuple[Future[None], Callable[[], None]]] = []
        self._being_copied: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._lock_descriptor: int | None = None
        card = read_beside(source.path, CARD_FILE)
        # surrogateescape: whatever is no UTF-8 in it comes out as it went in
        self._card = None if card is None else card.decode("utf-8", "surrogateescape")
        self._other_files, _ = other_files(source.path, source.shards())
        with io_errors(self.output, "write", RefusedError):
            if self.output.parent.is_dir():
                settle_replaced(self.output)
        refuse_output(source.path, self.output, force=force)
        self._refuse_full_disk()
        self.partial = self.output.with_name(f"{self.output.name}.partial-{secrets.token_hex(4)}")
        with io_errors(self.output, "write", RefusedError):
            self.output.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.output)
            self.partial.mkdir()
        try:
            self._lock_descriptor = lock_directory(self.partial)
            self._write_headers()
        except BaseException:
            self._abandon()
            raise

    def _refuse_full_disk(self) -> None:
        existing = next(path for path in (self.output, *self.output.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < self.total_bytes:
            raise RefusedError(
                f"{self.output}: {self.total_bytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free there"
            )

    def _write_headers(self) -> None:
        for file, specs in self.layout.items():
            metadata = {**self.source.metadata.get(file, {}), "format": "pt"}
            header, starts = encode_header(specs, metadata)
            self._places.update({name: (file, start) for name, start in starts.items()})
            with io_errors(self.partial / file, "write"), (self.partial / file).open("wb") as handle:
                handle.write(header)
                handle.truncate(len(header) + sum(spec.nbytes for spec in specs))

    def write(self, name: str, tensor: torch.Tensor, *, first_row: int = 0) -> None:
        """Write a tensor, or rows first_row.. of it. It is cast to the dtype in which it is stored."""
        spec = self._specs[name]
        rows = spec.shape[0] if spec.shape else 1
        assert tuple(tensor.shape[1:]) == spec.shape[1:], (spec, tuple(tensor.shape))
        assert first_row + (tensor.shape[0] if spec.shape else 1) <= rows, (spec, tuple(tensor.shape), first_row)
        import torch

        stored = tensor.detach().to("cpu", torch_dtype(spec.dtype)).contiguous().reshape(-1).view(torch.uint8)
        file, start = self._places[name]
        offset = start + first_row * (spec.nbytes // rows if rows else 0)
        with io_errors(self.partial / file, "write"), (self.partial / file).open("r+b", buffering=0) as handle:
            handle.seek(offset)
            write_all(handle, memoryview(stored.numpy().data))
        self._count(name, stored.numel())

    def copy_unwritten(self, expected: Collection[str] = ()) -> None:
        """Start to copy every tensor that has not been written and is not `expected` to be. `finish` waits for it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="headfold-copy")
        names = [
            name
            for name, missing in self._missing.items()
            if missing and name not in expected and name not in self._being_copied
        ]
        self._being_copied.update(names)
        for name in names:
            entry, spec = self.source.tensors[name], self._specs[name]
            assert (entry.dtype, entry.shape) == (spec.dtype, spec.shape), (entry, spec)
            assert self._missing[name] == spec.nbytes, f"{name} is written in part"
        stored = [name for name in names if name not in self.source.computed]
        copies = [partial(self._copy_computed, name) for name in names if name in self.source.computed]
        copies += [partial(self._copy_range, *byte_range) for byte_range in self._ranges(stored)]
        self._copies += [(self._pool.submit(copy), copy) for copy in copies]

    def finish(self, config: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Copy what is unwritten, add all other files, verify the result and put it under its final name.

        config becomes config.json, record headfold.json; the model card is amended from the record; every other file
        of the source is copied as it is.
        """
        from headfold.convert.card import amended_card
        from headfold.convert.check import verify_checkpoint

        self.copy_unwritten()
        self._wait_for_copies()
        unwritten = [name for name, missing in self._missing.items() if missing]
        assert not unwritten, f"never written: {unwritten[:3]}"
        for shard, modified in self.source.modified.items():
            path = self.source.path / shard
            with io_errors(path, "read"):
                if path.stat().st_mtime_ns != modified:
                    raise HeadfoldError(f"{path}: was written to while it was copied; run it again")
        for file in self._other_files:
            with io_errors(self.partial / file, "write"):
                (self.partial / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.source.path / file, self.partial / file)
        if len(self.layout) > 1 or self.source.index is not None:
            self._write_json(INDEX_FILE, self._new_index())
        self._write_json("config.json", config)
        self._write_json(RECORD_FILE, record)
        with io_errors(self.partial / CARD_FILE, "write"):
            (self.partial / CARD_FILE).write_bytes(amended_card(self._card, record).encode("utf-8", "surrogateescape"))
        verify_checkpoint(self.partial)
        self._sync()
        self._publish()

    def _new_index(self) -> dict[str, Any]:
        old = self.source.index or {}
        metadata = dict(old["metadata"]) if isinstance(old.get("metadata"), dict) else {}
        if isinstance(metadata.get("total_parameters"), int):
            metadata["total_parameters"] += sum(math.prod(spec.shape) for spec in self._specs.values()) - sum(
                entry.num_elements for entry in self.source.tensors.values()
            )
        metadata["total_size"] = self.total_bytes
        weight_map = {spec.name: file for file, specs in self.layout.items() for spec in specs}
        order = old.get("weight_map", {})
        names = [name for name in order if name in weight_map] + [name for name in weight_map if name not in order]
        return {**old, "metadata": metadata, "weight_map": {name: weight_map[name] for name in names}}

    def _write_json(self, file: str, value: Mapping[str, Any]) -> None:
        with io_errors(self.partial / file, "write"):
            (self.partial / file).write_bytes(encode_json(value, indent=2) + b"\n")

    def _sync(self) -> None:
        for path in self.partial.rglob("*"):
            if path.is_file():
                with io_errors(path, "write"), path.open("r+b") as handle:
                    os.fsync(handle.fileno())

    def _publish(self) -> None:
        with io_errors(self.output, "write"):
            if self.output.exists():
                refuse_output(self.source.path, self.output, force=self._force)  # it may have come up meanwhile
                replaced = self.partial  # the name of what was there before
                if not exchange(self.partial, self.output):
                    replaced = self.output.with_name(f"{self.output.name}.replaced-{secrets.token_hex(4)}")
                    self.output.rename(replaced)
                    try:
                        self.partial.rename(self.output)
                    except BaseException:
                        replaced.rename(self.output)
                        raise
                shutil.rmtree(replaced)
            else:
                self.partial.rename(self.output)
            sync_directory(self.output.parent)
        self._release()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abandon()

    def _abandon(self) -> None:
        """Stop the copies and remove what was written, unless it has been published."""
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.partial, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def _wait_for_copies(self) -> None:
        """This thread helps from the end: in a sharded checkpoint the others are in other files, whose locks it
        leaves alone. The first error of any copy ends it."""
        for future, copy in reversed(self._copies):
            for other, _ in self._copies:
                if other.done() and not other.cancelled():
                    other.result()
            if future.cancel():
                copy()
            else:
                future.result()
        if self._pool is not None:
            self._pool.shutdown()

    def _count(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._missing[name] -= num_bytes
            assert self._missing[name] >= 0, f"{name} is written twice"
            self._written_bytes += num_bytes
            if self._progress is not None:
                self._progress(self._written_bytes, self.total_bytes)

    def _copy_computed(self, name: str) -> None:
        for rows in row_blocks(self.source.tensors[name]):
            if self._stop.is_set():
                return
            self.write(name, self.source.read(name, rows), first_row=rows[0])

    def _ranges(self, names: list[str]) -> Iterator[tuple[str, int, str, int, list[tuple[str, int]]]]:
        """Byte ranges to copy: source file and start, output file and start, and the tensors' bytes in them.

        Neighbours in both files become one range, and ranges are cut so that threads share the work evenly.
        """
        source_file = file = ""
        start = output_start = size = 0
        pieces: list[tuple[str, int]] = []
        for name in names:
            entry = self.source.tensors[name]
            place, position = self._places[name]
            done = 0
            while done < entry.nbytes:
                here = (entry.file, entry.start + done, place, position + done)
                if here != (source_file, start + size, file, output_start + size) or size >= _COPY_PIECE_BYTES:
                    if pieces:
                        yield source_file, start, file, output_start, pieces
                    source_file, start, file, output_start = here
                    size, pieces = 0, []
                part = min(entry.nbytes - done, _COPY_PIECE_BYTES - size)
                pieces.append((name, part))
                size += part
                done += part
        if pieces:
            yield source_file, start, file, output_start, pieces

    def _copy_range(
        self, source_file: str, start: int, file: str, output_start: int, pieces: list[tuple[str, int]]
    ) -> None:
        path = self.partial / file
        with (
            io_errors(path, f"copy {source_file} into"),
            (self.source.path / source_file).open("rb", buffering=0) as reader,
            path.open("r+b", buffering=0) as writer,
        ):
            done = 0
            for name, size in pieces:
                if self._stop.is_set():
                    return
                copy_bytes(reader, start + done, writer, output_start + done, size)
                done += size
                self._count(name, size)


def _same_layout(source: Checkpoint, shapes: Mapping[str, tuple[int, ...] | None]) -> Layout:
    assert shapes.keys() <= source.tensors.keys(), sorted(shapes.keys() - source.tensors.keys())[:3]
    layout: Layout = {output_file(shard): [] for shard in source.shards()}
    for entry in source.tensors.values():
        shape = shapes.get(entry.name, entry.shape)
        if shape is not None:
            layout[output_file(entry.file)].append(TensorSpec(entry.name, entry.dtype, tuple(shape)))
    for specs in layout.values():
        # A smaller tensor may leave those behind it off the boundary of their element size: order by that size then,
        # as the safetensors library does.
        position, aligned = 0, True
        for spec in specs:
            aligned &= position * 8 % DTYPE_BITS[spec.dtype] == 0
            position += spec.nbytes
        if not aligned:
            specs.sort(key=lambda spec: -DTYPE_BITS[spec.dtype])
    return {file: specs for file, specs in layout.items() if specs}  # a re-map may leave a shard without any


def row_blocks(entry: TensorEntry, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
    """Rows first..stop-1 of a tensor (by default all) as ranges of about BLOCK_BYTES each; one range for a scalar."""
    num_rows = entry.shape[0] if entry.shape else 1
    stop = num_rows if stop is None else stop
    step = max(1, BLOCK_BYTES * num_rows // max(1, entry.nbytes))
    return ((start, min(start + step, stop)) for start in range(first, stop, step))


def output_file(shard: str) -> str:
    """The safetensors file for a shard: pytorch_model-00001-of-00002.bin -> model-00001-of-00002.safetensors."""
    if shard.endswith(".safetensors"):
        return shard
    return shard.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"


def other_files(directory: Path, shards: Collection[str]) -> tuple[list[str], list[str]]:
    """What lies in a directory beside shards, index, config, record and card: files to copy, and files to leave out.

    Left out are weights in other formats or other copies of the weights, which would be stale beside new ones. Hidden
    directories (.git, .cache) are not part of a checkpoint. Raises CheckpointError for links that lead outside.
    """
    ours = {"config.json", RECORD_FILE, CARD_FILE, INDEX_FILE, PICKLED_INDEX_FILE, *shards}
    copied, left_out = [], []

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"{error.filename}: cannot read it ({error.strerror})") from error

    for folder, folders, names in os.walk(directory, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise CheckpointError(f"{Path(folder) / name}: a linked directory inside a checkpoint; copy it instead")
        for name in sorted(names):
            file = (Path(folder) / name).relative_to(directory).as_posix()
            if file in ours:
                continue
            if _is_other_weights(file):
                left_out.append(file)
            else:
                contained(directory / file, directory)
                copied.append(file)
    return copied, left_out


def refuse_output(source: Path, output: Path, *, force: bool) -> None:
    """Raises RefusedError if `output` cannot be written: it exists, or it and the source are inside one another."""
    source, output = Path(os.path.abspath(source)), Path(os.path.abspath(expanded(output)))
    if _same(output, source):
        raise RefusedError(f"{output}: the output is the input itself; choose another directory")
    if any(_same(parent, source) for parent in output.parents):
        raise RefusedError(f"{output}: the output is inside the input {source}; choose another directory")
    if any(_same(parent, output) for parent in source.parents):
        raise RefusedError(f"{output}: the input {source} is inside the output; choose another directory")
    if not os.path.lexists(output):
        return
    if not output.is_dir() or output.is_symlink():
        raise RefusedError(f"{output}: exists and is not a directory; choose another output")
    if not force:
        raise RefusedError(f"{output}: exists already; choose another output, or replace it with --force")
    if any(output.iterdir()) and not (output / "config.json").is_file():
        raise RefusedError(f"{output}: is no checkpoint (no config.json), so even --force does not replace it")


def _same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False
