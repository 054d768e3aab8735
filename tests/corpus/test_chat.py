"""The assistant's tokens are those that transformers says are the assistant's, whatever a template looks like."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from distca.corpus.cache import Cache
from distca.corpus.chat import Rendered, compile_template, encoded_chats, tokens_in
from distca.corpus.corpora import Corpus, open_corpus
from distca.corpus.tokenizers import open_tokenizer
from distca.train.settings import Settings
from distca.train.settings.preflight import check_machine

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


def open_chats(folder: Path, path: Path, source: str = "jsonl") -> Corpus:
    return open_corpus(source, str(path), content="chat", tokenizer=str(folder / "tokenizer.json"))


def chats(folder: Path, conversations: list[Any] | None = None) -> Corpus:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations or CONVERSATIONS))
    return open_chats(folder, path)


def refusal(folder: Path, conversation: Any) -> str:
    with pytest.raises(ValueError) as caught:
        chats(folder, [conversation])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def columns(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    found = []
    for number in range(len(corpus.lengths())):
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
    corpus = open_chats(folder, folder / "chats.parquet", "table")
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
    assert len(chats(folder, [CONVERSATIONS[0][:2], CONVERSATIONS[0]]).lengths()) == 1
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
    ("{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}", "changes what a generation block"),
    ("{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | length }}{{ x }}", "changes what a generation"),
    ("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}", "is no Jinja template"),
    ("{% generation %}", "is no Jinja template"),
    ("{{ '\\ud83d' }}", "the chat template fails (half a surrogate pair)"),
])
def test_a_template_that_fails_is_one_line(folder: Path, template: str, message: str) -> None:
    write_template(folder, template)
    assert message in refusal(folder, CONVERSATIONS[0])


def test_templates_are_looked_for_before_any_rank_starts(folder: Path) -> None:
    (folder / "a.jsonl").write_text("")
    chosen = Settings().with_values({"data.source": "jsonl", "data.path": str(folder / "a.jsonl"),
                                     "data.content": "chat", "data.tokenizer": str(folder / "tokenizer.json")})
    with pytest.raises(ValueError, match="has no chat template; put the model's tokenizer_config"):
        check_machine(chosen)
    write_template(folder, "{% if %}")
    with pytest.raises(ValueError, match="is no Jinja template"):
        check_machine(chosen)


@pytest.mark.parametrize("opening", ["{%- generation %}", "{%-generation%}", "{%+ generation %}",
                                     "{%+\ngeneration\t+%}", "{%- generation -%}"])
@pytest.mark.parametrize("closing", ["{% endgeneration %}", "{%- endgeneration -%}", "{%+endgeneration+%}"])
def test_blocks_may_be_written_in_every_way_that_jinja_reads(folder: Path, opening: str, closing: str) -> None:
    write_template(folder, MARKED.replace("{%- generation %}", "{{- '' }}" + opening).replace(
        "{% endgeneration %}", closing))
    assert columns(chats(folder)) == transformers_columns(folder)


@pytest.mark.parametrize("unused", [
    "{# {% generation %}{{ message.content }}{% endgeneration %} #}",
    "{% if false %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}",
    "{% if messages | length > 99 %}{% raw %}{% generation %}{% endraw %}{% endif %}",
    "{% set never %}{% generation %}{{ messages }}{% endgeneration %}{% endset %}",
])
def test_a_block_that_no_conversation_reaches_changes_nothing(
    folder: Path, unused: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_template(folder, PLAIN + unused)
    with caplog.at_level("INFO", logger="distca"):
        assert columns(chats(folder)) == transformers_columns(folder)
    said = [record.getMessage() for record in caplog.records if "generation" in record.getMessage()]
    seen_by_jinja = "if false" in unused or "set never" in unused
    assert said == ["3 conversations reach no {% generation %} block of the chat template: all that the assistant says "
                    "in them is in the loss"] * seen_by_jinja


def test_a_cached_chat_is_the_same_and_another_template_has_another_cache(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distca.corpus.cache.CHUNK_TOKENS", 1)
    monkeypatch.setattr("distca.corpus.tokenizers.TEXTS_PER_CALL", 1)
    cache = Cache(str(folder / "cache"))
    for number, template in enumerate((MARKED, FORGETFUL, PLAIN + "{% if false %}{% generation %}{% endgeneration %}"
                                       "{% endif %}"), start=1):
        write_template(folder, template)
        caplog.clear()
        with caplog.at_level("INFO", logger="distca"):
            expected = columns(chats(folder))
            said = [line for line in caplog.messages if "tokenizing" not in line]
            for _ in range(2):
                caplog.clear()
                found = open_corpus("jsonl", str(folder / "chats.jsonl"), content="chat", tokenizer=str(folder),
                                    cache=cache)
                assert columns(found) == expected
                assert [line for line in caplog.messages if str(folder / "cache") not in line] == said
        assert len(list((folder / "cache").iterdir())) == number


@pytest.mark.parametrize("state", ["truncation", "padding", "dropout", "trimmed offsets"])
def test_the_state_of_a_tokenizer_does_not_change_a_conversation(folder: Path, state: str) -> None:
    """transformers saves truncation and padding of its last call. Trimmed offsets would take the new line at the end of
    a turn out of the loss."""
    write_template(folder, MARKED)
    expected = transformers_columns(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if state == "truncation":
        tokenizer.enable_truncation(8)
    elif state == "padding":
        tokenizer.enable_padding(length=64)
    elif state == "dropout":
        tokenizer.model.dropout = 0.5
    else:
        tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert columns(chats(folder)) == expected
    assert said(folder, chats(folder))[0] == "4<|im_end|>\nYes, très sûr 🙂\n\n- it is<|im_end|>\n"


def test_special_tokens_may_be_named_in_a_file_of_their_own(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": MARKED}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert columns(chats(folder)) == transformers_columns(folder)


def test_dates_do_not_change_the_tokens() -> None:
    template = compile_template("{{ strftime_now is defined }}", {})
    assert template.documents("here", [])[0].text == "False"


def test_a_token_is_in_a_span_that_it_has_a_character_of() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (5, 8), (8, 9)]
    assert tokens_in([(3, 6)], offsets).tolist() == [False, True, True, True, False]
    assert tokens_in([(0, 1), (8, 9)], offsets).tolist() == [True, False, False, False, True]
    assert tokens_in([], []).tolist() == []


# ---- templates at random

CONTENTS = ["", "4", " two words ", "\n\nlines\n", "très sûr 🙂", "<|im_end|>", "{% generation %}", "{{ x }}{# y #}",
            "\ufdd0", "\ufdd00\ufdd1", "\ufdd2a\ufdd01", "<b>&amp;"]
NOTHING = "{{ '' }}"    # ends what whitespace control reaches
WRAPS = [               # how a block is passed on, and the same where transformers can follow it
    ("BLOCK", "BLOCK"), ("{% if true %}BLOCK{% endif %}",) * 2, ("{% for part in [1, 2] %}BLOCK{% endfor %}",) * 2,
    ("{% macro say(message) %}BLOCK{% endmacro %}{{ say(message) }}", "BLOCK"),
    ("{% set said %}BLOCK{% endset %}{{ said }}", "BLOCK"),
    ("{% set said %}BLOCK{% endset %}{{ '(' ~ [said] | join(',') ~ ')' }}", "(BLOCK)"),
    ("{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}BLOCK{% endcall %}", "[BLOCK]"),
    ("{% filter replace('q', 'qq') %}BLOCK{% endfilter %}", "BLOCK"),
]
ASIDES = [              # what writes no block, and the same without one
    ("", ""), ("{# {% generation %} #}", ""), ("{#- {%+ generation -%} -#}", ""),
    ("{% raw %}{% generation %}{% endraw %}", "{{ '{% generation %}' }}"),
    ("{% if false %}{%- generation %}x{% endgeneration -%}{% endif %}", ""),
    ("{% if message.never %}{%+generation%}{{ message.content }}{%endgeneration+%}{% endif %}", ""),
    ("{% set unused %}{% generation %}x{% endgeneration %}{% endset %}", ""),
]
TEMPLATE = """{{ bos_token }}{% for message in messages %}BEFORE{% if message.role == 'assistant' %}\
{{ '<|im_start|>assistant\n' }}SAID{% else %}\
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}ASIDE{% endif %}AFTER{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def random_templates(rng: random.Random) -> tuple[str, str]:
    """A template, and one that writes the same and whose blocks transformers can follow."""
    def tag(name: str) -> str:
        space, sign = (lambda: rng.choice(["", " ", "\n", " \t "])), (lambda: rng.choice(["", "-", "+"]))
        return "{%" + sign() + space() + name + space() + sign() + "%}"

    def gap() -> str:
        return rng.choice(["", " ", "\n", "\n  ", "text "])

    has_block = rng.random() < 0.8          # a template without one is asked for its turns, so they begin as prompted
    parts = {"BEFORE": gap() + NOTHING, "AFTER": gap() + NOTHING} if has_block else {"BEFORE": "", "AFTER": ""}
    opening, closing = (tag("generation"), tag("endgeneration")) if has_block else ("", "")
    nests = has_block and rng.random() < 0.3
    inner = (tag("generation") + "inner" + tag("endgeneration"), "inner") if nests else ("", "")
    body = gap() + "{{ message.content }}" + gap()
    end = rng.choice(["{{ '<|im_end|>\n' }}", "", "{% if true %}!{% endif %}"])
    made = []
    for wrap, nested, aside in zip(rng.choice(WRAPS), inner, rng.choice(ASIDES), strict=True):
        block = f"{NOTHING}{opening}{body}{NOTHING}{nested}{NOTHING}{end}{closing}{NOTHING}"
        template = TEMPLATE
        for name, part in ({"SAID": wrap.replace("BLOCK", block), "ASIDE": NOTHING + aside + NOTHING} | parts).items():
            template = template.replace(name, part)
        made.append(template)
    return made[0], made[1]


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 600), marks=pytest.mark.slow)], ids=str)
def test_text_and_loss_of_random_templates_are_those_of_transformers(folder: Path, seeds: range) -> None:
    """Spans that are empty, or end in a character of several tokens, are not compared token by token: transformers gets
    their last token wrong."""
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>")
    opened = open_tokenizer(str(folder), "data.tokenizer", special_tokens=False)
    num_marked = num_masks = 0
    for seed in seeds:
        rng = random.Random(seed)
        ours, theirs = random_templates(rng)
        roles = ["system"] * rng.randrange(2) + ["user", "assistant"] * rng.randrange(4) + ["user"]
        chat = [{"role": role, "content": rng.choice(CONTENTS)} for role in roles]
        rendered: Any = render_jinja_template(
            [chat], chat_template=theirs, return_assistant_tokens_mask=True, bos_token="<s>")
        (text,), (spans,) = rendered
        template = compile_template(ours, {"bos_token": "<s>"})
        documents = template.documents("here", chat)
        if not spans:
            assert documents == compile_template(theirs, {"bos_token": "<s>"}).documents("here", chat), seed
            assert documents[0].text == text and documents[0].by_turns, seed
            continue
        num_marked += 1
        assert documents == [Rendered(text, tuple(span for span in spans if span[0] < span[1]), by_turns=False)], seed
        if all(start < stop and text[stop - 1] < "\x80" for start, stop in spans):
            num_masks += 1
            (tokens,) = encoded_chats([("here", chat)], template, opened)
            expected: Any = fast.apply_chat_template(chat, chat_template=theirs, return_assistant_tokens_mask=True,
                                                     return_dict=True)
            assert tokens.in_loss is not None
            assert tokens.ids.tolist() == expected["input_ids"], seed
            assert tokens.in_loss.astype(int).tolist() == expected["assistant_masks"], seed
    assert num_marked > len(seeds) / 3 and num_masks > len(seeds) / 10
