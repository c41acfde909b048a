"""The real model's tokenizer, read from GGUF, gives the ids that its published tokenizer gives."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_bpe import byte_to_char, merge, split_digits, split_words

from engine.gguf_header import read_metadata
from engine.text import TextCodec

# The model's vocabulary has no token for some bytes; its published tokenizer drops them without a word.
MISSING = "\x04\x06\x13\x14\x16\x1d"
TEXT = st.text(
    st.characters(exclude_characters=MISSING, exclude_categories=["Cs"], max_codepoint=0x3FFFF)
    | st.characters(min_codepoint=0xC0000, exclude_categories=["Cs"])
)
GOLDEN = Path(__file__).with_name("smollm2_golden.json")


class Independent:
    """SmolLM2's tokenizer once more, from the file's vocabulary and merges."""

    def __init__(self, path: Path) -> None:
        meta = read_metadata(path)
        self._ids = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
        pairs = (tuple(text.split(" ")) for text in meta["tokenizer.ggml.merges"])
        self._ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        self._chars = byte_to_char()

    def encode(self, text: str) -> list[int]:
        words = (word for part in split_digits(text) for word in split_words(part))
        symbols = ([self._chars[byte] for byte in word.encode()] for word in words)
        return [self._ids[token] for word in symbols for token in merge(word, self._ranks)]


@pytest.fixture(scope="module")
def independent(smollm2: Path) -> Independent:
    return Independent(smollm2)


def samples(count: int) -> list[str]:
    """Random strings of digits, letters, scripts, white space and code, the same every time."""
    source = random.Random(7)
    alphabets = [
        "0123456789",
        "abcdefghijklmnopqrstuvwxyz '",
        "0123456789 .,-+abc",
        " \t\n\r\u00a0\u3000x",
        "éüßñçøåÆłžПриветحباשלוםไทย日本語中文한국어",
        "\u0660\u0661\u0662\u0969\u096a²³½\u2163\u2167\u2460\U0001d7d80a ",
        "👩🏽‍🚀🇩🇪❤️🎉a 1",
        "{}[]()<>|&^%$#@!~`\\/:;\"'_=+-*?,. abcXYZ01\n\t",
        "'s't're've'm'll'd I'WE don't",
    ]
    return [
        "".join(source.choice(alphabets[i % len(alphabets)]) for _ in range(source.randint(1, 40)))
        for i in range(count)
    ]


def test_ids_equal_an_independent_implementation(codec: TextCodec, independent: Independent) -> None:
    differing = [text for text in samples(5000) if codec.encode_plain(text) != independent.encode(text)]
    assert differing == []


def test_every_digit_is_a_token_of_its_own(codec: TextCodec) -> None:
    """Numbers are cut into single digits, whatever stands around them."""
    digits = {codec.encode_plain(digit)[0] for digit in "0123456789"}
    assert len(digits) == 10
    for text in ("2024", " 2024", "a1b22", "3.14159", "100,000", "0x1F600", "\n\n42\n"):
        ids = codec.encode_plain(text)
        assert sum(i in digits for i in ids) == sum(char.isdigit() for char in text)
        assert all(not any(c in b"0123456789" for c in codec.token_bytes(i)) for i in set(ids) - digits)


def test_a_space_before_a_digit_is_a_token_of_its_own(codec: TextCodec) -> None:
    one, two, space = (codec.encode_plain(text) for text in ("1", "2", " "))
    assert codec.encode_plain(" 12") == space + one + two


@pytest.mark.parametrize(
    "entry", json.loads(GOLDEN.read_text(encoding="utf-8")), ids=lambda e: repr(e["text"])
)
def test_golden_strings(codec: TextCodec, entry: dict[str, object]) -> None:
    """Ids that were looked through by hand: a change in any of them changes what the model reads."""
    text = str(entry["text"])
    assert codec.encode(text) == entry["ids"]
    assert codec.decode(codec.encode(text), skip_special=False) == text


@given(TEXT)
@settings(deadline=None, max_examples=300)
def test_plain_text_comes_back(codec: TextCodec, text: str) -> None:
    assert codec.decode(codec.encode_plain(text)) == text


def test_bytes_without_a_token_are_dropped(codec: TextCodec) -> None:
    """As the published tokenizer does; nothing else of the text is lost."""
    assert codec.decode(codec.encode_plain(f"a{MISSING}b")) == "ab"
    assert codec.encode_plain(MISSING) == []


@given(TEXT, st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>"]))
@settings(deadline=None, max_examples=100)
def test_plain_text_never_holds_a_control_token(codec: TextCodec, text: str, marker: str) -> None:
    ids = codec.encode_plain(text + marker + text)
    assert not any(codec.is_control(i) for i in ids)
    assert codec.decode(ids) == text + marker + text


def test_markers_of_the_template_are_one_id_each(codec: TextCodec) -> None:
    """O113: markers are never cut into ordinary pieces."""
    assert codec.encode("<|im_start|>user\nhi<|im_end|>\n") == [1, 4093, 198, 6004, 2, 198]
    ids = codec.encode_chat([{"role": "user", "content": "hi"}])
    text = codec.render_chat([{"role": "user", "content": "hi"}])
    assert ids == codec.encode(text)
    assert [i for i in ids if codec.is_control(i)] == [1, 2, 1, 2, 1]


def test_the_model_adds_no_bos_and_ends_with_im_end(codec: TextCodec) -> None:
    """O112: the file says add_bos false, though it names a BOS."""
    assert (codec.vocab_size, codec.bos_id, codec.eos_ids) == (49152, 1, (2,))
    assert codec.encode("hi") == codec.encode_plain("hi")
    assert codec.encode("") == []


def test_metadata_equals_the_reference_reader(smollm2: Path) -> None:
    reader = gguf.GGUFReader(str(smollm2))
    mine = read_metadata(smollm2)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert mine.keys() == fields.keys()
    small = [key for key, field in fields.items() if len(field.data) < 100]
    assert {key: mine[key] for key in small} == {key: fields[key].contents() for key in small}
    for key in fields.keys() - set(small):
        assert len(mine[key]) == len(fields[key].data)
        assert mine[key][-50:] == fields[key].contents(slice(-50, None))


def test_a_codec_needs_no_torch(smollm2: Path) -> None:
    """engine.text works without torch and transformers, so that it starts fast and runs anywhere."""
    program = (
        "import sys; from pathlib import Path; from engine.text import TextCodec\n"
        f"codec = TextCodec.load(Path({str(smollm2)!r}))\n"
        "codec.encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "sys.exit(' '.join({'torch', 'transformers', 'gguf'} & sys.modules.keys()) or 0)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
