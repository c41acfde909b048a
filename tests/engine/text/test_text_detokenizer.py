"""Text comes in whole characters, as soon as it is certain, and equals the decoding of all ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_ids, byte_level_tokenizer, metaspace_tokenizer

from engine.text import TextCodec
from engine.text.parts import TokenizerParts

HARD = [
    "👩🏽‍🚀🤦🏿‍♂️👨‍👩‍👧‍👦",
    "🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿❤️",
    "漢字とかな한국어中文",
    "สวัสดีชาวโลก",
    "שָׁלוֹם עולם",
    "e\u0301 ½ \u00a0 naïve",
]
MAKERS = ["normalizer", "first", "always", "never"]


def byte_codec() -> TextCodec:
    """A codec whose tokens are single bytes, and <end>."""
    tokenizer = byte_level_tokenizer("<end>")
    return TextCodec(TokenizerParts(tokenizer=tokenizer, vocab_size=257, bos_id=None, eos_ids=(256,)))


def stream(codec: TextCodec, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """The text of each id in turn, then of the end."""
    detokenizer = codec.detokenizer(prompt)
    return [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]


@pytest.fixture
def spm(folder: Callable[..., Path], request: pytest.FixtureRequest) -> TextCodec:
    return TextCodec.load(folder(metaspace_tokenizer(request.param), tokenizer_config={"eos_token": "</s>"}))


@pytest.mark.parametrize("text", HARD)
def test_characters_of_many_tokens_come_whole(codec: TextCodec, text: str) -> None:
    """O050: no half of a character is ever shown, and nothing is lost."""
    deltas = stream(codec, codec.encode_plain(text))
    assert "".join(deltas) == text
    assert deltas[-1] == ""
    assert not any("\ufffd" in delta for delta in deltas)
    assert len(deltas) > len(text) / 2


def test_interleaved_replies_do_not_mix(codec: TextCodec) -> None:
    """O050: a batch of eight, one token each in turn."""
    texts = [HARD[i % len(HARD)] * 2 for i in range(8)]
    ids = [codec.encode_plain(text) for text in texts]
    detokenizers = [codec.detokenizer() for _ in texts]
    shown = ["" for _ in texts]
    for step in range(max(map(len, ids))):
        for i, detokenizer in enumerate(detokenizers):
            shown[i] += detokenizer.push(ids[i][step : step + 1])
    assert shown == texts


@given(ids=st.lists(st.integers(0, 49151), max_size=60), cuts=st.lists(st.integers(1, 7), max_size=60))
@settings(deadline=None, max_examples=300)
def test_deltas_join_to_the_decoding_of_all_ids(codec: TextCodec, ids: list[int], cuts: list[int]) -> None:
    """O050: streamed or not, any ids, broken UTF-8 included, give the same text."""
    detokenizer, shown, rest = codec.detokenizer(), "", ids
    for cut in [*cuts, len(ids)]:
        shown += detokenizer.push(rest[:cut])
        rest = rest[cut:]
    assert shown + detokenizer.flush() == codec.decode(ids)


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_broken_bytes_become_replacement_characters(data: bytes) -> None:
    assert "".join(stream(byte_codec(), byte_ids(data))) == data.decode("utf-8", "replace")


def test_a_broken_character_shows_once_it_can_not_complete(codec: TextCodec) -> None:
    first, *_ = codec.encode_plain("你")
    assert stream(codec, [first, *codec.encode_plain("a")]) == ["", "\ufffda", ""]
    assert stream(codec, [first]) == ["", "\ufffd"]


def test_control_and_end_tokens_give_no_text(codec: TextCodec) -> None:
    ids = codec.encode("a<|im_end|>b<|endoftext|>")
    assert stream(codec, ids) == ["a", "", "b", "", ""]
    assert codec.decode(ids) == "ab"
    assert codec.decode(ids, skip_special=False) == "a<|im_end|>b<|endoftext|>"


def test_an_end_token_that_is_an_ordinary_token_gives_no_text(folder: Callable[..., Path]) -> None:
    tokenizer = byte_level_tokenizer(plain=("<stop>",))
    end = tokenizer.token_to_id("<stop>")
    codec = TextCodec.load(folder(tokenizer, generation_config={"eos_token_id": [end]}))
    assert codec.eos_ids == (end,)
    assert "".join(stream(codec, codec.encode("ab<stop>"))) == "ab"


@pytest.mark.parametrize("missing", [1, 2])
def test_a_prompt_that_ends_inside_a_character_shows_nothing_of_itself(missing: int) -> None:
    """O051: only new text is sent; the completed character appears once."""
    codec = byte_codec()
    data = "a secret prompt 你好".encode()
    ids = byte_ids(data)
    reply = [*ids[-missing:], *codec.encode_plain("!")]
    assert "".join(stream(codec, reply, ids[:-missing])) == "好!"


def test_a_character_that_the_reply_leaves_broken_is_not_part_of_it() -> None:
    """O051: the prompt's own broken bytes are never sent."""
    codec = byte_codec()
    prompt = byte_ids("secret 好".encode()[:-1])
    assert "".join(stream(codec, codec.encode_plain("ok"), prompt)) == "ok"
    assert "".join(stream(codec, [], prompt)) == ""
    assert stream(codec, [*byte_ids(b"\xe4"), *codec.encode_plain("x")], prompt) == ["", "\ufffdx", ""]
    emoji = byte_ids("🚀".encode())
    assert "".join(stream(codec, [emoji[1]], emoji[:1])) == "\ufffd"
    assert "".join(stream(codec, emoji[1:], emoji[:1])) == "🚀"


@given(prompt=st.text(max_size=20), reply=st.text(max_size=20), cut=st.integers(0, 3))
@settings(deadline=None)
def test_prompt_and_reply_join_to_the_whole_text(prompt: str, reply: str, cut: int) -> None:
    """O051: wherever a text is cut into prompt and reply, the reply is all that was not yet whole."""
    codec = byte_codec()
    data = (prompt + reply).encode()
    at = min(len(prompt.encode()) + cut, len(data))
    ids = byte_ids(data)
    whole = data[:at].decode("utf-8", "ignore")
    assert whole + "".join(stream(codec, ids[at:], ids[:at])) == prompt + reply


@pytest.mark.parametrize("spm", MAKERS, indirect=True)
def test_spaces_survive_streaming(spm: TextCodec) -> None:
    """O052: words keep the space between them, one by one or all at once."""
    for text in ("ab a b", "a  b", "好 a", ""):
        ids = spm.encode_plain(text)
        assert "".join(stream(spm, ids)) == spm.decode(ids) == text


@pytest.mark.parametrize("spm", MAKERS, indirect=True)
def test_streams_equal_the_tokenizers_own_decoding(spm: TextCodec, request: pytest.FixtureRequest) -> None:
    """O052: stream, non-stream and the reference library's decode agree, spaces included."""
    tokenizer = metaspace_tokenizer(request.node.callspec.params["spm"])
    for text in ("ab a b", " ab", "  a", "好 a"):
        ids = spm.encode(f"{text}</s>")
        reference = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(stream(spm, ids)) == spm.decode(ids) == reference


@pytest.mark.parametrize("spm", ["normalizer"], indirect=True)
def test_only_the_start_of_the_whole_text_loses_its_space(spm: TextCodec) -> None:
    """O052: a reply that starts with a space keeps it, unless nothing stands before it."""
    word = spm.encode_plain("ab")
    assert spm.token_text(word[0]) == " ab"
    assert "".join(stream(spm, word)) == "ab"
    assert "".join(stream(spm, word, spm.encode("<s>"))) == "ab"
    assert "".join(stream(spm, word, spm.encode("<s>a"))) == " ab"


def test_a_long_prompt_costs_the_detokenizer_nothing(codec: TextCodec) -> None:
    """O(new tokens): of the prompt it reads the first text and the last few bytes."""

    class Counting(Sequence[int]):
        def __init__(self, ids: list[int]) -> None:
            self.ids, self.reads = ids, 0

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            self.reads += 1
            return self.ids[index]

    prompt = Counting(codec.encode_plain("word " * 5000))
    codec.detokenizer(prompt)
    assert prompt.reads < 10


def test_control_tokens_that_are_asked_for_give_their_spelling() -> None:
    """Whoever reads calls of tools must see their markers; others, and ends, stay silent."""
    tokenizer = byte_level_tokenizer("<end>", "<call>", "<other>")
    codec = TextCodec(TokenizerParts(tokenizer=tokenizer, vocab_size=259, bos_id=None, eos_ids=(256,)))
    ids = [257, *byte_ids("é".encode()), 258, 257, *byte_ids(b"x"), 256]
    detokenizer = codec.detokenizer(byte_ids(b"a"), frozenset({257}))
    assert [detokenizer.push([i]) for i in ids] == ["<call>", "", "é", "", "<call>", "x", ""]
    assert codec.detokenizer().push(ids) == "éx"
