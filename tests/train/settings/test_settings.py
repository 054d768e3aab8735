"""Settings: what is written is what is read, what cannot run is refused in one line, and the guide says the same."""

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca import cli
from distca.kernels import KERNELS, choose, kernel_named
from distca.runtime.attention import STATES
from distca.runtime.transport import TRANSPORTS
from distca.train import launch as launching
from distca.train.settings import Settings, known_settings, load_settings
from distca.train.settings.checks import check_settings
from distca.train.settings.declare import Known

ROOT = Path(distca.__file__).parents[1]
KNOWN = known_settings()
PLACEMENTS = ("balanced", "given")


class Train:
    """`distca train …` as a function, and the settings that it would have launched."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.launched: list[Settings] = []

    def launch(self, settings: Settings, main: object) -> int:
        check_settings(settings)
        self.launched.append(settings)
        return 0

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", *(str(argument) for argument in arguments)])
        captured = self.capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, captured.out, captured.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Run `distca train …` in an empty folder: (exit code, stdout, stderr); launching is noted instead of done."""
    monkeypatch.chdir(tmp_path)
    train = Train(capsys)
    monkeypatch.setattr(launching, "launch", train.launch)
    return train


def _refusal(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("distca: error: ") and err.count("\n") == 1
    return err


def _some_value(known: Known) -> st.SearchStrategy[Any]:
    if known.choices:
        return st.sampled_from(known.choices)
    text = st.text(st.characters(exclude_categories=["Cs"]))
    if known.when_true:                                          # where these words are a switch
        text = text.filter(lambda value: value.lower() not in ("true", "false"))
    return {
        int: st.integers(-2**53, 2**53), bool: st.booleans(), str: text,
        float: st.floats(allow_nan=False, allow_infinity=False),
    }[known.type]


VALUES = st.fixed_dictionaries({}, optional={name: _some_value(known) for name, known in KNOWN.items()})


@given(VALUES)
def test_toml_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, values: dict[str, float | str]) -> None:
    settings = Settings().with_values(values)
    path = tmp_path_factory.getbasetemp() / "settings.toml"
    path.write_text(settings.to_toml(), encoding="utf-8")
    assert load_settings(path, {}) == settings
    assert all(type(value) is KNOWN[name].type for name, value in values.items())


@given(VALUES)
def test_text_on_the_command_line_is_read_by_the_fields_type(values: dict[str, float | str]) -> None:
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    assert load_settings(None, texts) == Settings().with_values(values)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nsteps = 7\nranks = 4\n[optimizer]\nlr = 1\n")
    settings = load_settings(path, {"run.steps": "9", "batch.tokens-per-rank": "64"})
    assert (settings.run.steps, settings.run.ranks, settings.batch.tokens_per_rank) == (9, 4, 64)
    assert settings.optimizer.lr == 1.0 and type(settings.optimizer.lr) is float
    assert settings.data == Settings().data


def test_defaults_can_run_and_are_all_documented() -> None:
    check_settings(Settings())
    assert {name.partition(".")[0] for name in KNOWN} == {section.name for section in fields(Settings)}
    for known in KNOWN.values():
        assert known.help.endswith(".") and len(known.help) > 15 and type(known.default) is known.type
    text = Settings().to_toml()
    assert all(f"# {known.meaning}\n{known.name.partition('.')[2]} = " in text for known in KNOWN.values())


def test_choices_are_those_of_the_code_behind_them() -> None:
    for name in KERNELS:
        assert kernel_named(name).name == name
    with pytest.raises(ValueError) as refused:
        kernel_named("none")
    assert all(name in str(refused.value) for name in KERNELS)
    assert choose("cpu", __import__("torch").float32, 32).name in KERNELS
    assert KNOWN["attention.state"].choices == STATES
    assert KNOWN["attention.transport"].choices == TRANSPORTS
    distca.pack([8, 8], ranks=2, placement=PLACEMENTS[0]), distca.pack([8, 8], ranks=2, placement=PLACEMENTS[1])
    assert KNOWN["attention.placement"].choices == PLACEMENTS


IMPOSSIBLE = [
    ({"run.steps": "0"}, ["run.steps", "0", "at least 1"]),
    ({"run.steps": "many"}, ["run.steps", "'many'", "whole number"]),
    ({"run.steps": "1.5"}, ["run.steps", "'1.5'", "whole number"]),
    ({"run.device": "gpu"}, ["run.device", "'gpu'", "cpu", "cuda"]),
    ({"run.dtype": "bf16"}, ["run.dtype", "'bf16'", "'bfloat16'"]),
    ({"model.name": "lama3-8b"}, ["model.name", "'lama3-8b'", "'llama3-8b'"]),
    ({"model.tied": "yes"}, ["model.tied", "'yes'", "true or false"]),
    ({"data.source": "text"}, ["data.path", "'text'"]),
    ({"data.path": "x.txt"}, ["data.path", "'x.txt'", "data.source"]),
    ({"data.tokenizer": "tokenizer.json"}, ["data.tokenizer", "data.source"]),
    ({"data.source": "text", "data.path": "x", "data.content": "chat"}, ["data.content", "'text'"]),
    ({"data.source": "jsonl", "data.path": "x", "data.content": "chat"}, ["data.tokenizer", "chat template"]),
    ({"data.source": "jsonl", "data.path": "x", "data.split": "test"}, ["data.split", "'jsonl'"]),
    ({"data.mix": "a.jsonl:1", "data.path": "x"}, ["data.mix", "'a.jsonl:1'", "data.path", "'x'"]),
    ({"data.mix": "a.jsonl"}, ["data.mix", "'a.jsonl'", "path:weight"]),
    ({"data.mix": "a.jsonl:1,texts:1"}, ["data.mix", "'texts'", "data.source"]),
    ({"data.mix": "a.parquet:1,b.parquet:1", "data.split": "train"}, ["data.split", "'train'", "data.mix"]),
    ({"data.mix": "a.jsonl:1,b.txt:1", "data.source": "text", "data.content": "tokens"}, ["data.content", "data.mix"]),
    ({"data.mix": "a.jsonl:1,b.jsonl:1", "eval.path": "texts"}, ["eval.path", "'texts'", "'stdlib'"]),
    ({"eval.every": 5}, ["eval.every", "eval.fraction", "eval.path"]),
    ({"eval.path": "x"}, ["eval.path", "'stdlib'", "eval.fraction"]),
    ({"data.source": "text", "data.path": "x", "eval.path": "y", "eval.fraction": 0.1}, ["eval.fraction", "eval.path"]),
    ({"batch.tokens_per_rank": "4095"}, ["batch.tokens_per_rank", "4095", "batch.ping_pong"]),
    ({"attention.mode": "hoem"}, ["attention.mode", "'hoem'", "'home'"]),
    ({"attention.placement": "best"}, ["attention.placement", "'best'", "balanced"]),
    ({"attention.tolerance": "1.5"}, ["attention.tolerance", "1.5", "at most 1"]),
    ({"attention.kernel": "flash"}, ["attention.kernel", "'flash'", "sdpa"]),
    ({"attention.transport": "nccl"}, ["attention.transport", "'nccl'", "c10d", "symmetric"]),
    ({"parallel.tensor": "3"}, ["parallel.tensor", "3", "2 ranks"]),
    ({"parallel.tensor": "3", "run.ranks": "6"}, ["parallel.tensor", "3", "8 heads"]),
    ({"parallel.tensor": "4", "run.ranks": "4"}, ["parallel.tensor", "4", "2 KV heads"]),
    ({"parallel.tensor": "2", "model.ffn": "41"}, ["parallel.tensor", "2", "41 feed-forward columns"]),
    ({"parallel.tensor": "2", "model.vocab": "1"}, ["parallel.tensor", "2", "vocabulary of 1", "smaller"]),
    ({"parallel.pipeline": "3", "run.ranks": "4"}, ["parallel.pipeline", "3", "4 ranks"]),
    ({"parallel.pipeline": "2", "parallel.tensor": "2"}, ["parallel.pipeline", "2 ranks", "parallel.tensor"]),
    ({"parallel.pipeline": "4", "run.ranks": "4"}, ["parallel.pipeline", "4", "2 layers"]),
    ({"parallel.pipeline": "2", "model.tied": "true", "parallel.schedule": "1f1b", "batch.micro_batches": "2"},
     ["parallel.pipeline", "model.tied", "untie", "parallel.schedule to 'auto'"]),
    ({"parallel.pipeline": "2", "model.tied": "true", "attention.mode": "home"},
     ["parallel.pipeline", "model.tied", "untie", "attention.mode to 'disaggregated'"]),
    ({"parallel.pipeline": "2", "parallel.schedule": "zero_bubble"}, ["schedule", "'zero_bubble'", "interleaved_2"]),
    ({"parallel.pipeline": "2", "parallel.schedule": "interleaved_0"}, ["schedule", "'interleaved_0'"]),
    ({"parallel.pipeline": "2", "parallel.schedule": "interleaved_2"}, ["parallel.schedule", "2 layers", "at most 1"]),
    ({"parallel.pipeline": "2", "parallel.schedule": "1f1b", "batch.micro_batches": "2", "attention.adapt": "true"},
     ["parallel.schedule", "'1f1b'", "attention.adapt"]),
    ({"parallel.pipeline": "2", "parallel.schedule": "zb_h1", "model.recompute": "full", "model.tile_tokens": "64",
      "batch.micro_batches": "2"}, ["parallel.schedule", "'zb_h1'", "model.tile_tokens"]),
    ({"parallel.pipeline": "2", "parallel.memory": "0.5"}, ["parallel.memory", "0.5", "micro-batches", "raise it"]),
    ({"parallel.pipeline": "2", "parallel.memory": "2e6"}, ["parallel.memory", "2e+06", "bytes", "raise it"]),
    ({"parallel.pipeline": "2", "attention.state": "keep"}, ["attention.state", "'keep'", "use 'resend'"]),
    ({"batch.micro_batches": "0"}, ["batch.micro_batches", "0", "at least 1"]),
    ({"optimizer.lr": "0"}, ["optimizer.lr", "0.0", "above 0"]),
    ({"optimizer.lr": "nan"}, ["optimizer.lr", "nan"]),
    ({"optimizer.clip_norm": "inf"}, ["optimizer.clip_norm", "inf"]),
    ({"optimizer.beta2": "1"}, ["optimizer.beta2", "1.0", "below 1"]),
    ({"checkpoint.every": "5"}, ["checkpoint.every", "5", "checkpoint.folder"]),
    ({"checkpoint.neighbour_every": "5"}, ["checkpoint.neighbour_every", "5", "checkpoint.folder"]),
    ({"run.restarts": "3"}, ["run.restarts", "3", "checkpoint.folder"]),
    ({"checkpoint.keep": "0"}, ["checkpoint.keep", "0"]),
    ({"log.trace_step": "201"}, ["log.trace_step", "201", "200"]),
    ({"log.folder": ""}, ["log.folder"]),
    ({"batch.tokens_per_rnak": "64"}, ["'batch.tokens_per_rnak'", "'batch.tokens_per_rank'"]),
    ({"run.tokens_per_rank": "64"}, ["'run.tokens_per_rank'", "'batch.tokens_per_rank'"]),
    ({"steps": "64"}, ["'steps'", "'run.steps'"]),
    ({"qqq.xyz": "64"}, ["'qqq.xyz'", "--show-settings"]),
]


@pytest.mark.parametrize(("overrides", "fragments"), IMPOSSIBLE, ids=lambda value: " ".join(value))
def test_what_cannot_run_is_refused_in_one_line(overrides: dict[str, str], fragments: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        check_settings(load_settings(None, overrides))
    assert "\n" not in str(refused.value)
    for fragment in fragments:
        assert fragment in str(refused.value)


@pytest.mark.parametrize("overrides", [
    {"batch.tokens_per_rank": "4095", "batch.ping_pong": "false"},
    {"parallel.tensor": "2"},
    {"run.ranks": "1", "log.trace_step": "200"},
    {"checkpoint.folder": "saved", "checkpoint.every": "5"},
    {"checkpoint.folder": "saved", "checkpoint.neighbour_every": "5", "run.restarts": "3"},
    {"data.source": "megatron", "data.path": "corpus", "data.tokenizer": "tokenizer.json"},
    {"data.mix": "a.jsonl:0.7,b.parquet:0.3", "data.tokenizer": "tokenizer.json", "data.content": "chat"},
    {"data.mix": "a.jsonl:0.7,c.bin:1,texts/:0.3", "data.source": "text", "eval.path": "held"},
    {"model.load": "folder", "parallel.tensor": "3", "run.ranks": "3"},
    {"optimizer.beta1": "0", "attention.tolerance": "1"},
])
def test_what_can_run_is_not_refused(overrides: dict[str, str]) -> None:
    check_settings(load_settings(None, overrides))


@pytest.mark.parametrize(("text", "fragments"), [
    ("steps = 5", ["steps", "5", "[run]"]),
    ("[rum]\nsteps = 5", ["[rum]", "[run]"]),
    ("[run]\nstep = 5", ["'run.step'", "'run.steps'"]),
    ("[run]\nsteps = '5'", ["run.steps", "'5'", "whole number"]),
    ("[run]\nsteps = true", ["run.steps", "True", "whole number"]),
    ("[run]\nsteps = 5.0", ["run.steps", "5.0", "whole number"]),
    ("[model]\ntied = 1", ["model.tied", "1", "true or false"]),
    ("[optimizer]\nlr = [1]", ["optimizer.lr", "[1]", "a number"]),
    ("[run\nsteps = 5", ["broken TOML", "line 1"]),
])
def test_bad_files_get_one_line(run: Train, tmp_path: Path, text: str,
                                fragments: list[str]) -> None:
    (tmp_path / "run.toml").write_text(text)
    error = _refusal(run("run.toml"))
    for fragment in ("run.toml", *fragments):
        assert fragment in error
    assert not run.launched


@pytest.mark.parametrize(("arguments", "fragments"), [
    (["none.toml"], ["none.toml", "no such file"]),
    (["."], ["directory"]),
    (["a.toml", "b.toml"], ["a.toml", "b.toml", "one file"]),
    (["--run.steps"], ["--run.steps", "no value"]),
    (["--run.steps", "5", "--run.steps=6"], ["--run.steps", "'5'", "'6'"]),
    (["--ranks", "2", "--run.ranks", "4"], ["--ranks", "2", "--run.ranks", "4"]),
    (["--ranks", "two"], ["--ranks"]),
    (["--steps", "5"], ["--steps", "'run.steps'"]),
    (["-v"], ["-v"]),
    (["--run.seed", "-3"], ["run.seed", "-3"]),
    (["--show-settings", "--run.steps", "0"], ["run.steps", "0"]),
])
def test_bad_arguments_get_one_line(run: Train, arguments: list[str],
                                    fragments: list[str]) -> None:
    error = _refusal(run(*arguments))
    assert all(fragment in error for fragment in fragments)
    assert not run.launched


def test_options_stand_anywhere_in_any_form(run: Train, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nsteps = 5\n")
    assert run("--run.seed=3", "--ranks", 4, "run.toml", "--batch.tokens-per-rank", 64, "--data.seed", 8)[0] == 0
    assert run.launched == [load_settings(None, {"run.seed": "3", "run.ranks": "4", "run.steps": "5", "data.seed": "8",
                                                 "batch.tokens_per_rank": "64"})]


def test_show_settings_prints_a_file_to_start_from(run: Train, tmp_path: Path) -> None:
    code, out, err = run("--show-settings", "--ranks", 4)
    assert (code, err, run.launched) == (0, "", [])
    (tmp_path / "shown.toml").write_text(out)
    assert load_settings("shown.toml", {}) == Settings().with_values({"run.ranks": 4})
    assert sum(line.startswith("# ") for line in out.splitlines()) == len(KNOWN)
    assert tomllib.loads(out)["run"]["ranks"] == 4


def test_help_lists_the_common_settings(run: Train) -> None:
    code, out, _ = run("--help")
    assert code == 0 and "--show-settings" in out and "CONFIG.toml" in out
    for name in ("run.steps", "model.name", "data.path", "batch.tokens_per_rank", "attention.mode"):
        assert f"--{name}" in out


def test_settings_are_shown_and_refused_without_torch() -> None:
    code = ("import sys\nsys.modules['torch'] = None\nfrom distca.cli import main\n"
            "main(['train', *sys.argv[1:]])\n")
    shown, refused = (subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
                      for arguments in (["--show-settings"], ["--run.ranks", "0"]))
    assert shown.returncode == 0 and shown.stdout == Settings().to_toml()
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def _commands(text: str) -> list[list[str]]:
    """Shell lines, with those that end in a backslash joined."""
    return [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_commands_of_the_guide_and_the_examples_are_ones_that_start(run: Train,
                                                                    tmp_path: Path) -> None:
    guide = (ROOT / "docs/guide/train.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    script = (ROOT / "examples/train.slurm").read_text(encoding="utf-8")
    commands = [words for block in (*blocks, script) for words in _commands(block) if "distca" in words]
    assert {words[0] for words in commands} >= {"distca", "torchrun", "srun"}
    (tmp_path / "run.toml").write_text("[run]\nsteps = 5\n")
    for words in commands:
        arguments = words[words.index("distca") + 1:]
        if arguments[0] in ("checkpoint", "export"):             # those run where there is a checkpoint
            continue
        assert arguments[0] == "train"
        arguments = arguments[1:arguments.index(">")] if ">" in arguments else arguments[1:]
        code, _, err = run(*(argument for argument in arguments if argument != "$@"))
        assert (code, err) == (0, ""), words
    assert run.launched
