"""`distca export`: trained weights open in transformers, whatever mesh saved them; a killed export leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.kernels import dense_attention
from distca.spec import ModelShape
from distca.train.checkpoint.checkpointer import Checkpointer
from distca.train.checkpoint.export import export_hf, export_newest
from distca.train.checkpoint.folder import MANIFEST
from distca.train.model.decoder import Decoder
from distca.train.model.huggingface import check_weight_files, config_of, hf_name, load_hf, shape_from_hf
from distca.train.model.shape import DecoderShape, LinearScaling, Llama3Scaling, YarnScaling
from distca.train.settings import load_settings
from distca.train.settings.preflight import check_machine
from tests.support.attention import greedy
from tests.support.decoders import hidden_of
from tests.support.processes import run_processes
from tests.support.training import outcomes_of, small_run

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Run = Callable[..., tuple[int, str, str]]
SMALL = ModelShape("small", 2, 32, 4, 2, 8, 56, 97)
SHAPES = {
    "llama": DecoderShape(SMALL, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32)),
    "llama, tied": DecoderShape(SMALL, tied=True, rope_scaling=LinearScaling(2.0)),
    "mistral": DecoderShape(replace(SMALL, windows=(9, 9)), family="mistral"),
    "qwen2": DecoderShape(replace(SMALL, windows=(None, 7)), family="qwen2", rope_scaling=YarnScaling(4.0, 64, 1.2)),
    "qwen3": DecoderShape(replace(SMALL, head_dim=16, value_dim=16), family="qwen3", norm_eps=1e-6),
}


def drawn(shape: DecoderShape, seed: int = 5) -> Decoder:
    """A decoder whose norms and biases are random as well."""
    decoder = Decoder(shape, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return decoder


def save(folder: Path, decoder: Decoder, steps: tuple[int, ...] = (1,), **config: Any) -> None:
    optimizer = torch.optim.AdamW(decoder.parameters())
    saver = Checkpointer(folder, decoder, optimizer, config=config_of(decoder.shape, "float32") | config)
    for step in steps:
        saver.save(step, {})
    saver.close()


def opened(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("kind", SHAPES)
@torch.no_grad()
def test_an_export_opens_with_the_same_logits_and_generates(kind: str, tmp_path: Path) -> None:
    decoder = drawn(SHAPES[kind])
    save(tmp_path / "saved", decoder, eos_token_id=None, bos_token_id=None)
    export_newest([tmp_path / "saved/step_00000001"], tmp_path / "out", say=lambda line: None)
    model = opened(tmp_path / "out")
    tokens = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(1))

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
            return dense_attention(q, k, v, [len(tokens)], window=window)
        return hidden_of(decoder, tokens, torch.arange(len(tokens)), attend) @ decoder.head_weight.T

    torch.testing.assert_close(model(tokens[None]).logits[0], logits(tokens), rtol=1e-5, atol=1e-5)
    written = model.generate(tokens[None, :40], max_new_tokens=8, do_sample=False)[0]
    expected = tokens[:40]
    for _ in range(8):                                           # greedy, without a cache
        expected = torch.cat([expected, greedy(logits(expected)[-1:])])
    assert written.tolist() == expected.tolist()
    assert replace(shape_from_hf(tmp_path / "out"), model=decoder.shape.model) == decoder.shape


def test_shards_an_index_and_another_dtype(tmp_path: Path) -> None:
    decoder = drawn(SHAPES["qwen2"])
    save(tmp_path / "saved", decoder)
    export_hf(tmp_path / "saved/step_00000001", tmp_path / "out", dtype="bfloat16", shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in decoder.parameters())
    assert set(index["weight_map"].values()) == set(files)
    check_weight_files(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    for name, parameter in decoder.named_parameters():
        assert torch.equal(state[hf_name(name)], parameter.bfloat16()), name  # each number rounds by itself


def test_the_model_never_stands_whole_in_memory(tmp_path: Path) -> None:
    """200 MB of weights take a fraction of that to export."""
    decoder = Decoder(DecoderShape(ModelShape("wide", 12, 512, 8, 8, 64, 2048, 1000)))
    size = sum(p.numel() * 4 for p in decoder.parameters())
    save(tmp_path / "saved", decoder)
    body = ("import resource; from pathlib import Path; from distca.train.checkpoint.export import export_hf\n"
            "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
            "before = peak(); export_hf(Path('saved/step_00000001'), Path('out')); print(peak() - before)")
    done = subprocess.run([sys.executable, "-c", body], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/model.safetensors").stat().st_size > size > 190e6
    assert int(done.stdout) < size / 2                           # the queue of what is hashed, and a tensor or two


def write_tokenizer(path: Path, tokens: int) -> None:
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": None,
        "added_tokens": [{"id": tokens - 1, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {chr(32 + number): number for number in range(tokens - 1)}, "merges": []}}))


def command(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = ["--run.steps", "2", "--run.threads", "1", "--batch.tokens_per_rank", "64", "--model.config", "mine",
             "--data.source", "text", "--data.path", "texts", "--log.folder", "log", "--run.timeout_seconds", "120"]
    return subprocess.run([sys.executable, "-m", "distca", "train", *words, *more], cwd=folder, capture_output=True,
                          text=True, timeout=240)


@pytest.mark.multiprocess
def test_a_run_exports_all_stages_with_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / f"texts/{number}.txt").write_text("to be or not to be, " * 20)
    write_tokenizer(tmp_path / "tokenizer.json", 96)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(config_of(SHAPES["qwen3"], "float32") | {
        "tie_word_embeddings": True}))
    options = ("--run.ranks", "2", "--parallel.pipeline", "2", "--batch.micro_batches", "2", "--model.untied", "true",
               "--data.tokenizer", "tokenizer.json", "--checkpoint.folder", "saved", "--checkpoint.export", "out")
    done = command(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    model = opened(tmp_path / "out")
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.config.eos_token_id == 95
    assert model.config.tie_word_embeddings is False
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("to be")["input_ids"]
    assert ids == [ord(char) - 32 for char in "to be"] and tokenizer.eos_token == "</s>"
    assert model.generate(torch.tensor([ids]), max_new_tokens=3).shape[1] > len(ids)
    over = {"run.ranks": "1", "checkpoint.folder": str(tmp_path / "saved"), "checkpoint.export": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=r"checkpoint\.export is '.*out', which already holds something"):
        check_machine(load_settings(None, over))
    small = outcomes_of(small_run(
        tmp_path / "log", 1, tokens=64, model__config=str(tmp_path / "mine"), model__vocab=50, data__source="text",
        data__path=str(tmp_path / "texts"), data__tokenizer=str(tmp_path / "tokenizer.json"),
        data__cache=str(tmp_path / "cache")))[0].error
    assert small is not None and "vocabulary of 50 but the data has 96 different tokens" in small


def test_a_killed_export_leaves_no_target_and_the_next_clears_up(tmp_path: Path) -> None:
    """SIGKILL while a tensor is being read, after others were written."""
    save(tmp_path / "saved", drawn(SHAPES["qwen3"]))
    body = """
import sys, time
from pathlib import Path
from distca.train.checkpoint.files import Reader
from distca.train.checkpoint.export import export_hf
whole, read = Reader.whole, []
def slow(reader, name):
    read.append(name)
    if len(read) == 6:
        print("in the middle", flush=True)
        time.sleep(100)
    return whole(reader, name)
Reader.whole = slow
export_hf(Path("saved/step_00000001"), Path("out"), shard_bytes=8000)
"""
    process = subprocess.Popen([sys.executable, "-c", body], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in the middle\n"
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".out.partial-")]
    assert len(left) == 1 and not (tmp_path / "out").exists()
    export_hf(tmp_path / "saved/step_00000001", tmp_path / "other")  # others go on beside it
    assert (tmp_path / left[0]).exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    export_hf(tmp_path / "saved/step_00000001", tmp_path / "out")
    opened(tmp_path / "out")
    assert not (tmp_path / left[0]).exists()
    process.stdout.close()


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "saved", drawn(SHAPES["llama"]))
    file = tmp_path / "saved/step_00000001/model-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="does not match its checksum"):
        export_hf(tmp_path / "saved/step_00000001", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_the_command_takes_the_newest_good_checkpoint(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "saved", drawn(SHAPES["llama"]), steps=(1, 2, 3))
    steps = sorted(path.name for path in (tmp_path / "saved").glob("step_*"))
    assert steps == ["step_00000002", "step_00000003"]           # as many are kept
    (tmp_path / "saved/step_00000003/model-00000.safetensors").write_bytes(b"")
    code, out, err = run("export", "saved", "out", "--dtype", "bfloat16")
    assert (code, err) == (0, "")
    assert "step_00000003  damaged and not used" in out and "step_00000002  exported to out" in out
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    (tmp_path / "empty").mkdir()
    assert run("export", "saved/step_00000002", "empty")[0] == 0
    assert (tmp_path / "empty/model.safetensors").is_file()


@pytest.mark.parametrize(("words", "expected"), [
    (("nowhere", "out"), "nowhere: holds no step_… folder"),
    (("saved", "full"), "'full', which already holds something"),
    (("saved", "saved/step_00000001/manifest.json"), "already holds something"),
    (("saved", "out", "--dtype", "int4"), "--dtype is 'int4'; choose one of"), (("torn", "out"), "is whole")])
def test_bad_input_is_one_line(words: tuple[str, ...], expected: str, run: Run, tmp_path: Path) -> None:
    save(tmp_path / "saved", drawn(SHAPES["llama"]))
    save(tmp_path / "torn", drawn(SHAPES["llama"]))
    (tmp_path / "torn/step_00000001" / MANIFEST).unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    code, _, err = run("export", *words)
    assert code == 2 and err.count("\n") == 1 and expected in err, err
    assert not (tmp_path / "out").exists()


def save_on_a_mesh(transport: Any, folder: str, family: str, tensor: int, stages: int, fsdp: bool) -> None:
    """One rank's part of a save, with weights that every mesh draws alike."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from distca.planning.schedule import layers_of_stages
    from distca.train.model.build import stage_of
    from distca.train.model.parallel import parallelize

    shape = DecoderShape(ModelShape("small", 4, 32, 4, 2, 8, 56, 97), family=family)
    mesh = init_device_mesh("cpu", (stages, dist.get_world_size() // tensor // stages, tensor),
                            mesh_dim_names=("pipeline", "data", "tensor"))
    part = stage_of(Decoder(shape, device="meta"), mesh["pipeline"].get_local_rank(),
                    layers_of_stages(4, stages))
    parallelize(part, mesh, fsdp=fsdp, dtype=torch.float32)
    part.to_empty(device="cpu")
    part.reset_parameters(torch.Generator().manual_seed(11))
    saver = Checkpointer(folder, part, torch.optim.AdamW(part.parameters()), config=config_of(shape, "float32"))
    saver.save(7, {})
    saver.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize(("family", "ranks", "tensor", "stages", "fsdp"), [
    ("qwen3", 4, 2, 2, True), ("qwen2", 2, 2, 1, True),
    pytest.param("qwen2", 4, 2, 1, True, marks=pytest.mark.slow),
    pytest.param("qwen3", 4, 1, 1, True, marks=pytest.mark.slow),
    pytest.param("mistral", 2, 1, 2, False, marks=pytest.mark.slow),
    pytest.param("llama", 3, 1, 1, True, marks=pytest.mark.slow)])
def test_every_mesh_exports_the_same_tensors(
    family: str, ranks: int, tensor: int, stages: int, fsdp: bool, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    for outcome in run_processes(ranks, save_on_a_mesh, str(tmp_path / "saved"), family, tensor, stages, fsdp,
                                 deadline_seconds=180.0):
        assert outcome.error is None and outcome.exit_code == 0, outcome
    export_hf(tmp_path / "saved/step_00000007", tmp_path / "out")
    shape = DecoderShape(ModelShape("small", 4, 32, 4, 2, 8, 56, 97), family=family)
    alone = Decoder(shape, generator=torch.Generator().manual_seed(11))
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors.keys() == {hf_name(name) for name, _ in alone.named_parameters()}
    for name, parameter in alone.named_parameters():
        assert torch.equal(tensors[hf_name(name)], parameter), name  # the same draws, cut and put together


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        shape_from_hf(tmp_path)
    decoder = drawn(SHAPES["qwen3"])
    save(tmp_path / "saved", decoder)
    export_hf(tmp_path / "saved/step_00000001", tmp_path / "out")
    load_hf(tmp_path / "out", decoder)
    with pytest.raises(ValueError, match=r"num_layers=2.*num_layers=3"):
        load_hf(tmp_path / "out", Decoder(replace(decoder.shape, model=replace(decoder.shape.model, num_layers=3))))
    with pytest.raises(ValueError, match=r"qk_norm=True.*qk_norm=False"):
        load_hf(tmp_path / "out", Decoder(replace(decoder.shape, family="llama")))
    from safetensors.torch import load_file, save_file

    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    for changed, words in (
            ({name: x for name, x in tensors.items() if name != "model.norm.weight"}, r"lacks model\.norm\.weight"),
            ({**tensors, "model.extra": torch.ones(1)}, r"model\.extra"),
            ({**tensors, "model.norm.weight": torch.ones(5)}, r"model\.norm\.weight with shape \(5,\)")):
        save_file(changed, file)
        with pytest.raises(ValueError, match=words):
            load_hf(tmp_path / "out", decoder)
    file.unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_hf(tmp_path / "out", decoder)


@pytest.mark.slow
def test_two_exports_into_one_folder(tmp_path: Path) -> None:
    """Two exports into the same folder: one wins, the other is refused or fails, and what stands there is whole."""
    save(tmp_path / "saved", drawn(SHAPES["llama"]))
    body = ("from pathlib import Path; from distca.train.checkpoint.export import export_hf; "
            "export_hf(Path('saved/step_00000001'), Path('out'))")
    began = [subprocess.Popen([sys.executable, "-c", body], cwd=tmp_path, stderr=subprocess.DEVNULL) for _ in range(2)]
    codes = sorted(process.wait(timeout=120) for process in began)
    assert codes[0] == 0
    opened(tmp_path / "out")
    assert not list(tmp_path.glob(".out.partial-*"))
