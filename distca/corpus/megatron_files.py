"""Megatron's .bin/.idx datasets, memory-mapped.

The .bin file is tokens and nothing else; the .idx file says of what type they are, where each sequence begins and how
long it is, and which sequences make up a document. A torn copy would read as other documents, so every number in the
header is compared with the sizes of both files before the first token is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distca.validation import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class Index(NamedTuple):
    """What an .idx file says."""

    dtype: np.dtype
    lengths: np.ndarray    # [sequences] tokens
    begins: np.ndarray     # [sequences] byte of the .bin file where each begins
    documents: np.ndarray  # [documents + 1] first sequence of each document, then the number of sequences


@dataclass(frozen=True, slots=True, eq=False)
class MegatronCorpus:
    """The documents of one dataset; a document of several sequences is their tokens in order."""

    index: Index
    data: np.ndarray           # [bytes] of the .bin file
    vocab: int | None = None   # what a tokenizer says; not known without reading every token

    @classmethod
    def open(cls, path: str, vocab: int | None = None) -> MegatronCorpus:
        """`path` with or without .bin or .idx at its end; `vocab` is of the tokenizer that made the tokens."""
        prefix = path[:-4] if path.endswith((".bin", ".idx")) else path
        index_path, data_path = Path(prefix + ".idx"), Path(prefix + ".bin")
        for file in (index_path, data_path):
            if not file.is_file():
                raise UserError(f"data.path is {path!r} but {file} is no file; a Megatron dataset needs .idx and .bin")
        index = read_index(index_path)
        data = _mapped(data_path)
        ends = index.begins + index.lengths.astype(np.int64) * index.dtype.itemsize
        if (index.begins < 0).any() or (index.lengths < 0).any():
            raise _torn(index_path, "holds a negative length or pointer")
        if len(ends) and ends.max() > len(data):
            raise _torn(data_path, f"holds {len(data)} bytes but {index_path.name} points up to byte {ends.max()}")
        if not index.lengths.any():
            raise UserError(f"{prefix} holds no document with a token in it; give at least one")
        return cls(index, data, vocab)

    @property
    def num_documents(self) -> int:
        return len(self.index.documents) - 1

    def lengths(self) -> np.ndarray:
        before = np.concatenate([[0], np.cumsum(self.index.lengths, dtype=np.int64)])
        return np.diff(before[self.index.documents])

    def tokens(self, document: int) -> np.ndarray:
        first, last = self.index.documents[document], self.index.documents[document + 1]
        parts = [self._sequence(sequence) for sequence in range(first, last)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.index.dtype), *parts])

    def in_loss(self, document: int) -> np.ndarray | None:
        return None

    def _sequence(self, sequence: int) -> np.ndarray:
        begin, length = int(self.index.begins[sequence]), int(self.index.lengths[sequence])
        return self.data[begin:begin + length * self.index.dtype.itemsize].view(self.index.dtype)


def read_index(path: Path) -> Index:
    """Magic, version, type, sequences, document bounds; then lengths, pointers, bounds. A torn file is refused."""
    content = _mapped(path)
    if content[:len(_MAGIC)].tobytes() != _MAGIC:
        raise UserError(f"{path} does not begin with {_MAGIC[:7].decode()}, as every index does that Megatron has "
                        "written since 2019; preprocess the text again")
    header = struct.Struct(f"<{len(_MAGIC)}sQBQQ")
    if len(content) < header.size:
        raise _torn(path, f"holds {len(content)} bytes, less than a header of {header.size}")
    _, version, code, sequences, bounds = header.unpack(content[:header.size].tobytes())
    dtype = _token_type(path, version, code)
    size = header.size + 12 * sequences + 8 * bounds
    if sequences and len(content) == size + sequences:
        raise UserError(f"{path} is multimodal: it has a mode for each sequence; give a dataset of text alone")
    if len(content) != size:
        raise _torn(path, f"holds {len(content)} bytes where its header promises {size}")
    at = header.size
    lengths, at = content[at:at + 4 * sequences].view("<i4"), at + 4 * sequences
    begins, at = content[at:at + 8 * sequences].view("<i8"), at + 8 * sequences
    index = Index(dtype, lengths, begins, content[at:at + 8 * bounds].view("<i8"))
    documents, count = index.documents, len(index.lengths)
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != count or (np.diff(documents) < 0).any():
        raise _torn(path, f"does not divide its {count} sequences into documents")
    return index


def _token_type(path: Path, version: int, code: int) -> np.dtype:
    if version != _VERSION:
        raise UserError(f"{path} is of version {version}; only version {_VERSION} is known: preprocess the text again")
    if code not in _TOKEN_TYPES:
        known = ", ".join(f"{number} ({np.dtype(kind).name})" for number, kind in _TOKEN_TYPES.items())
        raise UserError(f"{path} gives its tokens the type code {code}; tokens are one of {known}")
    return np.dtype(_TOKEN_TYPES[code]).newbyteorder("<")


def _mapped(path: Path) -> np.ndarray:
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give readable files") from None


def _torn(path: Path, what: str) -> ValueError:
    return UserError(f"{path} {what}; the file is torn: copy or preprocess it again")
