"""Texts that grow, and chats as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = """{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{% for message in messages %}
  {%- if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('no ' + message['role']) }}{% endif %}
  {{- bos_token if loop.first else '' }}<{{ message.role }}>{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{{ {'é': 1} | tojson }}{% endif %}"""


def tokenizer_of(words: list[str]) -> Any:
    """Like Llama 2's: bytes where there is no word, and a decoder that strips the first space."""
    from tokenizers import Tokenizer, decoders, models

    pieces = [f"<0x{i:02X}>" for i in range(256)] + words
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<0x00>"))
    replaced = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [replaced, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_the_space_after_the_prompt_is_kept() -> None:
    from text import Growing

    text = Growing(tokenizer_of(["▁once", "▁upon", "▁a"]), [256])
    text.add(257)
    assert text.text == " upon"
    text.add(258)
    assert text.text == " upon a"


def test_a_character_comes_when_it_is_whole() -> None:
    from text import Growing

    tokenizer = tokenizer_of(["▁x"])
    text, seen = Growing(tokenizer, [256]), []
    for byte in "é€😀".encode():
        text.add(byte)
        seen.append(text.text)
    assert seen == ["", "é", "é", "é", "é€", "é€", "é€", "é€", "é€😀"]
    text.add("é".encode()[0])
    assert text.text == "é€😀"
    text.finish()
    assert text.text == "é€😀\N{REPLACEMENT CHARACTER}"


def test_what_may_become_a_stop_is_held_back() -> None:
    from text import Growing

    words = ["▁one", "▁two", "▁three", "▁fo", "ur", "rty"]
    text = Growing(tokenizer_of(words), [256], [" three four", " forty"])
    seen = []
    for token in (257, 258, 258, 259, 260, 257):
        text.add(token)
        seen.append((text.certain, text.stopped))
    assert seen[:4] == [(" two", False), (" two", False), (" two three", False), (" two three", False)]
    assert seen[4:] == [(" two three", True)] * 2


@pytest.mark.parametrize("where", ["file", "config", "list"])
def test_chats_are_those_of_transformers(tmp_path: Path, where: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    from text import open_words, render

    tokenizer_of(["<s>", "</s>", "▁hello"]).save(str(tmp_path / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    elif where == "config":
        config["chat_template"] = TEMPLATE
    else:
        config["chat_template"] = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    words = open_words(tmp_path)
    messages = [{"role": "user", "content": " hello "}, {"role": "assistant", "content": "ha"}]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words.tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    ).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render(words.template, messages, words.special) == theirs
    assert theirs.startswith("<s><user>hello</s>")
    with pytest.raises(ValueError, match="chat_template: no tool"):
        render(words.template, [{"role": "tool", "content": ""}], words.special)


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    from text import open_words

    tokenizer_of(["▁hello"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="chat_template: is missing"):
        open_words(tmp_path).encode("hello", chat=True)
