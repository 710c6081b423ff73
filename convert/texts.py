"""Text as a stream of documents, from files, directories and data sets, and the tokenizers that make tokens of it.

Calibration, uptraining and evaluation all read their text here, so that they agree on what one document is:
a whole .txt or .md file, one line of a .jsonl file, one row of a .parquet file or of a data set.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from headfold.convert.checkpoint import contained, read_beside
from headfold.convert.errors import HeadfoldError, RefusedError, first_line
from headfold.convert.files import expanded
from headfold.convert.header import parse_json_object

TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
_TOKENIZER_CONFIG = "tokenizer_config.json"
COMPRESSED_SUFFIXES = tuple(f"{suffix}.gz" for suffix in TEXT_SUFFIXES if suffix != ".parquet")
SUPPORTED = f"{', '.join(TEXT_SUFFIXES)} (all but .parquet also as .gz), a directory of these, or a data set's name"


class DocumentStream(Iterator[str]):
    """An iterator of non-empty documents that counts what it gave and what it left out.

    Texts that are empty, blank, null or missing are skipped. A source in which nothing is left is an error, raised at
    its end, because nobody can calibrate, train or evaluate on no text at all.
    """

    def __init__(self, source: str, records: Iterator[Any], text_field: str):
        self.source = source
        self.num_documents = 0
        self.num_skipped = 0
        self._records = records
        self._text_field = text_field
        self._fields: list[str] = []

    def __next__(self) -> str:
        for record in self._records:
            text = record
            if isinstance(record, dict):
                self._fields = self._fields or list(record)
                text = record.get(self._text_field)
            if text is not None and not isinstance(text, str):
                raise RefusedError(
                    f"{self.source}: record {self.num_documents + self.num_skipped + 1} holds {type(text).__name__} "
                    f"where text is expected (text_field is {self._text_field!r})"
                )
            if text is None or not text.strip():
                self.num_skipped += 1
                continue
            self.num_documents += 1
            return text
        if not self.num_documents:
            fields = f"; the first record's fields are {', '.join(map(repr, self._fields))}" if self._fields else ""
            raise RefusedError(
                f"{self.source}: no text in it ({self.num_skipped} records without any; "
                f"text_field is {self._text_field!r}{fields})"
            )
        raise StopIteration


def read_documents(source: str | Path, *, text_field: str = "text", split: str = "train") -> DocumentStream:
    """The documents of `source`, read lazily and in a fixed order (the files of a directory by their path).

    source: a text file, JSON lines, a JSON list, parquet, a directory of those, a data set saved with `save_to_disk`,
    or a hub data set as `name` or `name:configuration`. `text_field` names the field of a record, `split` the part of
    a data set. Raises RefusedError at once for what cannot be opened, later for what is damaged inside.
    """
    name = str(source)
    path = expanded(source)
    if not path.exists():
        _refuse_missing_file(name)
        return DocumentStream(name, iter(_hub_dataset(name, split)), text_field)
    if _is_saved_dataset(path):
        return DocumentStream(name, iter(_saved_dataset(path, split)), text_field)
    return DocumentStream(name, (record for file in _files(path) for record in _records(file, text_field)), text_field)


def text_fingerprint(source: str | Path, *, split: str = "train") -> str:
    """sha256 (hex) of what `source` holds: of one file's bytes; of `sha256  path` lines for a directory.

    For a hub data set it is that of the name, the split and the hash by which `datasets` knows this version of it.
    """
    path = expanded(source)
    if not path.exists():
        _refuse_missing_file(str(source))
        return hashlib.sha256(_hub_identity(str(source), split).encode()).hexdigest()
    if path.is_file():
        return _file_sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if _is_saved_dataset(path) else _files(path)
    lines = "".join(f"{_file_sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint directory. Raises RefusedError if there is none, or it is not in the directory."""
    from transformers import AutoTokenizer

    path = path.resolve()
    _refuse_tokenizers_elsewhere(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever a missing or damaged tokenizer makes transformers raise
        if not any(name in entry for entry in os.listdir(path) for name in ("token", "vocab", "piece", "tekken")):
            raise RefusedError(
                f"{path}: no tokenizer: none of its files (tokenizer.json or tokenizer.model, tokenizer_config.json) "
                "is there; copy them from where the weights are from"
            ) from error
        raise RefusedError(f"{path}: no tokenizer that can be loaded: {first_line(error)}") from error


def _refuse_tokenizers_elsewhere(path: Path) -> None:
    """Files whose names tokenizer_config.json holds: transformers would follow them out of the directory."""
    data = read_beside(path, _TOKENIZER_CONFIG)
    config = {} if data is None else parse_json_object(data, str(path / _TOKENIZER_CONFIG))
    named = [("fast_tokenizer_files", config.get("fast_tokenizer_files")), ("gguf_file", config.get("gguf_file"))]
    # Of these, only strings are names of files. vocab_file and its like are not heeded.
    named += [(key, config[key]) for key in ("vocab", "merges") if isinstance(config.get(key), str)]
    named.append(("init_inputs", config.get("init_inputs")))
    for key, names in named:
        for name in names if isinstance(names, list) else [names]:
            if name is not None and Path(str(name)).name != name:
                raise RefusedError(
                    f"{path / _TOKENIZER_CONFIG}: {key} names another thing than a file in this directory "
                    f"({ascii(name)[:80]}); put the file there, or remove the key"
                )
            if name is not None and os.path.lexists(path / name):
                contained(path / name, path)


def _refuse_missing_file(name: str) -> None:
    """A path that is not there, as opposed to the name of a data set on the hub."""
    looks_like_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or name.lower().endswith(TEXT_SUFFIXES + COMPRESSED_SUFFIXES):
        raise RefusedError(f"{name}: no such file or directory")


def _files(path: Path) -> list[Path]:
    suffixes = TEXT_SUFFIXES + COMPRESSED_SUFFIXES
    if path.is_file():
        if not path.name.lower().endswith(suffixes):
            raise RefusedError(f"{path}: not a kind of text that can be read; use {SUPPORTED}")
        return [path]
    if not path.is_dir():
        raise RefusedError(f"{path}: neither a file nor a directory; use {SUPPORTED}, or a directory of them")
    files = [
        file
        for file in path.rglob("*")
        if file.name.lower().endswith(suffixes)
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise RefusedError(f"{path}: no text files in this directory; use {SUPPORTED}")
    return sorted(files)


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _records(path: Path, text_field: str) -> Iterator[Any]:
    """The records of one file: strings, dictionaries or None."""
    try:
        if path.suffix.lower() == ".parquet":
            yield from _parquet_records(path, text_field)
            return
        compressed = path.suffix.lower() == ".gz"
        kind = Path(path.stem).suffix.lower() if compressed else path.suffix.lower()
        with gzip.open(path) if compressed else path.open("rb") as file:
            if kind == ".jsonl":
                yield from _json_lines(path, file)
            elif kind == ".json":
                yield from _json_list(path, file)
            else:
                yield file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RefusedError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise RefusedError(f"{path}: cannot be read: {error}") from error


def _json_lines(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        yield _json_record(_json_value(line, f"{path}, line {number}"), f"{path}, line {number}")


def _json_list(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[Any]:
    value = _json_value(file.read(), str(path))
    for number, record in enumerate(value if isinstance(value, list) else [value], start=1):
        yield _json_record(record, f"{path}, record {number}")


def _json_value(data: bytes, place: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RefusedError(f"{place}: not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise RefusedError(f"{place}: not JSON ({error.msg}, column {error.colno})") from error
    except (RecursionError, ValueError) as error:  # nested too deep; a number with too many digits
        raise RefusedError(f"{place}: not usable JSON ({error})") from error


def _json_record(value: Any, place: str) -> Any:
    if value is None or isinstance(value, (str, dict)):
        return value
    raise RefusedError(f"{place}: a record must be an object or a string, found {type(value).__name__}")


def _parquet_records(path: Path, text_field: str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            if text_field not in table.schema_arrow.names:
                columns = ", ".join(map(repr, table.schema_arrow.names))
                raise RefusedError(f"{path}: no column {text_field!r} (text_field); its columns are {columns}")
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                yield from batch.column(0).to_pylist()
    except pyarrow.ArrowException as error:
        raise RefusedError(f"{path}: not a readable parquet file ({first_line(error)})") from error


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def _saved_dataset(path: Path, split: str) -> Any:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever a damaged directory makes `datasets` raise, the user sees one line
        raise RefusedError(f"{path}: not a readable data set ({first_line(error)})") from error
    if isinstance(dataset, dict):
        if split not in dataset:
            raise RefusedError(f"{path}: no split {split!r}; it has {', '.join(map(repr, dataset))}")
        return dataset[split]
    return dataset


def _hub_dataset(name: str, split: str) -> Any:
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(repository, configuration or None, split=split, streaming=True)
    except Exception as error:  # network, hub and parsing errors of several libraries
        raise _unknown_dataset(name, error) from error


def _hub_identity(name: str, split: str) -> str:
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        builder = datasets.load_dataset_builder(repository, configuration or None)
    except Exception as error:
        raise _unknown_dataset(name, error) from error
    return "\n".join([repository, builder.config_id, str(builder.hash), split])


def _unknown_dataset(name: str, error: Exception) -> HeadfoldError:
    return RefusedError(
        f"{name}: neither a file or directory here, nor a data set that can be loaded ({first_line(error)})"
    )
