"""What users' files hold, document by document, before it is tokenized: texts, or tokens with their loss mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic

import numpy as np

from distca.corpus.tables import Record
from distca.corpus.tokenizers import Item, Text, TextTokenizer, Tokens, encoded
from distca.validation import UserError
from distca.workload.documents import IGNORED

MASK_FIELDS = ("loss_mask", "labels")  # keys of a loss mask beside the tokens; the first that exists is used


@dataclass(frozen=True, slots=True)
class RawDocuments(Generic[Item]):
    """Documents before they are tokenized, in order. The same files always give the same items."""

    name: str                                       # for errors and the log
    items: Iterable[Item]
    size: Callable[[Item], int]                     # about the number of characters
    encode: Callable[[list[Item]], list[Tokens]]    # may give several documents for an item; called on threads


def raw_texts(name: str, texts: Iterable[Text], tokenizer: TextTokenizer | None) -> RawDocuments[Text]:
    """Return texts as documents; empty ones are skipped."""
    return RawDocuments(name, (text for text in texts if text.content), lambda text: len(text.content),
                        partial(encoded, tokenizer=tokenizer))


def raw_tokens(name: str, records: Iterable[Record], field: str) -> RawDocuments[Record]:
    """Return records that hold tokens as documents."""
    return RawDocuments(name, records,
                        lambda record: sum(len(one) for one in record.fields.values() if hasattr(one, "__len__")),
                        lambda group: [tokens_of(record, field) for record in group])


def texts_of(records: Iterable[Record], field: str) -> Iterator[Text]:
    for record in records:
        try:
            yield Text(record.where, record.value(field, str, "text").encode("utf-8"))
        except UnicodeEncodeError:
            raise UserError(f"{record.where} has half a surrogate pair under {field!r}; repair or drop it") from None


def tokens_of(record: Record, field: str) -> Tokens:
    """Return a document of tokens; all of these are in the loss, unless `loss_mask` or `labels` select some."""
    ids = _whole_numbers(record, field)
    mask_field = next((name for name in MASK_FIELDS if record.fields.get(name) is not None), None)
    if mask_field is None:
        return Tokens(ids, None)
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
    return Tokens(ids, in_loss)


def _whole_numbers(record: Record, field: str) -> np.ndarray:
    value = record.fields.get(field)
    try:
        column = np.asarray(value)
    except ValueError:  # lists of different lengths
        column = np.empty(0, dtype=object)
    if isinstance(value, list | np.ndarray) and len(value) == 0:
        return np.empty(0, dtype=np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iub":
        raise record.refused(field, "a list of whole numbers")
    return column.astype(np.int64)
