"""Lengths out of columns that are not text: .npy arrays, parquet, and Arrow files as Hugging Face datasets keep them.

Columns are read a few rows at a time, so that neither the texts of a corpus nor its tokens have to fit the memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from distca.validation import CORPUS_WHY, MAX_CORPUS_DOCUMENTS, check_whole, short
from distca.workload.byte_streams import STDIN, ByteSource
from distca.workload.documents import IntArray, check_lengths
from distca.workload.length_values import NO_TOKENIZER, Wanted, counted

MAX_HELD_BYTES = 2**28   # of a binary file that has to be held whole: from stdin, or unpacked
ROWS_PER_BATCH = 65_536
TEXTS_PER_BATCH = 1_024


def read_npy(source: ByteSource) -> IntArray:
    """A one-dimensional array of whole numbers, memory-mapped where it is a plain file; nothing is unpickled."""
    held = None if _is_file(source) else io.BytesIO(source.read(MAX_HELD_BYTES))
    try:
        array = (np.load(source.path, mmap_mode="r", allow_pickle=False) if held is None
                 else np.load(held, allow_pickle=False))
    except (ValueError, OSError, EOFError, SyntaxError, TypeError, MemoryError, OverflowError) as error:
        raise ValueError(f"no .npy array ({' '.join(str(error).split())}); save one with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise ValueError("several arrays (.npz); save one array with numpy.save")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"an array of {array.dtype} with shape {array.shape}; give whole numbers in one dimension")
    _check_rows(len(array))
    return check_lengths(array, most=MAX_CORPUS_DOCUMENTS)


def read_parquet(source: ByteSource, wanted: Wanted) -> Iterator[IntArray]:
    with _arrow_errors("parquet") as pyarrow:
        from pyarrow import parquet

        with _opened(pyarrow, source) as data, parquet.ParquetFile(data) as file:
            names = file.schema_arrow.names
            column = wanted.choose(names)
            _check_rows(file.metadata.num_rows)
            size = _rows_at_once(pyarrow, file.schema_arrow.field(names.index(column)).type)
            first = 0
            for batch in file.iter_batches(batch_size=size, columns=[column]):
                yield _lengths(pyarrow, batch.column(0), column, first, wanted)
                first += len(batch)


def read_arrow(source: ByteSource, wanted: Wanted) -> Iterator[IntArray]:
    """An Arrow stream, as Hugging Face datasets are saved, or an Arrow file."""
    with _arrow_errors("Arrow") as pyarrow, _opened(pyarrow, source) as data:
        for batch, first in _record_batches(pyarrow, data):
            column = wanted.choose(batch.schema.names)
            values = batch.column(batch.schema.names.index(column))
            size = _rows_at_once(pyarrow, values.type)
            for begin in range(0, len(values), size):
                yield _lengths(pyarrow, values.slice(begin, size), column, first + begin, wanted)


def _record_batches(pyarrow: Any, data: Any) -> Iterator[tuple[Any, int]]:
    is_file = data.read(6) == b"ARROW1"
    data.seek(0)
    first = 0
    if is_file:
        reader = pyarrow.ipc.open_file(data)
        batches: Iterator[Any] = (reader.get_batch(at) for at in range(reader.num_record_batches))
    else:
        batches = iter(pyarrow.ipc.open_stream(data))
    for batch in batches:
        _check_rows(first + len(batch))
        yield batch, first
        first += len(batch)


def _lengths(pyarrow: Any, values: Any, column: str, first: int, wanted: Wanted) -> IntArray:
    """Lengths that some rows of a column say; row numbers are from 0, as data frames count them."""
    import pyarrow.compute as compute

    kinds = pyarrow.types
    if values.null_count:
        row = first + int(np.flatnonzero(np.asarray(values.is_null()))[0])
        raise ValueError(f"{column}[{row}] is missing; drop the row, or give another --column")
    if kinds.is_integer(values.type):
        return check_lengths(values.to_numpy(zero_copy_only=False), column, first=first, most=MAX_CORPUS_DOCUMENTS)
    if kinds.is_list(values.type) or kinds.is_large_list(values.type) or kinds.is_fixed_size_list(values.type):
        lengths = np.asarray(compute.list_value_length(values)).astype(np.int64)
        return lengths[lengths > 0]
    if kinds.is_string(values.type) or kinds.is_large_string(values.type):
        if wanted.counter is None:
            raise ValueError(f"column {short(column)} {NO_TOKENIZER}")
        return np.array([n for n in counted([text for text in values.to_pylist() if text], wanted.counter) if n],
                        dtype=np.int64)
    raise ValueError(f"column {short(column)} holds {str(values.type)[:60]}; give a column of whole numbers, lists of "
                     "tokens, or text")


def _rows_at_once(pyarrow: Any, kind: Any) -> int:
    return ROWS_PER_BATCH if pyarrow.types.is_primitive(kind) else TEXTS_PER_BATCH


@contextmanager
def _arrow_errors(what: str) -> Iterator[Any]:
    """pyarrow, whose errors are the file's fault."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ModuleNotFoundError:
        raise ValueError(f"{what} data needs pyarrow, which is not installed; run: pip install 'distca[data]'"
                         ) from None
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"no {what} data ({' '.join(str(error).split())[:200]}); check what the file is") from None


@contextmanager
def _opened(pyarrow: Any, source: ByteSource) -> Iterator[Any]:
    open_it: Callable[[], Any] = (
        (lambda: pyarrow.memory_map(source.path)) if _is_file(source)
        else lambda: pyarrow.BufferReader(source.read(MAX_HELD_BYTES)))
    with open_it() as data:
        yield data


def _is_file(source: ByteSource) -> bool:
    return source.path != STDIN and not source.packing


def _check_rows(count: int) -> None:
    check_whole("the number of documents", count, least=0, most=MAX_CORPUS_DOCUMENTS, why=CORPUS_WHY)
