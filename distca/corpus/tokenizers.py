"""Turn texts into tokens, by a Hugging Face tokenizer or byte by byte; training and counting use the same tokens.

transformers saves truncation and padding in a tokenizer.json, and a BPE may be saved with dropout. All three are
switched off: they would cut documents, lengthen them, and make tokens random. Tokens that the post-processor adds to a
text are kept. If it adds none at the end, the first of `END_NAMES` in the vocabulary is appended as end of document.
Without a tokenizer every byte is a token, and 256 is the end of document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from distca.validation import UserError, plain, read_json, short, to_install

END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
CHAT_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # beside tokenizer.json
END_OF_DOCUMENT = 256   # follows the byte tokens 0 to 255
MAX_TOKENIZER_BYTES = 2**30
TEXTS_PER_CALL = 512    # the tokenizer distributes the texts of one call over threads
MAX_CALL_CHARS = 2**21  # limits memory: the tokenizer keeps all tokens of a call, a hundred bytes each

Item = TypeVar("Item")


class Text(NamedTuple):
    """A document before it is tokenized."""

    where: str  # file, and line if a file has several documents; for errors
    content: bytes


class Tokens(NamedTuple):
    """A document as tokens."""

    ids: np.ndarray             # [tokens]
    in_loss: np.ndarray | None  # [tokens] bool, whether a token is in the loss; None if all are
    by_turns: bool = False      # begins a conversation whose loss does not follow the template's generation blocks


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """An open, deterministic tokenizer.json."""

    name: str                      # "data.tokenizer is '…'", for errors
    tokenizer: Any
    vocab: int                     # upper bound of all tokens, exclusive
    end: tuple[str, int] | None    # the token that ends a document
    adds_tokens: bool              # whether the post-processor adds tokens to a text

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize documents: drop a byte-order mark, keep the post-processor's tokens, append an end of document."""
        return [self._ended(one) for one in self._encoded([text.removeprefix("\ufeff") for text in texts])]

    def with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the tokens of each text and the characters [start, stop) of each token."""
        return [(one.ids, one.offsets) for one in self._encoded(texts, offsets=True)]

    def _encoded(self, texts: Sequence[str], *, offsets: bool = False) -> Any:
        with _one_line(f"{self.name}, which cannot encode a text", "repair the tokenizer, or give another"):
            return (self.tokenizer.encode_batch if offsets else self.tokenizer.encode_batch_fast)(list(texts))

    def _ended(self, encoding: Any) -> list[int]:
        ids: list[int] = encoding.ids
        if self.end is None or ids[-1:] == [self.end[1]]:
            return ids
        added = encoding.special_tokens_mask if self.adds_tokens else []
        return ids if added[-1:] == [1] and 0 in added else [*ids, self.end[1]]


def tokenizer_file(path: str, option: str) -> Path:
    """Return the path of the tokenizer.json that `option` names: the file or its folder."""
    file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"{option} is {path!r}, which is no file and no folder with a tokenizer.json; name one")
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise UserError(f"{option} is {path!r}, which has more than {MAX_TOKENIZER_BYTES} bytes; name a "
                        "tokenizer.json")
    return file


def tokenizer_facts(path: str, is_chat: bool) -> list[str]:
    """Return the versions of packages and the hashes of files that tokens depend on."""
    if not path:
        return []
    file = tokenizer_file(path, "data.tokenizer")
    files = [file, *(file.parent / name for name in CHAT_FILES if is_chat)]
    return [*(f"{name} {version(name)}" for name in ("tokenizers", "jinja2")[:1 + is_chat]),
            *(hashlib.blake2b(one.read_bytes(), digest_size=16).hexdigest() if one.is_file() else "" for one in files)]


def open_tokenizer(path: str, option: str, *, special_tokens: bool) -> TextTokenizer:
    """Open a tokenizer.json. Without `special_tokens`, its post-processor, which may also trim offsets, is removed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(f"{option} is {path!r} but the package tokenizers is not installed; "
                        f"{to_install('tokenizers')}") from None
    name = f"{option} is {path!r}"
    file = tokenizer_file(path, option)
    with _one_line(f"{name}, which is no tokenizer.json", "name one"):
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        if not special_tokens:
            tokenizer.post_processor = None
        vocab = 1 + max(tokenizer.get_vocab().values(), default=-1)
        added = tokenizer.encode("").ids
    if not vocab:
        raise UserError(f"{name}, whose vocabulary is empty; name another")
    if max(added, default=0) >= vocab:
        raise UserError(f"{name}, whose post_processor adds token {max(added)}, where tokens are 0 to {vocab - 1}; "
                        "repair it, or name another")
    if special_tokens:
        _check_beginning(name, file.parent / "tokenizer_config.json", tokenizer, added[:1])
    end = next(((word, number) for word in END_NAMES if (number := tokenizer.token_to_id(word)) is not None), None)
    return TextTokenizer(name, tokenizer, vocab, end, bool(added))


def encoded(texts: Sequence[Text], tokenizer: TextTokenizer | None) -> list[Tokens]:
    """Tokenize texts as documents, as bytes if there is no tokenizer."""
    if tokenizer is None:
        end = np.array([END_OF_DOCUMENT], dtype=np.uint16)
        return [Tokens(np.concatenate([np.frombuffer(text.content, np.uint8), end]), None) for text in texts]
    return [Tokens(np.array(ids, dtype=np.int64), None) for ids in tokenizer.documents([*map(_decoded, texts)])]


def in_groups(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Group items for calls of a tokenizer: many small items or few large ones per call."""
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


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file or no object."""
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _check_beginning(name: str, config_path: Path, tokenizer: Any, first: list[int]) -> None:
    """Refuse a tokenizer_config.json that contradicts the tokenizer.json about the first token of a text."""
    config = json_object(config_path)
    bos, wanted = config.get("bos_token"), config.get("add_bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    if isinstance(bos, str) and isinstance(wanted, bool) and wanted != (first == [tokenizer.token_to_id(bos)]):
        raise UserError(f"{name}, which {'does not begin' if wanted else 'begins'} a text with {short(bos)}, but the "
                        f"tokenizer_config.json beside it has add_bos_token {str(wanted).lower()}; save both by "
                        "transformers' save_pretrained, or take add_bos_token out")


@contextmanager
def _one_line(problem: str, remedy: str) -> Iterator[None]:
    """Turn errors of the package tokenizers into a UserError, also Rust panics, which are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, MemoryError) or not (panic or isinstance(error, Exception)):
            raise
        reason = plain(" ".join(str(error).split()))[:200]
        raise UserError(f"{problem} ({reason}); {remedy}") from None


def _decoded(text: Text) -> str:
    try:
        return text.content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{text.where}: not UTF-8 text, which data.tokenizer needs; convert it, or leave "
                        "data.tokenizer empty for byte tokens") from None
