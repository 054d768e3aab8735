"""How texts become tokens: by a Hugging Face tokenizer, or byte by byte.

Without a tokenizer a token is a byte and 256 ends a document. With one, `token_counts` says what its tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from distca.validation import UserError
from distca.workload.token_counts import open_tokenizer

END_OF_DOCUMENT = 256  # behind the bytes 0 to 255
TEXTS_PER_CALL = 512   # the tokenizer spreads the texts of one call over threads
MAX_CALL_CHARS = 2**24  # and holds all of their tokens, tens of bytes each

Item = TypeVar("Item")


class Text(NamedTuple):
    """A document before it is tokens."""

    where: str  # for people: its file, and its line where a file holds several
    content: bytes


class Tokens(NamedTuple):
    """A document as tokens."""

    ids: np.ndarray            # [tokens]
    in_loss: np.ndarray | None  # [tokens] bool, whether the model is to learn to say it; None where it is all of them


class Encoder(NamedTuple):
    """How texts become tokens."""

    vocab: int
    encode: Callable[[list[Text]], list[np.ndarray]]


def encoded(texts: Iterable[Text], encoder: Encoder) -> Iterator[Tokens]:
    """The texts as tokens, some at a time; empty ones are left out."""
    filled = (text for text in texts if text.content)
    for some in in_groups(filled, lambda text: len(text.content)):
        yield from (Tokens(ids, None) for ids in encoder.encode(some))


def in_groups(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Lists for one call of a tokenizer each: many items, or few large ones."""
    group: list[Item] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if len(group) == TEXTS_PER_CALL or total >= MAX_CALL_CHARS:
            yield group
            group, total = [], 0
    if group:
        yield group


def load_tokenizer(path: str) -> Encoder:
    """The encoder of a Hugging Face tokenizer.json."""
    tokenizer = open_tokenizer(path, "data.tokenizer", special_tokens=True)
    return Encoder(tokenizer.vocab, lambda texts: [
        np.array(ids, dtype=np.int64) for ids in tokenizer.documents([_decoded(text) for text in texts])])


def byte_encoder() -> Encoder:
    end = np.array([END_OF_DOCUMENT], dtype=np.uint16)
    return Encoder(END_OF_DOCUMENT + 1, lambda texts: [
        np.concatenate([np.frombuffer(text.content, dtype=np.uint8), end]) for text in texts])


def _decoded(text: Text) -> str:
    try:
        return text.content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{text.where}: not UTF-8 text, which data.tokenizer needs; convert it, or leave "
                        "data.tokenizer empty for byte tokens") from None
