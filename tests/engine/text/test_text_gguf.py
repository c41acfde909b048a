"""Tokenizers from GGUF files follow the file's flags, its kind, and its token types."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from text_bpe import sentencepiece
from text_tokenizers import CHATML

from engine.errors import ModelError, UnsupportedModel
from engine.gguf_header import read_metadata
from engine.text import TextCodec
from engine.text.pretokenizers import pre_tokenizer

Make = Callable[..., TextCodec]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
MARKERS = [("<s>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<tool>", USER_DEFINED)]
SPM = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]


def pieces(codec: TextCodec, text: str) -> list[str]:
    return [codec.token_text(i) for i in codec.encode_plain(text)]


@pytest.mark.parametrize(("flag", "starts"), [(True, True), (False, False), (None, False)])
def test_the_bos_flag_of_a_byte_level_model_is_obeyed(
    gguf_codec: Make, flag: bool | None, starts: bool
) -> None:
    """O112: add_bos true, false, absent; absent means none for this kind."""
    meta = {} if flag is None else {"add_bos_token": flag}
    codec = gguf_codec(MARKERS, model="gpt2", pre="smollm", bos_token_id=0, **meta)
    assert codec.encode("a")[:-1] == [0] * starts
    assert codec.encode("<s>a").count(0) == 1
    assert codec.encode("a").count(0) == int(starts)


@pytest.mark.parametrize(
    ("pre", "starts"),
    [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False), ("default", False)],
)
def test_absent_bos_flag_means_the_default_of_the_kind(gguf_codec: Make, pre: str, starts: bool) -> None:
    """O112: without a flag, Llama 3 and Tekken tokenizers start with BOS."""
    codec = gguf_codec(MARKERS, model="gpt2", pre=pre, bos_token_id=0)
    assert codec.encode("a").count(0) == int(starts)


@pytest.mark.parametrize(("flag", "starts"), [(True, True), (False, False), (None, True)])
def test_the_bos_flag_of_a_sentencepiece_model_is_obeyed(
    gguf_codec: Make, flag: bool | None, starts: bool
) -> None:
    """O112: absent means BOS for SentencePiece, with the usual ids where the file names none."""
    codec = gguf_codec(SPM, model="llama", **({} if flag is None else {"add_bos_token": flag}))
    assert (codec.bos_id, codec.eos_ids) == (1, (2,))
    assert codec.encode("a").count(1) == int(starts)
    assert codec.encode("<s>a").count(1) == 1


def test_the_eos_flag_is_obeyed(gguf_codec: Make) -> None:
    """O112: add_eos true ends raw prompts with EOS; absent does not."""
    shape = {"model": "gpt2", "pre": "gpt-2", "eos_token_id": 2}
    assert gguf_codec(MARKERS, **shape, add_eos_token=True).encode("a")[-1] == 2
    assert gguf_codec(MARKERS, **shape).encode("a")[-1] != 2


def test_end_tokens_are_gathered_from_every_key_and_the_template(gguf_codec: Make) -> None:
    """O114: eos, eot, and the template's end of turn, which no key names."""
    tokens = [*MARKERS, ("<eos>", CONTROL), ("<eot>", CONTROL)]
    codec = gguf_codec(tokens, model="gpt2", pre="gpt-2", eos_token_id=4, eot_token_id=5, template=CHATML)
    assert set(codec.eos_ids) == {4, 5, 2}


def test_token_types_decide_what_is_a_control_token(gguf_codec: Make) -> None:
    """O113: control and user-defined tokens are one id in a prompt; only control tokens are hidden."""
    codec = gguf_codec(MARKERS, model="gpt2", pre="gpt-2")
    assert codec.encode("<|im_start|><tool>") == [1, 3]
    assert codec.is_control(1)
    assert not codec.is_control(3)
    assert codec.decode([1, 3]) == "<tool>"
    assert codec.encode_plain("<tool>") == [3]
    assert 1 not in codec.encode_plain("<|im_start|>")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab12345 c!!", ["ab", "12345", " c", "!!"]),
        ("smollm", "ab12345 c!!", ["ab", "1", "2", "3", "4", "5", " c", "!!"]),
        ("llama-bpe", "ab12345 c!!\n", ["ab", "123", "45", " c", "!!\n"]),
        ("llama3", "I'LL x", ["I", "'LL", " x"]),
        ("llama-v3", "a\n\n b", ["a", "\n\n", " b"]),
        ("qwen2", "ab12345 c!!\n", ["ab", "1", "2", "3", "4", "5", " c", "!!\n"]),
        ("tekken", "HTTPServer a/\n12", ["HTTPServer", " a", "/\n", "1", "2"]),
        ("tekken", "aB Ab", ["a", "B", " Ab"]),
        ("default", "ab1234 c=!x", ["ab", "123", "4", " c", "=!", "x"]),
    ],
)
def test_each_kind_cuts_words_as_published(pre: str, text: str, words: list[str]) -> None:
    cuts = pre_tokenizer(pre, "model").pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cuts] == words


def test_an_unknown_kind_is_refused_by_name(gguf_codec: Make) -> None:
    with pytest.raises(UnsupportedModel, match=r"'gpt-99' is not known.*smollm"):
        gguf_codec(MARKERS, model="gpt2", pre="gpt-99")
    with pytest.raises(UnsupportedModel, match="'bert' is not served"):
        gguf_codec(MARKERS, model="bert")


def test_qwen_text_is_composed(gguf_codec: Make) -> None:
    codec = gguf_codec(MARKERS, model="gpt2", pre="qwen2")
    assert codec.encode_plain("e\u0301") == codec.encode_plain("é")


def test_sentencepiece_merges_by_score(gguf_codec: Make) -> None:
    """Ids equal a plain implementation's over many random strings."""
    source = random.Random(3)
    lengths = [2, 3, 4] * 30
    words = sorted({"▁" * source.randint(0, 1) + "".join(source.choices("abc", k=n)) for n in lengths})
    letters = ["▁", "a", "b", "c"]
    scored = [(word, NORMAL, -float(i)) for i, word in enumerate(source.sample(words, len(words)))]
    codec = gguf_codec([*SPM, *scored, *((letter, NORMAL, -1e6) for letter in letters)], model="llama")
    scores = {word: score for word, _, score in scored}
    for _ in range(500):
        text = "".join(source.choices("abc ", k=source.randint(1, 30)))
        expected = sentencepiece("▁" + text.replace(" ", "▁"), scores)
        assert [codec.token_text(i).replace(" ", "▁") for i in codec.encode_plain(text)] == expected
        assert codec.decode(codec.encode(text)) == text


def test_sentencepiece_falls_back_to_bytes(gguf_codec: Make) -> None:
    codec = gguf_codec([*SPM, ("▁", NORMAL)], model="llama")
    assert [codec.token_bytes(i) for i in codec.encode_plain("é")] == [b" ", b"\xc3", b"\xa9"]
    assert codec.decode(codec.encode_plain("日本 🚀\n")) == "日本 🚀\n"


@pytest.mark.parametrize("prefix", [True, False])
def test_the_space_prefix_flag_is_obeyed(gguf_codec: Make, prefix: bool) -> None:
    tokens = [*SPM, ("▁", NORMAL), ("a", NORMAL), ("▁a", NORMAL)]
    codec = gguf_codec(tokens, model="llama", add_space_prefix=prefix)
    assert codec.encode_plain("a") == [5 if prefix else 4]
    assert codec.decode(codec.encode_plain(" a")) == " a"


def test_text_never_merges_into_a_control_token(gguf_codec: Make) -> None:
    """O115: also where the pieces of a control token are in the vocabulary themselves."""
    tokens = [(piece, NORMAL) for piece in ("▁", "<", "s>", "s", ">", "<s")]
    codec = gguf_codec([*SPM, *tokens], model="llama")
    ids = codec.encode_plain("<s></s>")
    assert not any(codec.is_control(i) for i in ids)
    assert codec.decode(ids) == "<s></s>"


def test_text_is_spelled_out_where_merges_give_a_control_token(gguf_codec: Make) -> None:
    """O115: a vocabulary whose own merges make a control token."""
    for pre in ("gpt-2", "llama-bpe"):
        codec = gguf_codec([("ab", CONTROL)], model="gpt2", merges=["a b"], pre=pre)
        assert pieces(codec, "ab") == ["a", "b"]
        assert codec.encode("ab") == [0]


def test_damaged_files_are_refused_in_words(tmp_path: Path, smollm2: Path) -> None:
    path = tmp_path / "x.gguf"
    for content, words in (
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" * 8, "not a GGUF file"),
        (b"GGUF\x01\0\0\0" + bytes(16), "version 1"),
        (smollm2.read_bytes()[:200_000], "cut off"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\xff" * 8, "cut off"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(15) + b"\x63\0\0\0", "value type 99"),
        (b"GGUF\x03\0\0\0" + bytes(16), "holds no tokenizer"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            TextCodec.load(path)
    with pytest.raises(ModelError, match="no such file"):
        TextCodec.load(tmp_path / "absent.gguf")


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -4)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("b", True)
    writer.add_string("s", "héllo")
    writer.add_array("ai", [1, 2, 3])
    writer.add_array("as", ["x", "ÿ"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "i32": -3,
        "u64": 2**63,
        "i64": -4,
        "f32": 0.5,
        "f64": 0.1,
        "b": True,
        "s": "héllo",
        "ai": [1, 2, 3],
        "as": ["x", "ÿ"],
    }
    assert read_metadata(path) == expected
