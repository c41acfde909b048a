"""Folders in Hugging Face's layout: BOS exactly once, every end token known, every template found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_tokenizers import CHATML, byte_level_tokenizer, metaspace_tokenizer
from tokenizers import AddedToken, Tokenizer, processors

from engine.errors import ModelError, RequestError, UnsupportedModel
from engine.text import TextCodec

Folder = Callable[..., Path]
USER = [{"role": "user", "content": "hi"}]
WITH_BOS = "{{ bos_token }}" + CHATML


def chatml(*, adds_bos: bool = False) -> Tokenizer:
    """A byte-level tokenizer with ChatML's tokens, whose post-processor may add BOS."""
    tokenizer = byte_level_tokenizer("<s>", "<|im_start|>", "<|im_end|>", "</s>")
    if adds_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def reference(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


@pytest.mark.parametrize("template", [WITH_BOS, CHATML])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_chat_ids_equal_the_reference(folder: Folder, template: str, adds_bos: bool) -> None:
    """O110, O111: with or without BOS in the template and in the tokenizer's rule."""
    path = folder(chatml(adds_bos=adds_bos), tokenizer_config={"bos_token": "<s>"}, chat_template=template)
    codec, expected = TextCodec.load(path), reference(path)
    ids = expected.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert codec.encode_chat(USER) == ids
    assert ids.count(codec.bos_id) == int(template == WITH_BOS)
    assert codec.encode("hi") == expected("hi")["input_ids"]


def test_raw_text_gets_bos_exactly_once(folder: Folder) -> None:
    """O110: a prompt that begins with the BOS string has the same ids as one that does not."""
    codec = TextCodec.load(folder(chatml(adds_bos=True), tokenizer_config={"bos_token": "<s>"}))
    assert codec.encode("<s>hi") == codec.encode("hi")
    assert codec.encode("hi").count(codec.bos_id) == 1
    assert codec.encode("") == [codec.bos_id]
    assert codec.bos_id not in codec.encode_plain("<s>hi")


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_post_processor_beats_the_flag(folder: Folder, adds_bos: bool, flag: bool) -> None:
    """O112: add_bos_token beside a tokenizer.json is not read, as the reference doesn't."""
    settings = {"bos_token": "<s>", "add_bos_token": flag}
    path = folder(chatml(adds_bos=adds_bos), tokenizer_config=settings)
    codec = TextCodec.load(path)
    assert codec.encode("hi").count(codec.bos_id) == int(adds_bos)
    assert codec.encode("hi") == reference(path)("hi")["input_ids"]


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config": {"eos_token_id": 259}}, {"</s>"}),
        ({"generation_config": {"eos_token_id": [258, 259]}}, {"<|im_end|>", "</s>"}),
        ({"config": {"eos_token_id": 259}}, {"</s>"}),
        ({"config": {"text_config": {"eos_token_id": [259]}}}, {"</s>"}),
        ({"tokenizer_config": {"eos_token": "</s>"}}, {"</s>"}),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, {"</s>"}),
        ({"special_tokens_map": {"eos_token": "</s>"}}, {"</s>"}),
        ({"chat_template": CHATML}, {"<|im_end|>"}),
        (
            {"chat_template": CHATML, "config": {"eos_token_id": 259}, "generation_config": {}},
            {"<|im_end|>", "</s>"},
        ),
        ({}, set()),
    ],
)
def test_every_source_of_end_tokens_counts(folder: Folder, files: dict[str, Any], ends: set[str]) -> None:
    """O114: int or list, in any file, or only as the template's end of turn: the union."""
    codec = TextCodec.load(folder(chatml(), **files))
    assert {codec.token_text(i) for i in codec.eos_ids} == ends
    assert codec.decode([*codec.encode_plain("hi"), *codec.eos_ids]) == "hi"


def test_an_end_of_turn_that_is_no_special_token_is_made_one(folder: Folder) -> None:
    """O114, O115: the template's marker ends replies, and users can't write it."""
    tokenizer = byte_level_tokenizer(plain=("<|im_start|>", "<|im_end|>"))
    codec = TextCodec.load(folder(tokenizer, chat_template=CHATML))
    assert codec.eos_ids == (257,)
    assert 257 not in codec.encode_plain("<|im_end|>")
    assert codec.encode_chat([{"role": "user", "content": "<|im_end|>"}]).count(257) == 1


def test_tokens_declared_only_in_the_settings_are_added(folder: Folder) -> None:
    declared = {"256": {"content": "<x>", "special": True}, "257": {"content": "<y>", "special": False}}
    codec = TextCodec.load(
        folder(byte_level_tokenizer(), tokenizer_config={"added_tokens_decoder": declared})
    )
    assert codec.encode("<x><y>") == [256, 257]
    assert (codec.is_control(256), codec.is_control(257), codec.vocab_size) == (True, False, 258)
    wrong = {"300": {"content": "<x>", "special": True}}
    with pytest.raises(ModelError, match="disagree about the id of '<x>'"):
        TextCodec.load(folder(byte_level_tokenizer(), tokenizer_config={"added_tokens_decoder": wrong}))


def test_saved_truncation_and_padding_are_off(folder: Folder) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    assert len(TextCodec.load(folder(tokenizer)).encode("a" * 100)) == 100


def test_generation_defaults_are_read(folder: Folder) -> None:
    settings = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "do_sample": True}
    codec = TextCodec.load(folder(chatml(), generation_config=settings))
    assert codec.generation_defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert TextCodec.load(folder(chatml())).generation_defaults == {}


def test_templates_are_found_wherever_they_are(folder: Folder) -> None:
    one = "one {{ messages[0].content }}"
    named = [
        {"name": "default", "template": one},
        {"name": "tool_use", "template": "two {{ tools[0].name }}"},
    ]
    for files in (
        {"tokenizer_config": {"chat_template": one}},
        {"tokenizer_config": {"chat_template": named}},
        {"chat_template": one, "tokenizer_config": {"chat_template": "an older one"}},
    ):
        assert TextCodec.load(folder(chatml(), **files)).render_chat(USER) == "one hi"
    codec = TextCodec.load(folder(chatml(), tokenizer_config={"chat_template": named}))
    assert codec.render_chat(USER, tools=[{"name": "f"}]) == "two f"
    path = folder(chatml())
    (path / "chat_template.json").write_text('{"chat_template": "json {{ messages[0].content }}"}')
    assert TextCodec.load(path).render_chat(USER) == "json hi"


def test_a_model_without_a_template_says_so(folder: Folder) -> None:
    codec = TextCodec.load(folder(chatml()))
    assert not codec.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        codec.encode_chat(USER)


def test_what_can_not_be_read_is_refused_in_words(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        TextCodec.load(tmp_path)
    path = folder(chatml())
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        TextCodec.load(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        TextCodec.load(path)
    (path / "config.json").unlink()
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        TextCodec.load(path)
    with pytest.raises(ModelError, match="not valid Jinja"):
        TextCodec.load(folder(chatml(), chat_template="{% if %}"))
    no_decoder = byte_level_tokenizer()
    plain = Tokenizer(no_decoder.model)
    with pytest.raises(UnsupportedModel, match="decodes by nothing"):
        TextCodec.load(folder(plain))


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always", "never"])
def test_hidden_text_has_the_ids_it_would_have_as_plain_text(folder: Folder, scheme: str) -> None:
    """O115: what stands around a spelled marker is encoded as if it were not there."""
    template = "<s>{% for m in messages %}[{{ m.content }}]</s>{% endfor %}"
    codec = TextCodec.load(folder(metaspace_tokenizer(scheme), chat_template=template))
    for content in ("ab a", " ab ", "a"):
        plain = codec.encode_chat([{"role": "user", "content": content}] * 2)
        hidden = codec.encode_chat(
            [{"role": "user", "content": content}] * 2 + [{"role": "user", "content": "</s>"}]
        )
        assert hidden[: len(plain)] == plain
        assert codec.decode(hidden, skip_special=False).endswith("[</s>]</s>")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_markers_eat_white_space_as_the_tokenizer_does(folder: Folder, flag: str) -> None:
    tokenizer = byte_level_tokenizer("<s>", AddedToken("<e>", special=True, normalized=False, **{flag: True}))
    template = "{% for m in messages %}<s>\n{{ m.content }} \n<e> \n{% endfor %}"
    codec = TextCodec.load(folder(tokenizer, chat_template=template))
    once = codec.encode_chat([{"role": "user", "content": "hi"}])
    hidden = codec.encode_chat([{"role": "user", "content": content} for content in ("hi", "<e>")])
    assert once == codec.encode(codec.render_chat([{"role": "user", "content": "hi"}]))
    assert hidden[: len(once)] == once
    assert hidden.count(257) == 2
