"""Documents out of files: texts, JSON lines, tables. One at a time, in an order that the files alone decide.

A folder of texts is its files that are text: UTF-8 without a zero byte, whatever their names; what is left out is said
in one line. Hidden files are nobody's documents. gzip and Zstandard are unpacked wherever they are met.
"""

from __future__ import annotations

import json
import logging
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distca.corpus.tables import column_names, files_below, read_columns, table_files, text_lines, unpacked
from distca.corpus.tokenizers import Text, Tokens
from distca.train.settings import Data
from distca.validation import UserError, plain, short
from distca.workload.documents import IGNORED

FIELDS = {"text": "text", "chat": "messages", "tokens": "input_ids"}  # by data.content, where data.field is empty
MASK_FIELDS = ("loss_mask", "labels")  # beside the tokens, the first that a record has

_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_RECORDS_PER_BATCH = 64  # of a table: documents may be megabytes
_NAMES_SHOWN = 3
LOG = logging.getLogger("distca")


class Record(NamedTuple):
    """One line or row of a file, with its fields."""

    where: str
    fields: Mapping[str, Any]


def standard_library_files() -> list[Path]:
    """Every .py file of this Python's standard library in order of path, test suites and installed packages aside."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_THE_LIBRARY and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def whole_files(paths: list[Path]) -> Iterator[Text]:
    """Each file is a document, whatever is in it."""
    return (Text(str(path), unpacked(path)) for path in paths)


def text_files(path: str) -> Iterator[Text]:
    """A file, or the files of a folder that are text; the others are named in one line once all are read."""
    if not Path(path).is_dir():
        yield from whole_files(_paths(path, ("",)))
        return
    found = _paths(path, ("",))
    left_out: list[str] = []
    for text in whole_files(found):
        if _is_text(text.content):
            yield text
        else:
            left_out.append(Path(text.where).relative_to(path).as_posix())
    named = ", ".join(plain(name) for name in left_out[:_NAMES_SHOWN])
    if len(left_out) > _NAMES_SHOWN:
        named += f" and {len(left_out) - _NAMES_SHOWN} more"
    if len(left_out) == len(found):
        raise UserError(f"data.path is {path!r}, a folder without a UTF-8 text in it, but with {named}; name another, "
                        "or set data.source to what these are")
    if left_out:
        LOG.info("data.path %r: %d of %d files are not UTF-8 text and left out: %s", path, len(left_out), len(found),
                 named)


def records(data: Data, path: str) -> Iterator[Record]:
    """The lines or rows of JSON lines or tables, with the fields that `data.content` needs."""
    if data.source == "jsonl":
        for file in _paths(path, _JSONL):
            yield from _jsonl(file)
        return
    files = table_files(path, split=data.split, split_option="data.split")
    names = [data.field or FIELDS[data.content]]
    if data.content == "tokens":
        names += [name for name in MASK_FIELDS if all(name in column_names(file) for file in files)][:1]
    for some in read_columns(files, names, option="data.field", batch_records=_RECORDS_PER_BATCH):
        for number in range(len(some.columns[0])):
            yield Record(some.where(number), {
                name: some.value(column, number) for column, name in enumerate(names)})


def texts_of(found: Iterator[Record], field: str) -> Iterator[Text]:
    for record in found:
        value = _value(record, field, str, "text")
        try:
            yield Text(record.where, value.encode("utf-8"))
        except UnicodeEncodeError:
            raise UserError(f"{record.where} has half a surrogate pair under {field!r}; repair or drop it") from None


def tokens_of(found: Iterator[Record], field: str) -> Iterator[Tokens]:
    """Documents that are tokens already, with the loss on all of them or where `loss_mask` or `labels` say."""
    for record in found:
        ids = _whole_numbers(record, field)
        mask_field = next((name for name in MASK_FIELDS if record.fields.get(name) is not None), None)
        if mask_field is None:
            yield Tokens(ids, None)
            continue
        mask = _whole_numbers(record, mask_field)
        if len(mask) != len(ids):
            raise UserError(f"{record.where} has {len(ids)} tokens under {field!r} but {len(mask)} under "
                            f"{mask_field!r}; give one for each token")
        in_loss = mask != (IGNORED if mask_field == "labels" else 0)
        wrong = in_loss & (mask != (ids if mask_field == "labels" else 1))
        if wrong.any():
            known = f"the token itself or {IGNORED}" if mask_field == "labels" else "0 or 1"
            raise UserError(f"{record.where} has {mask[wrong][0]} under {mask_field!r} at token {wrong.argmax()}; "
                            f"give {known}, not yet shifted")
        yield Tokens(ids, in_loss)


def messages_of(found: Iterator[Record], field: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Where each conversation stands, and its messages: each with a role and a content."""
    for record in found:
        messages = _value(record, field, list, "a list of messages")
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise UserError(f"{record.where} has message {number} {short(message)} under {field!r}, which has no "
                                "role; write {\"role\": \"user\", \"content\": \"…\"}")
            if not isinstance(message.get("content", ""), str | list | None):
                raise UserError(f"{record.where} has content {short(message['content'])} in message {number}, not "
                                "text; repair or drop it")
        yield record.where, [_without_gaps(message) for message in messages]


def _jsonl(path: Path) -> Iterator[Record]:
    """Each line is a JSON object; blank lines are left out."""
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise UserError(f"{where} is not JSON ({reason}); repair or drop it") from None
        if not isinstance(fields, dict):
            raise UserError(f"{where} holds {short(fields)}, not an object; write {{\"text\": \"…\"}}")
        yield Record(where, fields)


def _value(record: Record, field: str, kind: type, word: str) -> Any:
    value = record.fields.get(field)
    if not isinstance(value, kind):
        raise UserError(f"{record.where} has {short(value)} under {field!r}, not {word}; its keys are "
                        f"{short(list(record.fields))}: set data.field to the one that holds it")
    return value


def _whole_numbers(record: Record, field: str) -> np.ndarray:
    value = record.fields.get(field)
    try:
        column = np.asarray(value)
    except ValueError:  # lists of different lengths
        column = np.empty(0, dtype=object)
    if isinstance(value, list | np.ndarray) and len(value) == 0:
        return np.empty(0, dtype=np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iub":
        raise UserError(f"{record.where} has {short(value)} under {field!r}, not a list of whole numbers; its keys "
                        f"are {short(list(record.fields))}: set data.field to the one that holds tokens")
    return column.astype(np.int64)


def _without_gaps(message: dict[str, Any]) -> dict[str, Any]:
    """A table gives every message all keys that any has; templates ask whether a key is there."""
    return {"content": "", **{key: value for key, value in message.items() if value is not None}}


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _paths(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or the files of a folder (with one of these suffixes, none hidden) in order of path."""
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"data.path is {path!r}, which is no file or folder; check the path")
    found = [file for file in files_below(root) if file.name.endswith(suffixes)]
    if not found:
        kind = f"{suffixes[0]} file" if suffixes[0] else "file"
        raise UserError(f"data.path is {path!r}, a folder without a {kind} in it; name another")
    return found
