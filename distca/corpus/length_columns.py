"""Lengths out of columns that are not text: .npy arrays, parquet, and Arrow files as Hugging Face datasets keep them.

Columns are read some records at a time, so that neither the texts of a corpus nor its tokens have to fit the memory.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap, read_array

from distca.corpus.files import STDIN, chunks
from distca.corpus.length_values import NO_TOKENIZER, Wanted, counted
from distca.corpus.tables import RECORDS_PER_BATCH, Records, column_names, pyarrow, read_columns
from distca.validation import CORPUS_WHY, MAX_CORPUS_DOCUMENTS, UserError, check_whole, plain, short
from distca.workload.documents import IntArray, check_lengths

NUMBERS_PER_BATCH = 2**18
MAX_HELD_BYTES = 2**28   # of an array that has to be held whole: from stdin, or unpacked


def read_npy(path: str) -> IntArray:
    """A one-dimensional array of whole numbers, memory-mapped where it is a plain file; nothing is unpickled."""
    is_plain = path != STDIN and path.lower().endswith(".npy") and os.path.isfile(path)
    held = None if is_plain else io.BytesIO(b"".join(chunks(path, MAX_HELD_BYTES)))
    try:
        array = open_memmap(path, mode="r") if held is None else read_array(held, allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError, TypeError, MemoryError, OverflowError) as error:
        reason = plain(" ".join(str(error).split()))[:200]
        raise UserError(f"no .npy array ({reason}); save one with numpy.save") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"an array of {array.dtype} with shape {array.shape}; give whole numbers in one dimension")
    check_whole("the number of documents", len(array), least=0, most=MAX_CORPUS_DOCUMENTS, why=CORPUS_WHY)
    return check_lengths(array, most=MAX_CORPUS_DOCUMENTS)


def read_tables(files: Sequence[Path], wanted: Wanted) -> Iterator[IntArray]:
    """Lengths that one column of parquet or Arrow files says."""
    column = wanted.choose(column_names(files[0]))
    first = next(read_columns(files[:1], [column], option="--column"), None)
    is_number = first is not None and pyarrow().types.is_integer(first.columns[0].type)
    for some in read_columns(files, [column], option="--column",
                             batch_records=NUMBERS_PER_BATCH if is_number else RECORDS_PER_BATCH):
        yield _lengths(some, column, wanted)


def _lengths(some: Records, column: str, wanted: Wanted) -> IntArray:
    """Row numbers are from 0, as data frames count them."""
    arrow: Any = pyarrow()
    values, kinds = some.columns[0], arrow.types
    if values.null_count:
        record = int(np.flatnonzero(np.asarray(values.is_null()))[0])
        raise UserError(f"{some.where(record)} has nothing under {short(column)}; drop it, or give another --column")
    if kinds.is_integer(values.type):
        return check_lengths(values.to_numpy(zero_copy_only=False), column, first=some.first)
    if kinds.is_list(values.type) or kinds.is_large_list(values.type) or kinds.is_fixed_size_list(values.type):
        lengths = np.asarray(values.value_lengths()).astype(np.int64)
        return lengths[lengths > 0]
    if kinds.is_string(values.type) or kinds.is_large_string(values.type):
        if wanted.counter is None:
            raise UserError(f"column {short(column)} {NO_TOKENIZER}")
        counts = counted([text for text in values.to_pylist() if text], wanted.counter)
        return np.array([count for count in counts if count], dtype=np.int64)
    raise UserError(f"column {short(column)} holds {str(values.type)[:60]}; give a column of whole numbers, lists of "
                    "tokens, or text")
