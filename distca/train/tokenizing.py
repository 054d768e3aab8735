"""How texts become tokens: by a Hugging Face tokenizer, or byte by byte.

Without a tokenizer a token is a byte and 256 ends a document. With one, its own rules apply (special tokens included)
and a document ends with the first of `END_NAMES` that it knows, where it knows one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from distca.workload.token_counts import END_NAMES

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


def tokenizer_file(path: str) -> Path:
    """The tokenizer.json that `data.tokenizer` names, itself or by its folder."""
    file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"data.tokenizer is {path!r}, which is no file; name a tokenizer.json, or the folder of one")
    return file


def open_tokenizer(path: str) -> Any:
    """A Hugging Face tokenizer."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(f"data.tokenizer is {path!r} but the package tokenizers is not installed; run `pip install "
                         "tokenizers`, or leave data.tokenizer empty for byte tokens") from None
    file = tokenizer_file(path)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exception
        reason = " ".join(str(error).split())
        raise ValueError(f"data.tokenizer is {path!r}, which is no tokenizer.json ({reason}); name one") from None


def vocab_of(tokenizer: Any) -> int:
    """Every token is below this."""
    return 1 + max(tokenizer.get_vocab().values())


def load_tokenizer(path: str) -> Encoder:
    """The encoder of a Hugging Face tokenizer.json."""
    tokenizer = open_tokenizer(path)
    end = next((number for name in END_NAMES if (number := tokenizer.token_to_id(name)) is not None), None)
    return Encoder(vocab_of(tokenizer), lambda texts: _tokenized(tokenizer, end, texts))


def byte_encoder() -> Encoder:
    end = np.array([END_OF_DOCUMENT], dtype=np.uint16)
    return Encoder(END_OF_DOCUMENT + 1, lambda texts: [
        np.concatenate([np.frombuffer(text.content, dtype=np.uint8), end]) for text in texts])


def _tokenized(tokenizer: Any, end: int | None, texts: list[Text]) -> list[np.ndarray]:
    encodings = [encoding.ids for encoding in tokenizer.encode_batch([_decoded(text) for text in texts])]
    return [np.array(ids if end is None or ids[-1:] == [end] else [*ids, end], dtype=np.int64) for ids in encodings]


def _decoded(text: Text) -> str:
    try:
        return text.content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{text.where}: not UTF-8 text, which data.tokenizer needs; convert it, or leave "
                         "data.tokenizer empty for byte tokens") from None
