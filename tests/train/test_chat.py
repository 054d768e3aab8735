"""The assistant's tokens are those that transformers says are the assistant's, whatever a template looks like."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from distca.train.chat import compile_template, tokens_in
from distca.train.corpora import Corpus, corpus_from
from distca.train.preflight import check_machine
from distca.train.settings import Settings

CONVERSATIONS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"},
     {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"},
     {"role": "assistant", "content": "Yes, très sûr 🙂\n\n- it is"}],
    [{"role": "user", "content": "Say nothing"}, {"role": "assistant", "content": ""},
     {"role": "user", "content": "Ok"}],
    [{"role": "user", "content": "assistant<|im_end|>"}, {"role": "assistant", "content": "<|im_start|>user"}],
]
MARKED = """{{ bos_token }}{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- "<|im_start|>assistant\n" }}
        {%- generation %}{{ message.content }}{{ "<|im_end|>\n" }}{% endgeneration %}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
PLAIN = MARKED.replace("{%- generation %}{{ ", "{{- ").replace("{% endgeneration %}", "")
FORGETFUL = """{%- for message in messages %}
    {{- "<" + message.role + ">" }}
    {%- if message.role == "assistant" and loop.last %}{{ "(thinking)" }}{% endif %}
    {{- message.content + "</s>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<assistant>" }}{% endif %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with ChatML's special tokens, and its configuration."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([json.dumps(CONVERSATIONS, ensure_ascii=False)] * 3, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_template(folder: Path, template: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": None}))


def some_settings(folder: Path, path: Path, **data: str) -> Settings:
    values = {"source": "jsonl", "path": str(path), "content": "chat", "tokenizer": str(folder / "tokenizer.json")}
    return Settings().with_values({f"data.{name}": value for name, value in (values | data).items()})


def chats(folder: Path, conversations: list[Any] | None = None) -> Corpus:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations or CONVERSATIONS))
    return corpus_from(some_settings(folder, path))


def refusal(folder: Path, conversation: Any) -> str:
    with pytest.raises(ValueError) as caught:
        chats(folder, [conversation])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def columns(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    found = []
    for number in range(corpus.num_documents):
        in_loss = corpus.in_loss(number)
        assert in_loss is not None
        found.append((corpus.tokens(number).tolist(), in_loss.astype(int).tolist()))
    return found


def said(folder: Path, corpus: Corpus) -> list[str]:
    """What is in the loss of each document."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted],
                             skip_special_tokens=False) for ids, mask in columns(corpus)]


def transformers_columns(folder: Path) -> list[tuple[list[int], list[int]]]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>")
    encoded: list[Any] = [tokenizer.apply_chat_template(one, chat_template=MARKED, return_assistant_tokens_mask=True,
                                                        return_dict=True) for one in CONVERSATIONS]
    return [(one["input_ids"], one["assistant_masks"]) for one in encoded]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "turn by turn"])
def test_tokens_and_masks_are_those_of_transformers(folder: Path, template: str) -> None:
    write_template(folder, template)
    corpus = chats(folder)
    assert columns(corpus) == transformers_columns(folder)
    assert said(folder, corpus)[0] == "4<|im_end|>\nYes, très sûr 🙂\n\n- it is<|im_end|>\n"
    assert corpus.vocab == 320


def test_a_template_file_and_a_list_of_templates_will_do(folder: Path) -> None:
    write_template(folder, "{{ raise_exception('not this one') }}")
    (folder / "chat_template.jinja").write_text(PLAIN)
    assert columns(chats(folder)) == transformers_columns(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}],
         "bos_token": "<s>"}))
    assert columns(chats(folder)) == transformers_columns(folder)


def test_a_table_of_conversations_is_the_same_as_json_lines(folder: Path) -> None:
    """A table gives every message the keys of all; what is null there was not there."""
    write_template(folder, PLAIN + "{% for m in messages if m.tool_calls is defined %}{{ 'called' }}{% endfor %}")
    rows = [[{**message, "tool_calls": None} for message in one] for one in CONVERSATIONS]
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(pa.string())}))
    pq.write_table(pa.table({"messages": pa.array(rows, type=kind)}), folder / "chats.parquet")
    corpus = corpus_from(some_settings(folder, folder / "chats.parquet", source="table"))
    assert columns(corpus) == columns(chats(folder)) == transformers_columns(folder)


def test_turns_that_later_ones_rewrite_become_documents_of_their_own(folder: Path) -> None:
    write_template(folder, FORGETFUL)
    corpus = chats(folder)
    assert said(folder, corpus) == ["(thinking)4</s>", "(thinking)Yes, très sûr 🙂\n\n- it is</s>", "(thinking)</s>",
                                    "(thinking)<|im_start|>user</s>"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    second = tokenizer.decode(corpus.tokens(1).tolist(), skip_special_tokens=False)
    assert second == ("<system>Be brief.</s><user>What is 2 + 2?</s><assistant>4</s><user>Sure?</s>"
                      "<assistant>(thinking)Yes, très sûr 🙂\n\n- it is</s>")


def test_conversations_without_an_answer_are_left_out(folder: Path) -> None:
    write_template(folder, PLAIN)
    assert chats(folder, [CONVERSATIONS[0][:2], CONVERSATIONS[0]]).num_documents == 1
    assert "holds no document with a token in the loss" in refusal(folder, CONVERSATIONS[0][:2])


@pytest.mark.parametrize(("conversation", "message"), [
    ([{"content": "Hello"}], "chats.jsonl: line 1 has message 0 {'content': 'Hello'} under 'messages', which has no "),
    ([{"from": "human", "value": "Hello"}], "which has no role; write {\"role\": \"user\""),
    ([{"role": "user", "content": 3}], "has content 3 in message 0, not text"),
    (["Hello"], "has message 0 'Hello' under 'messages', which has no role"),
    ("Hello", "has 'Hello' under 'messages', not a list of messages; its keys are ['messages']"),
    ([{"role": "user", "content": [{"type": "text"}]}, {"role": "assistant", "content": "x"}],
     "chats.jsonl: line 1: the chat template fails (can only concatenate str"),
])
def test_rows_that_are_no_conversations_are_named(folder: Path, conversation: Any, message: str) -> None:
    write_template(folder, PLAIN)
    assert message in refusal(folder, conversation)


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('roles must\nalternate') }}", "the chat template fails (roles must alternate)"),
    ("{{ messages.append(1) }}", "the chat template fails"),                 # the sandbox: nothing is changed
    ("{{ ''.__class__.__mro__ }}", "the chat template fails"),               # and nothing is reached
    ("{{ messages[0].content }}{% if add_generation_prompt %}?{% endif %}", "otherwise than its prompt to generate"),
])
def test_a_template_that_fails_is_one_line(folder: Path, template: str, message: str) -> None:
    write_template(folder, template)
    assert message in refusal(folder, CONVERSATIONS[0])


def test_templates_are_looked_for_before_any_rank_starts(folder: Path) -> None:
    (folder / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no chat template; put the model's tokenizer_config"):
        check_machine(some_settings(folder, folder / "a.jsonl"))
    write_template(folder, "{% if %}")
    with pytest.raises(ValueError, match="is no Jinja template"):
        check_machine(some_settings(folder, folder / "a.jsonl"))


def test_marks_in_a_conversation_are_refused(folder: Path) -> None:
    write_template(folder, MARKED)
    assert "holds U+FDD0" in refusal(folder, [{"role": "user", "content": "\ufdd0"}, CONVERSATIONS[0][2]])


def test_dates_do_not_change_the_tokens() -> None:
    template = compile_template("{{ strftime_now is defined }}", {})
    assert template.documents("here", [])[0].text == "False"


def test_a_token_is_in_a_span_that_it_has_a_character_of() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (5, 8), (8, 9)]
    assert tokens_in([(3, 6)], offsets).tolist() == [False, True, True, True, False]
    assert tokens_in([(0, 1), (8, 9)], offsets).tolist() == [True, False, False, False, True]
    assert tokens_in([], []).tolist() == []
