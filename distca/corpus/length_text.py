"""Lengths out of text: a number a line, CSV and TSV, JSON, and JSON lines.

Every refusal names the line. Lines are read in blocks of megabytes and parsed block by block, which is what makes a
million of them a matter of a second.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from distca.corpus.files import MAX_LINE_BYTES, LineBlock, chunks, line_blocks
from distca.corpus.length_values import LENGTH, Wanted, Where, lengths_of_lines, lengths_of_values, named
from distca.validation import MAX_TEXT_BYTES, UserError, is_count, parse_json, short
from distca.workload.documents import IntArray, Workload, bad_length, check_lengths, workload_from_json

ROWS_PER_BATCH = 4_096
NEW_LINE = "\n"
DELIMITERS = {"csv": ",", "tsv": "\t"}


def read_text_source(path: str, format_: str, wanted: Wanted) -> Workload | Iterator[IntArray]:
    """Lengths a part at a time, or a workload; an empty format is JSON where it begins so, else a number a line."""
    blocks = line_blocks(chunks(path))
    first = next((block for block in blocks if block.content.strip()), LineBlock(1, b""))
    blocks = chain([first], blocks)
    if format_ == "json" or (not format_ and first.content.lstrip()[:1] in (b"[", b"{")):
        return _read_json(_whole_text(blocks), wanted)
    if format_ in DELIMITERS:
        return _read_table(blocks, DELIMITERS[format_], wanted)
    if format_ == "jsonl":
        return (_json_lines(block, wanted) for block in blocks)
    if wanted.column is not None or wanted.counter is not None:
        raise UserError("one number a line has no columns and no texts; leave --column and --tokenizer out, or say "
                        "with --format what it is")
    return (lengths_of_lines(block.content, _line_of(block)) for block in blocks)


def _line_of(block: LineBlock) -> Where:
    return lambda index: f"line {block.first + index}"


def _whole_text(blocks: Iterator[LineBlock]) -> str:
    held, total = [], 0
    for block in blocks:
        total += len(block.content)
        if total > MAX_TEXT_BYTES:
            raise UserError(f"more than {MAX_TEXT_BYTES} bytes, the most that is read of one JSON value; give JSON "
                            "lines, CSV or .npy")
        held.append(block.content)
    return _decoded(b"".join(held))


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("not a text file; give UTF-8 text, or say with --format what it is") from None


def _read_json(text: str, wanted: Wanted) -> Workload | Iterator[IntArray]:
    try:
        content = parse_json(text)
    except ValueError:
        if _is_json(text.lstrip().split("\n", 1)[0]):
            raise UserError("several JSON values; name the file .jsonl, or give --format jsonl") from None
        raise
    if isinstance(content, dict):
        return workload_from_json(content)
    if not isinstance(content, list):
        raise UserError(f"holds {short(content)}; give a JSON list of lengths or of objects, or a workload")
    if any(isinstance(value, dict) for value in content):
        values = [_value(record, wanted, f"lengths[{index}]") for index, record in enumerate(content)]
        return iter([lengths_of_values(values, wanted, lambda index: f"lengths[{index}]")])
    return iter([check_lengths(content)])


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _json_lines(block: LineBlock, wanted: Wanted) -> IntArray:
    """A block parsed as one list, which is quick; line by line where that fails, to say which."""
    text = _decoded(block.content).rstrip("\n")
    records = _json_list(text.replace("\n", ","))
    numbers: Sequence[int] = range(block.first, block.first + text.count("\n") + 1)
    if len(records) != len(numbers):  # blank lines, or broken ones
        lines = [(number, line) for number, line in zip(numbers, text.split("\n"), strict=True) if line.strip()]
        numbers = [number for number, _ in lines]
        records = [_json_line(line, number) for number, line in lines]
    values = _usual_values(records) if wanted == Wanted() else None
    if values is None:
        values = [_value(record, wanted, f"line {number}") for number, record in zip(numbers, records, strict=True)]
    return lengths_of_values(values, wanted, lambda index: f"line {numbers[index]}")


def _json_list(content: str) -> list[Any]:
    try:
        found: list[Any] = json.loads(f"[{content}]")
    except (ValueError, RecursionError):
        return []
    return found


def _usual_values(records: list[Any]) -> list[Any] | None:
    """What stands under `length` where every record has it, without a look at the other keys."""
    try:
        return [record[LENGTH] for record in records]
    except (KeyError, TypeError):
        return None


def _json_line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number too long, or lists too deep"
        raise UserError(f"line {number} is not JSON ({reason}); repair or drop it") from None


def _value(record: Any, wanted: Wanted, where: str) -> Any:
    """What a record says about its length: itself, or what is under the key."""
    if not isinstance(record, dict):
        if isinstance(record, list | str):
            raise bad_length(where, record)
        return record
    try:
        return record[wanted.choose(list(record))]
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _read_table(blocks: Iterator[LineBlock], delimiter: str, wanted: Wanted) -> Iterator[IntArray]:
    """One column of a table with names in its first row; without names, columns are numbered from 1."""
    rows = csv.reader(_lines(blocks), delimiter=delimiter, strict=True)
    head: list[str] = []
    while not head:
        some, _ = _next_rows(rows, 1)
        if not some:
            return
        head = some[0]
    has_names = not all(is_count(cell.strip()) for cell in head)
    names = [cell.strip() for cell in head] if has_names else [str(number) for number in range(1, len(head) + 1)]
    at = names.index(wanted.choose(names))
    if not has_names:
        yield _cells([head], at, names, wanted, rows.line_num - 1)
    while (batch := _next_rows(rows, ROWS_PER_BATCH))[0]:
        yield _cells(batch[0], at, names, wanted, batch[1])


def _lines(blocks: Iterator[LineBlock]) -> Iterator[str]:
    for block in blocks:
        yield from (f"{line}\n" for line in _decoded(block.content).removesuffix("\n").split("\n"))


def _next_rows(rows: Any, count: int) -> tuple[list[list[str]], int]:
    """Some rows, and the number of the line before them. The csv module's limit of a field is the whole process's: it
    is ours meanwhile."""
    limit, before = csv.field_size_limit(MAX_LINE_BYTES), rows.line_num
    try:
        return list(islice(rows, count)), before
    except csv.Error as error:
        raise UserError(f"line {rows.line_num} is broken ({error}); repair it") from None
    finally:
        csv.field_size_limit(limit)


def _cells(rows: list[list[str]], at: int, names: list[str], wanted: Wanted, before: int) -> IntArray:
    """Lengths that one column of some rows says; `before` is the number of the line in front of them."""
    def line_of(row: int) -> str:
        return f"line {before + sum(1 + sum(cell.count(NEW_LINE) for cell in one) for one in rows[:row + 1])}"

    filled = [number for number, row in enumerate(rows) if row]
    short_row = next((number for number in filled if len(rows[number]) <= at), None)
    if short_row is not None:
        raise UserError(f"{line_of(short_row)} has {len(rows[short_row])} of the {len(names)} columns "
                        f"({named(names)}); repair or drop it")
    cells = [rows[number][at] for number in filled]
    if wanted.counter is not None:
        return lengths_of_values(list(cells), wanted, lambda index: line_of(filled[index]))
    plain_digits = all(map(str.isdecimal, cells))
    odd = None if plain_digits else next((at for at, cell in enumerate(cells) if not is_count(cell.strip())), None)
    if odd is not None:
        raise bad_length(line_of(filled[odd]), cells[odd])
    return lengths_of_lines(NEW_LINE.join(cells).encode(), lambda index: line_of(filled[index]))
