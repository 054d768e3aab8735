"""Tokenize conversations, with the loss on the assistant's turns alone.

The tokenizer's chat template renders them, in the same sandbox as in transformers, so that training and inference use
the same prompts. If a conversation reaches a {% generation %} block of the template, the text of the block is in the
loss. Otherwise each assistant turn is rendered twice: the messages before the turn with the generation prompt, then the
messages up to and including the turn. The text that the second adds, with its end-of-turn token, is in the loss.

Some templates render earlier turns differently once others follow (they drop thoughts). Such a conversation becomes one
document per assistant turn, as the model sees it at that turn. Templates do not get the date, so that the same data
always give the same tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from distca.corpus.tables import Record
from distca.corpus.tokenizers import TextTokenizer, Tokens, in_groups, json_object, tokenizer_file
from distca.validation import UserError, plain, read_text, short, to_install

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARKS = "__generation_marks__"                      # variable of the rendering context
_MARK, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"  # Unicode noncharacters

Messages = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A rendered document, and the spans [start, stop) of its text that are in the loss."""

    text: str
    spans: tuple[tuple[int, int], ...]
    by_turns: bool = True  # spans were found by rendering turns twice, not by generation blocks


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled chat template and the special tokens that it may use."""

    template: Any
    has_blocks: bool  # the source has generation blocks; a conversation may still reach none of them
    special_tokens: dict[str, str]

    def documents(self, where: str, messages: Messages) -> list[Rendered]:
        """Render a conversation as one document, or as one for each turn if later turns rewrite earlier ones."""
        whole = self._render(where, messages)
        marked = self._marked(where, messages, whole) if self.has_blocks else None
        return [marked] if marked is not None else self._turns(where, messages, whole)

    def _marked(self, where: str, messages: Messages, whole: str) -> Rendered | None:
        """Find the text of generation blocks; return None if the conversation reaches none.

        Render the conversation again with marks around blocks, chosen so that they do not occur in its text. Without
        the marks, this rendering must equal `whole`; it does not if the template trims or measures a block's text.
        """
        number = next(number for number in count() if f"{_MARK}{number}" not in whole)
        marks = f"{_MARK}{number}{_OPEN}", f"{_MARK}{number}{_CLOSE}"
        parts = re.split("({}|{})".format(*marks), self._render(where, messages, marks=marks))
        if len(parts) == 1:
            return None
        found = _between(parts, *marks)
        if found is None or found.text != whole:
            raise UserError(f"{where}: the chat template changes what a generation block has written (it trims, cuts "
                            "or measures it); write {% generation %} around what comes out in the end")
        return found

    def _turns(self, where: str, messages: Messages, whole: str) -> list[Rendered]:
        turns, as_written = [], True
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(where, messages[:number], prompt=True)
                turn = self._render(where, messages[:number + 1])
                if not turn.startswith(prompt):
                    raise UserError(f"{where}: the chat template writes message {number} otherwise than its prompt to "
                                    "generate begins it; mark what the assistant says by {% generation %} in a "
                                    "chat_template.jinja beside data.tokenizer")
                turns.append(Rendered(turn, ((len(prompt), len(turn)),)))
                as_written &= whole.startswith(turn)
        if as_written:
            return [Rendered(whole, tuple(span for one in turns for span in one.spans))]
        return turns

    def _render(self, where: str, messages: Messages, *, prompt: bool = False,
                marks: tuple[str, str] = ("", "")) -> str:
        try:
            text: str = self.template.render(
                messages=[dict(message) for message in messages], tools=None, documents=None,
                add_generation_prompt=prompt, **self.special_tokens, **{_MARKS: marks})
            text.encode("utf-8")
        except Exception as error:  # a template can raise anything
            reason = plain(" ".join(str(error).split()))[:200] or type(error).__name__
            if isinstance(error, UnicodeEncodeError):
                reason = "half a surrogate pair"
            raise UserError(f"{where}: the chat template fails ({reason}); repair or drop the conversation, or "
                            "change the template") from None
        return text


def load_chat_template(tokenizer: str) -> ChatTemplate:
    """Load the template beside a tokenizer.json: chat_template.jinja, or the one in tokenizer_config.json."""
    folder = tokenizer_file(tokenizer, "data.tokenizer").parent
    config = json_object(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = next((one.get("template") for one in source
                       if isinstance(one, dict) and one.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        source = read_text(folder / "chat_template.jinja")
    if not isinstance(source, str):
        raise UserError(f"data.content is 'chat' but {folder} has no chat template; put the model's "
                        "tokenizer_config.json or chat_template.jinja beside tokenizer.json")
    if "added_tokens_decoder" not in config:
        config |= json_object(folder / "special_tokens_map.json")  # older versions of transformers name them there
    named = {name: value.get("content") if isinstance(value, dict) else value
             for name in SPECIAL_TOKENS if (value := config.get(name)) is not None}
    return compile_template(source, {name: value for name, value in named.items() if isinstance(value, str)})


def compile_template(source: str, special_tokens: dict[str, str]) -> ChatTemplate:
    """Compile a Jinja source in the environment that transformers uses."""
    try:
        environment = _environment()
    except ImportError:
        raise UserError("data.content is 'chat' but the package jinja2, which chat templates are written for, is not "
                        f"installed; {to_install('jinja2')}") from None
    from jinja2.nodes import ExtensionAttribute

    try:
        blocks = environment.parse(source).find_all(ExtensionAttribute)
        return ChatTemplate(environment.from_string(source), any(True for _ in blocks), special_tokens)
    except Exception as error:  # Jinja's TemplateSyntaxError, or an error of Python in the generated code
        reason = plain(" ".join(str(error).split()))[:200]
        raise UserError(f"the chat template beside data.tokenizer is no Jinja template ({reason}); repair "
                        "it") from None


def _environment() -> Any:
    """Return a sandbox with the extensions, filters and globals that chat templates may use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """{% generation %} … {% endgeneration %}: renders its body between marks."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's own form)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        @jinja2.pass_context
        def marked(self, context: Any, caller: Any) -> str:
            opening, closing = context[_MARKS]
            return f"{opening}{caller()}{closing}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    return environment


def messages_of(records: Iterable[Record], field: str) -> Iterator[tuple[str, Messages]]:
    """Yield each conversation's position in its file (for errors) and its messages, each with role and content."""
    for record in records:
        messages = record.value(field, list, "a list of messages")
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise UserError(f"{record.where} has message {number} {short(message)} under {field!r}, which has no "
                                "role; write {\"role\": \"user\", \"content\": \"…\"}")
            if not isinstance(message.get("content", ""), str | list | None):
                raise UserError(f"{record.where} has content {short(message['content'])} in message {number}, not "
                                "text; repair or drop it")
        # tables add the keys of all messages to each, with null values; templates test whether a key exists
        yield record.where, [{"content": "", **{key: value for key, value in message.items() if value is not None}}
                             for message in messages]


def encoded_chats(
    conversations: Iterable[tuple[str, Messages]], template: ChatTemplate, tokenizer: TextTokenizer
) -> list[Tokens]:
    """Tokenize conversations as documents."""
    rendered = [(one, number == 0) for where, messages in conversations
                for number, one in enumerate(template.documents(where, messages))]
    found = []
    for group in in_groups(rendered, lambda one: len(one[0].text)):
        encodings = tokenizer.with_offsets([one.text for one, _ in group])
        for (one, is_first), (ids, offsets) in zip(group, encodings, strict=True):
            by_turns = template.has_blocks and is_first and one.by_turns and bool(one.spans)
            found.append(Tokens(np.array(ids, dtype=np.int64), tokens_in(one.spans, offsets), by_turns))
    return found


def tokens_in(spans: Iterable[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return which tokens overlap one of the spans, [tokens] bool; an empty token counts as one character long."""
    start, stop = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    stop = np.maximum(stop, start + 1)
    found = np.zeros(len(start), dtype=bool)
    for first, last in spans:
        found |= (start < last) & (stop > first)
    return found


def _between(parts: Iterable[str], opening: str, closing: str) -> Rendered | None:
    """Join the parts without the marks and return the spans between them; None if the marks are unbalanced."""
    spans, texts, at, depth, start = [], [], 0, 0, 0
    for part in parts:
        if part == opening:
            start = at if depth == 0 else start
            depth += 1
        elif part == closing:
            depth -= 1
            if depth == 0 and start < at:
                spans.append((start, at))
        else:
            texts.append(part)
            at += len(part)
        if depth < 0:
            return None
    return Rendered("".join(texts), tuple(spans), by_turns=False) if depth == 0 else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Dump JSON without the HTML escapes of Jinja's filter of this name."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
