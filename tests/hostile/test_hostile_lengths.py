"""Files of lengths with bytes missing, changed or of another kind: lengths, or one line; never an accident."""

from __future__ import annotations

import gzip
import io
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distca import cli
from distca.corpus.lengths import FORMATS, Reading, read_source
from distca.validation import UserError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed; pip install zstandard")
from pyarrow import parquet  # noqa: E402

Run = Callable[..., tuple[int, str, str]]
NUM_CHANGES = 60
LENGTHS = list(range(1, 400))


def _made(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _arrow(file: io.BytesIO) -> None:
    table = pyarrow.table({"length": LENGTHS, "input_ids": [[1, 2]] * len(LENGTHS)})
    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


LINES = "\n".join(map(str, LENGTHS)).encode()
FILES: dict[str, bytes] = {
    "a.npy": _made(lambda file: np.save(file, np.array(LENGTHS))),
    "a.parquet": _made(lambda file: parquet.write_table(pyarrow.table({"id": LENGTHS, "length": LENGTHS}), file)),
    "lists.parquet": _made(lambda file: parquet.write_table(pyarrow.table({"input_ids": [[1, 2]] * 300}), file)),
    "a.arrow": _made(_arrow),
    "a.csv": b"id,length\n" + b"\n".join(b"%d,%d" % (n, n) for n in LENGTHS),
    "a.jsonl": "\n".join(json.dumps({"length": n}) for n in LENGTHS).encode(),
    "a.txt": LINES,
    "a.txt.gz": gzip.compress(LINES),
    "a.txt.zst": zstandard.compress(LINES),
}


def _changed(content: bytes, seed: int) -> bytes:
    """A piece cut out, or some bytes that are others."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        first, last = sorted(rng.integers(0, len(content), 2).tolist())
        return content[:first] + content[last:] if seed % 2 else content[:last]
    data = bytearray(content)
    for at in rng.integers(0, len(content), int(rng.integers(1, 6))).tolist():
        data[at] = int(rng.integers(0, 256))
    return bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_changed_files_are_lengths_or_one_line(tmp_path: Path, name: str) -> None:
    refused = 0
    for seed in range(NUM_CHANGES):
        path = tmp_path / name
        path.write_bytes(_changed(FILES[name], seed))
        try:
            found = read_source(path)
        except UserError as error:
            refused += 1
            assert str(error).startswith(str(path)), (seed, error)
            assert str(error).isprintable() and len(str(error)) < 600 + len(str(path))
        else:
            assert isinstance(found, np.ndarray) and found.min() >= 1
    assert refused > 5


def test_changed_tokenizers_are_lengths_or_one_line(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "</s>": 2}, unk_token="<unk>"))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    made.enable_truncation(2)
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n')
    refused = 0
    for seed in range(5 * NUM_CHANGES):
        (tmp_path / "t.json").write_bytes(_changed(made.to_str().encode(), seed))
        try:
            found = read_source(tmp_path / "a.jsonl", Reading(tokenizer=str(tmp_path / "t.json")))
        except UserError as error:
            refused += 1
            assert str(error).isprintable() and "--tokenizer is " in str(error), (seed, error)
        else:
            assert isinstance(found, np.ndarray) and found.min() >= 1
    assert refused > 5


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("format_", FORMATS)
def test_files_that_are_said_to_be_others(tmp_path: Path, name: str, format_: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    try:
        found = read_source(tmp_path / name, Reading(format=format_))
    except UserError as error:
        assert str(error).isprintable()
    else:
        assert isinstance(found, np.ndarray) and len(found) >= 300


def _bombs() -> dict[str, bytes]:
    rows = 33 * 2**20  # of one value each: kilobytes of parquet that say to be a quarter of a gigabyte
    column = pyarrow.chunked_array([pyarrow.array(np.ones(2**20, dtype=np.int64))] * (rows // 2**20))
    return {
        "lines.txt.gz": gzip.compress(b"\n" * 2**27, 6), "line.txt.gz": gzip.compress(b"5" * 2**27, 6),
        "zeros.npy.gz": gzip.compress(b"\0" * 2**27, 6), "ones.txt.zst": zstandard.compress(b"1\n" * 2**27),
        "line.jsonl.zst": zstandard.compress(b"[" * 2**27),
        "rows.parquet": _made(lambda file: parquet.write_table(pyarrow.table({"length": column}), file)),
        "shape.npy": _npy_of_shape(2**40),
    }


def _npy_of_shape(count: int) -> bytes:
    content = _made(lambda file: np.save(file, np.ones(2, dtype=np.int64)))
    return content.replace(b"(2,)", f"({count},)".encode(), 1)


def test_bombs_are_refused_in_little_time_and_memory(run: Run, tmp_path: Path) -> None:
    for name, content in _bombs().items():
        (tmp_path / name).write_bytes(content)
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        code, out, err = run("plan", name)
        seconds = time.process_time() - begin
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert (code, out, err.count("\n")) == (2, "", 1) and name in err, err
        assert seconds < 5 and grown < 2**30, (name, seconds, grown)


@pytest.mark.parametrize("arguments", [
    ("--column", ""), ("--column", "\x1b[2J"), ("--column", "x" * 10_000), ("--format", ""), ("--format", "\u202egpj"),
    ("--tokenizer", ""), ("--tokenizer", "/dev/zero"), ("--tokenizer", "no\x00name"), ("--batches", "-1"),
    ("--batches", "1" + "0" * 18), ("--batches", "nan"),
])
@pytest.mark.parametrize("command", [("plan",), ("simulate", "--workers", "1", "--data"), ("report", "--plan")],
                         ids=lambda command: command[0])
def test_hostile_options_are_one_line(
    run: Run, tmp_path: Path, command: tuple[str, ...], arguments: tuple[str, str]
) -> None:
    if command[0] == "report" and arguments[0] == "--batches":
        pytest.skip("report has no such option")
    (tmp_path / "a.csv").write_bytes(FILES["a.csv"])
    code, out, err = run(*command, "a.csv", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("distca: error: ")
    assert err[:-1].isprintable() and len(err) < 2100


def test_a_devices_bytes_are_no_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    for format_ in FORMATS:
        with pytest.raises(SystemExit) as stop:
            cli.main(["plan", "/dev/zero", "--format", format_])
        captured = capsys.readouterr()
        assert stop.value.code == 2 and captured.err.count("\n") == 1 and "/dev/zero" in captured.err
