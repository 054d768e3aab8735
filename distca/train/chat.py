"""Conversations as tokens, with the loss on what the assistant says and on nothing else.

The tokenizer's own chat template writes them, in the sandbox that transformers renders templates in, so that a model is
trained on what it is asked with. Where a template marks the assistant's words by {% generation %}, these are in the
loss. Otherwise a turn is found by asking the template twice: with everything before the turn and the prompt to
generate, and with the turn; what the second adds is what the model is to say, the end of its turn included.

Some templates write earlier turns differently once others follow (they drop what was thought). A conversation that is
rewritten so becomes one document for each of the assistant's turns, as the model sees it when it takes that turn.
Templates are not told the date: the same data are the same tokens tomorrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distca.train.tokenizing import Tokens, in_groups, tokenizer_file
from distca.validation import plain, read_json, read_text

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # around a generation block; Unicode has no such characters and never will

Messages = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A document, and the parts [start, stop) of its text that the assistant says."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template, with the special tokens that it may name."""

    template: Any
    marked: bool  # has generation blocks
    special_tokens: dict[str, str]

    def documents(self, where: str, messages: Messages) -> list[Rendered]:
        """The documents of a conversation: one, or one for each turn where later turns rewrite earlier ones."""
        if self.marked:
            if any(mark in json.dumps(list(messages), ensure_ascii=False) for mark in (_OPEN, _CLOSE)):
                raise ValueError(f"{where} holds U+FDD0 or U+FDD1, which no text may; repair or drop it")
            return [_between_marks(self._render(where, messages))]
        whole, turns, as_written = self._render(where, messages), [], True
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(where, messages[:number], prompt=True)
                said = self._render(where, messages[:number + 1])
                if not said.startswith(prompt):
                    raise ValueError(f"{where}: the chat template writes message {number} otherwise than its prompt to "
                                     "generate begins it; mark what the assistant says by {% generation %} in a "
                                     "chat_template.jinja beside data.tokenizer")
                turns.append(Rendered(said, ((len(prompt), len(said)),)))
                as_written &= whole.startswith(said)
        if as_written:
            return [Rendered(whole, tuple(span for turn in turns for span in turn.spans))]
        return turns

    def _render(self, where: str, messages: Messages, *, prompt: bool = False) -> str:
        try:
            return self.template.render(messages=[dict(message) for message in messages], tools=None, documents=None,
                                        add_generation_prompt=prompt, **self.special_tokens)
        except Exception as error:  # whatever a template does
            reason = plain(" ".join(str(error).split()))[:200] or type(error).__name__
            raise ValueError(f"{where}: the chat template fails ({reason}); repair or drop the conversation, or "
                             "change the template") from None


def load_chat_template(tokenizer: str) -> ChatTemplate:
    """The template beside a tokenizer.json: chat_template.jinja, or what tokenizer_config.json says."""
    folder = tokenizer_file(tokenizer).parent
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    config = config if isinstance(config, dict) else {}
    source = config.get("chat_template")
    if isinstance(source, list):
        source = next((one.get("template") for one in source
                       if isinstance(one, dict) and one.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        source = read_text(folder / "chat_template.jinja")
    if not isinstance(source, str):
        raise ValueError(f"data.content is 'chat' but {folder} has no chat template; put the model's "
                         "tokenizer_config.json or chat_template.jinja beside tokenizer.json")
    named = {name: value.get("content") if isinstance(value, dict) else value
             for name in SPECIAL_TOKENS if (value := config.get(name)) is not None}
    return compile_template(source, {name: value for name, value in named.items() if isinstance(value, str)})


def compile_template(source: str, special_tokens: dict[str, str]) -> ChatTemplate:
    """The template of a Jinja source, as transformers would compile it."""
    try:
        environment, syntax_error = _environment()
    except ImportError:
        raise ValueError("data.content is 'chat' but the package jinja2, which chat templates are written for, is not "
                         "installed; run: pip install jinja2") from None
    try:
        template = environment.from_string(source)
    except syntax_error as error:
        raise ValueError(f"the chat template beside data.tokenizer is no Jinja template ({plain(str(error))}); repair "
                         "it") from None
    return ChatTemplate(template, re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None, special_tokens)


def _environment() -> tuple[Any, type[Exception]]:
    """The sandbox with what templates may use, and the error of those that are none."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """{% generation %} … {% endgeneration %}: what stands there comes out between marks."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's own form)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    return environment, jinja2.TemplateError


def encoded_chats(
    conversations: Iterable[tuple[str, Messages]], template: ChatTemplate, tokenizer: Any
) -> Iterator[Tokens]:
    """The conversations as tokens, some at a time."""
    rendered = (one for where, messages in conversations for one in template.documents(where, messages))
    for group in in_groups(rendered, lambda one: len(one.text)):
        encodings = tokenizer.encode_batch([one.text for one in group], add_special_tokens=False)
        for one, encoding in zip(group, encodings, strict=True):
            yield Tokens(np.array(encoding.ids, dtype=np.int64), tokens_in(one.spans, encoding.offsets))


def tokens_in(spans: Iterable[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """[tokens] whether a token has a character in one of the spans, or stands in one without any."""
    start, stop = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    stop = np.maximum(stop, start + 1)
    found = np.zeros(len(start), dtype=bool)
    for first, last in spans:
        found |= (start < last) & (stop > first)
    return found


def _between_marks(text: str) -> Rendered:
    """The text without the marks, and what stood between them."""
    spans, parts, at = [], [], 0
    for part in text.split(_OPEN):
        said, close, rest = part.partition(_CLOSE)
        if close:
            spans.append((at, at + len(said)))
        parts.append(said + rest)
        at += len(said) + len(rest)
    return Rendered("".join(parts), tuple(spans))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Without the escapes of HTML that Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
