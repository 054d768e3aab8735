"""Document lengths: check them, sample them, and keep those of one batch as a Workload.

Planning needs nothing else of the data, and a wrong length would show only much later, as a wrong mask. So every reader
of lengths calls `check_lengths`, whose errors name the field, its value and the remedy.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.columns import IntArray
from distca.spec import unknown_name
from distca.validation import CORPUS_WHY, DOCUMENTS_WHY, MAX_DOCUMENTS, UserError, check_name, check_whole, short

MAX_TOKENS = 2**40      # of a workload
IGNORED = -100          # label of a token whose next token does not exist or is not in the loss
MAX_LENGTH = 2**31 - 1  # so that the causal pairs of one document fit an int64

QUANTILE_LEVELS = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.975, 0.99, 0.995, 0.999, 1.0)
QUANTILES = {
    "prolong": (575, 678, 801, 919, 1237, 1913, 3467, 6051, 8378, 11165, 16269, 21357, 47397, 340149),
    "pretrain": (1, 63, 324, 646, 1606, 3227, 4832, 5784, 6110, 7482, 26058, 69097, 119793, 124913),
}
LOGNORMAL_MEDIAN = 2000.0
LOGNORMAL_SIGMA = 1.2
SAMPLERS = (*QUANTILES, "lognormal")

LONG_DOCUMENT = 65_536  # upsampling repeats documents over this length LONG_REPEATS times
LONG_REPEATS = 4
SHORT_KEPT = 0.5        # the fraction of the other documents that upsampling keeps

_DRAWS_PER_CHUNK = 16_384
WORKLOAD_KEYS = ("name", "ranks", "tokens_per_rank", "sequences")


def check_lengths(
    lengths: Iterable[int] | npt.NDArray[Any], field: str = "lengths", *, most: int = MAX_DOCUMENTS,
    where: Callable[[int], str] | None = None,
) -> IntArray:
    """Return the lengths as int64, or raise a UserError that names the first one that is not a positive whole number.

    `most` limits the number of lengths. `where` names the length with an index in errors, by default `field[index]`.
    """
    where = where or (lambda index: f"{field}[{index}]")
    if isinstance(lengths, np.ndarray):
        if lengths.ndim != 1:
            raise UserError(f"{field} has shape {lengths.shape}; give one flat list of document lengths")
        if lengths.dtype.kind not in "iu":
            lengths = lengths.tolist()
    elif isinstance(lengths, (str, bytes)) or not isinstance(lengths, Iterable):
        raise UserError(f"{field} is {short(lengths)}; give a list of document lengths")
    values = lengths if isinstance(lengths, np.ndarray) else _whole_numbers(list(lengths), where)
    if values.size == 0:
        raise UserError(f"{field} is empty; give at least one document length")
    check_whole(f"the number of {field}", values.size, most=most,
                why=DOCUMENTS_WHY if most == MAX_DOCUMENTS else CORPUS_WHY)
    bad = (values < 1) | (values > MAX_LENGTH)
    if bad.any():
        index = int(bad.argmax())
        raise bad_length(where(index), int(values[index]))
    return values.astype(np.int64, copy=False)


def sample_lengths(
    name: str, num_tokens: int, *, seed: int, max_document: int | None = None, upsample: bool = True
) -> IntArray:
    """Sample documents with exactly `num_tokens` tokens in total; the last one is cut to fit.

    With `upsample`, documents over 64K tokens are repeated four times, half of the shorter ones are dropped, and all
    are shuffled. Then documents longer than `max_document` are cut to it. The same seed gives the same documents; more
    tokens only append to them.
    """
    if name not in SAMPLERS:
        raise unknown_name("sampler", name, SAMPLERS)
    num_tokens = check_whole("num_tokens", num_tokens)
    if max_document is not None:
        max_document = check_whole("max_document", max_document)
    check_whole("seed", seed, least=0)
    rng = np.random.default_rng(int(seed))
    chunks: list[IntArray] = []
    drawn = 0
    while drawn < num_tokens:
        chunk = draw_lengths(rng, _DRAWS_PER_CHUNK, name)
        chunk = upsampled(rng, chunk) if upsample else chunk
        chunks.append(chunk if max_document is None else np.minimum(chunk, max_document))
        drawn += int(chunks[-1].sum())
    return fill(np.concatenate(chunks), num_tokens)


def draw_lengths(rng: np.random.Generator, count: int, name: str) -> IntArray:
    """Draw lengths from a sampler; between quantiles the logarithm of the length is interpolated linearly."""
    if name == "lognormal":
        lengths = np.rint(rng.lognormal(np.log(LOGNORMAL_MEDIAN), LOGNORMAL_SIGMA, count))
        return np.clip(lengths, 1, MAX_LENGTH).astype(np.int64)
    log_length = np.interp(rng.random(count), QUANTILE_LEVELS, np.log(QUANTILES[name]))
    return np.rint(np.exp(log_length)).astype(np.int64)


def upsampled(rng: np.random.Generator, lengths: IntArray) -> IntArray:
    """Repeat long documents, drop a part of the others, and shuffle."""
    is_long = lengths > LONG_DOCUMENT
    repeats = np.where(is_long, LONG_REPEATS, rng.random(lengths.size) < SHORT_KEPT)
    return rng.permutation(np.repeat(lengths, repeats))


def fill(lengths: Iterable[int] | npt.NDArray[Any], num_tokens: int) -> IntArray:
    """Return the first documents, with exactly `num_tokens` tokens in total; the last one is cut to fit."""
    num_tokens = check_whole("num_tokens", num_tokens)
    values = check_lengths(lengths)
    ends = np.cumsum(values)
    if ends[-1] < num_tokens:
        raise UserError(f"lengths hold {ends[-1]} tokens but {num_tokens} are needed; add documents, or lower ranks or "
                        "tokens_per_rank")
    last = int(np.searchsorted(ends, num_tokens))
    filled = values[: last + 1].copy()
    filled[-1] -= ends[last] - num_tokens
    return filled


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A batch: sequences of documents, each of which fills consecutive ranks of `tokens_per_rank` tokens."""

    name: str
    ranks: int
    tokens_per_rank: int
    sequences: tuple[IntArray, ...]  # document lengths, in order

    def __post_init__(self) -> None:
        check_name("name", self.name)
        for name in ("ranks", "tokens_per_rank"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name), most=MAX_TOKENS))
        if not isinstance(self.sequences, (list, tuple)) or not self.sequences:
            raise UserError(
                f"sequences is {short(self.sequences)}; give at least one sequence, each a list of document lengths")
        checked = tuple(check_lengths(seq, f"sequences[{i}]").copy() for i, seq in enumerate(self.sequences))
        for i, lengths in enumerate(checked):
            lengths.setflags(write=False)
            if lengths.sum() % self.tokens_per_rank:
                raise UserError(
                    f"sequences[{i}] holds {lengths.sum()} tokens, not a whole multiple of tokens_per_rank "
                    f"{self.tokens_per_rank}; add or cut documents until it fills its ranks")
        filled = sum(int(lengths.sum()) for lengths in checked) // self.tokens_per_rank
        if filled != self.ranks:
            raise UserError(
                f"sequences fill {filled} ranks of {self.tokens_per_rank} tokens but ranks is {self.ranks}; "
                f"set ranks to {filled} or change the sequences")
        object.__setattr__(self, "sequences", checked)


def workload_from_json(content: Mapping[str, Any]) -> Workload:
    missing = [key for key in WORKLOAD_KEYS if key not in content]
    if missing:
        raise UserError(
            f"not a workload: its keys are {short(list(content))}, without {', '.join(missing)}; give "
            f"{', '.join(WORKLOAD_KEYS)}, or a JSON list of lengths")
    return Workload(**{key: content[key] for key in WORKLOAD_KEYS})


def _whole_numbers(values: list[Any], where: Callable[[int], str]) -> IntArray:
    if not all(type(value) is int for value in values):
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise bad_length(where(index), value)
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        index = next(i for i, value in enumerate(values) if abs(int(value)) > MAX_LENGTH)
        raise bad_length(where(index), int(values[index])) from None


def bad_length(field: str, value: object) -> UserError:
    """Return the error for a value that is not a length."""
    return UserError(f"{field} is {short(value)}; a document length is a whole number of tokens from 1 to {MAX_LENGTH}")
