"""Small tokenizers and a chat template, made by hand for the tests."""

from __future__ import annotations

from text_bpe import byte_to_char
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTE_CHARS = pre_tokenizers.ByteLevel.alphabet()


def byte_level_tokenizer(*specials: str | AddedToken, plain: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level tokenizer without merges: one id a byte, then the special and added tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(BYTE_CHARS))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.add_tokens(list(plain))
    return tokenizer


def byte_ids(data: bytes) -> list[int]:
    """The ids of a byte-level tokenizer's single-byte tokens."""
    chars, ordered = byte_to_char(), sorted(BYTE_CHARS)
    return [ordered.index(chars[byte]) for byte in data]


def metaspace_tokenizer(scheme: str) -> Tokenizer:
    """A SentencePiece-style tokenizer with byte fallback and a prepend scheme."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", "</s>", *bytes_, "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁a", "b")]
    vocab = {word: i for i, word in enumerate(words)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    if scheme == "normalizer":
        space = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *strip])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
