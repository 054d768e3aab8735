"""How many tokens texts are, as a Hugging Face tokenizer counts them and training would.

The tokenizer's own rules apply, special tokens included, and a document ends with the first of `END_NAMES` that the
tokenizer knows, where it knows one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[SEP]")

TokenCounter = Callable[[Sequence[str]], list[int]]


def token_counter(path: str) -> TokenCounter:
    """What counts the tokens of texts: `path` is a tokenizer.json, or a folder with one."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ValueError("--tokenizer needs the package tokenizers, which is not installed; run: pip install "
                         "tokenizers") from None
    file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"tokenizer is {path!r}, which is no file and no folder with a tokenizer.json; name one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"tokenizer is {path!r}, which is no tokenizer.json ({' '.join(str(error).split())}); name "
                         "one") from None
    end = next((number for name in END_NAMES if (number := tokenizer.token_to_id(name)) is not None), None)

    def count(texts: Sequence[str]) -> list[int]:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        return [len(one) + (end is not None and one[-1:] != [end]) for one in ids]

    return count
