"""Between texts and tokens: a checkpoint's tokenizer and chat template, and texts that grow token by token."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import read_json
from tokenizers import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what decoders make of part of a character


@dataclass
class Words:
    """What turns prompts into tokens."""

    tokenizer: Tokenizer
    template: str | None  # of chats, in Jinja
    special: dict[str, str] = field(default_factory=dict)  # tokens that templates name, such as bos_token

    def encode(self, prompt: str, chat: bool) -> list[int]:
        if not chat:
            return list(self.tokenizer.encode(prompt).ids)
        asked = render(self.template, [{"role": "user", "content": prompt}], self.special)
        return list(self.tokenizer.encode(asked, add_special_tokens=False).ids)  # the template has them


def open_words(folder: Path) -> Words:
    """tokenizer.json, and the template of chat_template.jinja or of tokenizer_config.json."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no other
        raise ValueError(f"tokenizer.json: {error}") from None
    about: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").exists():
        about = read_json(folder, "tokenizer_config.json")
    template = about.get("chat_template")
    if isinstance(template, list):  # of several
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text()
    if not isinstance(template, (str, type(None))):
        raise ValueError(f"tokenizer_config.json: chat_template: must be a text, got {type(template).__name__}")
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in about.items()}
    special = {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}
    return Words(tokenizer, template, special)


def render(template: str | None, messages: list[dict[str, str]], special: dict[str, str]) -> str:
    """The messages as the model was trained to see them, up to where its answer begins."""
    if template is None:
        raise ValueError("tokenizer_config.json: chat_template: is missing, so that there is no --chat with this model")
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("--chat: pip install jinja2") from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False} | options)
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),  # the user's own time
    }
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:  # of what it computes, too
        raise ValueError(f"tokenizer_config.json: chat_template: {error}") from None


class Growing:
    """What follows a prompt, with a token more at a time, up to one of the texts that stop it.

    Decoders strip the space that a text begins with, and a character may take several tokens.  So each token is decoded
    behind some before it, and only what has come to whole characters counts.
    """

    BEHIND = 6  # tokens of the prompt

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens = list(prompt[-self.BEHIND :])
        self._begin, self._end = 0, len(self._tokens)  # the last tokens that are in the text
        self._text = ""
        self._due: list[int] = []  # tokens that wait until somebody asks for the text

    def add(self, token: int) -> None:
        self._due.append(token)
        if self._stops:
            self._grow()

    def finish(self) -> None:
        """No token follows: what is not a whole character is shown as such."""
        self._grow()
        if self._end < len(self._tokens):
            self._take(self._decode(self._end))

    @property
    def text(self) -> str:
        self._grow()
        return self._text

    @property
    def certain(self) -> str:
        """The text without an end that may become a text that stops it."""
        text = self.text
        ends = (n for stop in self._stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
        return text if self.stopped else text[: len(text) - max(ends, default=0)]

    def _grow(self) -> None:
        for token in self._due:
            self._tokens.append(token)
            before, now = self._decode(self._begin, self._end), self._decode(self._begin)
            if now.startswith(before) and len(now) > len(before) and not now.endswith(UNKNOWN):
                self._take(now[len(before) :])
        self._due.clear()

    def _decode(self, begin: int, end: int | None = None) -> str:
        return str(self._tokenizer.decode(self._tokens[begin:end]))

    def _take(self, new: str) -> None:
        if self.stopped:
            return
        self._text += new
        self._begin, self._end = self._end, len(self._tokens)
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
