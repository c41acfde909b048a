"""TextCodec: text and chat messages to token ids, and back."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.errors import ModelError, RequestError
from engine.text import call_formats, replies, reply_reasoning, template_options
from engine.text.chat import ChatRenderer
from engine.text.detokenizer import Detokenizer, decode
from engine.text.gguf_tokenizer import load_gguf
from engine.text.grammars import Grammars, TokenTable
from engine.text.guard import Guard, Placeholders
from engine.text.hf_folder import load_folder
from engine.text.parts import TokenizerParts
from engine.text.template import ChatTemplate
from engine.text.vocabulary import Vocabulary

_TURN_TOKENS = 2000  # of a prompt's end, among which the beginning of its last turn is looked for


class TextCodec:
    """One model's tokenizer and chat template. Every method is safe in several threads at once.

    `vocab_size` counts token ids. `bos_id` is None where the model has no BOS. `eos_ids` are all ids
    that end a reply: of every file, and the token that the chat template writes after one.
    `generation_defaults` may hold temperature, top_p, top_k and min_p. `call_format` is how the model writes
    calls of tools, HERMES where its template knows no tools.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._tokenizer = parts.tokenizer
        self._prefix, self._suffix = list(parts.prefix), list(parts.suffix)
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.generation_defaults = dict(parts.generation_defaults)
        added = {t.content: i for i, t in parts.tokenizer.get_added_tokens_decoder().items()}
        template = ChatTemplate(parts.templates, parts.template_tokens) if parts.templates else None
        turn_end = ChatRenderer(template, Guard(())).end_of_turn(added) if template else None
        ends = [*parts.eos_ids, *([] if turn_end in (None, self.bos_id) else [turn_end])]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        self._specials = _specials(parts.tokenizer, self.eos_ids)
        special_ids = frozenset(self._specials.values())
        self._vocabulary = Vocabulary(parts.tokenizer, special_ids, self.eos_ids)
        self._chat = ChatRenderer(template, Guard(self._specials)) if template else None
        self._template = template
        self.call_format = call_formats.detect(template, frozenset(self._specials))
        self._thinking = reply_reasoning.detect(template)
        self._markers = _marker_pattern(parts.tokenizer, self._specials)
        self._plain = copy.deepcopy(parts.tokenizer)
        self._plain.encode_special_tokens = True
        self._plain_inside = _inside(self._plain)
        self._grammars = Grammars(self._token_table)

    @classmethod
    def load(cls, path: Path) -> TextCodec:
        """Read a folder in Hugging Face's layout, or a GGUF file.

        Raises ModelError, or UnsupportedModel for a kind of tokenizer that is not served.
        """
        if not path.exists():
            raise ModelError(f"no tokenizer at {path}: there is no such file or folder")
        return cls(load_folder(path) if path.is_dir() else load_gguf(path))

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def grammars(self) -> Grammars:
        """Compiles what a reply must be: see Grammars.compile."""
        return self._grammars

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a raw prompt: control tokens as spelled, BOS by the tokenizer's rule and never twice.

        Without `add_special` nothing is put around them.
        """
        ids = _encode(self._tokenizer, text)
        if not add_special:
            return ids
        if self._prefix and ids[: len(self._prefix)] == self._prefix:
            return ids + self._suffix
        return self._prefix + ids + self._suffix

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text that holds no control token, whatever it spells; no BOS."""
        return self._encode_plain(self._plain, text)

    def render_chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, to be read by people.

        Its ids are `encode_chat`'s: this text alone doesn't tell markers from users' spellings of them.
        Raises RequestError, or TemplateError from the template.
        """
        text, hidden = self._renderer().render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=extra,
        )
        return hidden.restore(text) if hidden else text

    def encode_chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation. Control tokens come from the template alone; so does BOS.

        `extra` are variables for the template. Raises RequestError, or TemplateError from the template.
        """
        text, hidden = self._renderer().render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=extra,
        )
        return self._encode_guarded(text, hidden) if hidden else _encode(self._tokenizer, text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence of ids."""
        return decode(self._vocabulary, ids, skip_special=skip_special)

    def detokenizer(self, prompt_ids: Sequence[int] = (), shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A new incremental decoder for a reply to `prompt_ids`; control tokens in `shown` give text too."""
        return Detokenizer(self._vocabulary, prompt_ids, shown)

    @property
    def reasons(self) -> bool:
        """Whether the model's template knows thinking."""
        return self._thinking is not None

    def reply_parser(self, *, tools: bool, reasoning: bool = True, opened: str = "") -> replies.ReplyParser:
        """A new parser for a reply: calls where the request has tools, `reasoning` where it is split off.

        `opened` is what the prompt's end has begun already (see `opened_by`). The parser needs the text of a
        detokenizer that shows `reply_markers`.
        """
        thinking = self._thinking if reasoning else None
        return replies.make_parser(self.call_format, thinking, tools=tools, opened=opened)

    def reply_markers(self, *, tools: bool) -> frozenset[int]:
        """Ids of the control tokens that a reply's parser must see as text."""
        spelled = replies.markers(self.call_format, self._thinking, tools=tools)
        return frozenset(self._specials[text] for text in spelled if text in self._specials)

    def opened_by(self, prompt_ids: Sequence[int]) -> str:
        """What a prompt's end has begun of the reply's reasoning: "" or text from its last marker on.

        Only the prompt's last turn counts, of whatever a user may have written before.
        """
        if self._thinking is None:
            return ""
        own = {self._specials.get(text) for text in self._thinking[:2]}
        end = prompt_ids[-_TURN_TOKENS:]
        start = next(
            (at for at in range(len(end), 0, -1) if self.is_control(end[at - 1]) and end[at - 1] not in own),
            0,
        )
        text = self.decode(end[start:], skip_special=False)
        return reply_reasoning.last_marker(self._thinking, text, whole_turn=start > 0)

    def thinking_options(self, effort: str | bool | int) -> dict[str, Any] | None:
        """Template variables that ask for an effort of reasoning, or None where this model can't be asked.

        `effort` is "none", "low", "medium", "high" or the like, whether to think, or a budget in tokens.
        """
        return template_options.thinking_options(self._template, effort)

    def check_template_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's options for the template as `extra` for it. Raises RequestError naming one."""
        return template_options.check_template_options(self._template, options)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a control token's are its spelling."""
        return self._vocabulary.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """A token as text; bytes that are no whole character show as U+FFFD."""
        return self._vocabulary.bytes_of(token_id).decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """Whether the id is a control token, which plain text never gives."""
        return token_id in self._vocabulary.special_ids

    def _token_table(self) -> TokenTable:
        return TokenTable(
            tokens=[self._vocabulary.bytes_of(i) for i in range(self.vocab_size)],
            special_ids=sorted(self._vocabulary.special_ids),
            control_tokens=self._specials,
            eos_ids=self.eos_ids,
            encode=lambda text: self._encode_plain(self._plain_inside, text),
        )

    def _renderer(self) -> ChatRenderer:
        if self._chat is None:
            raise RequestError("this model has no chat template; use completions with a prompt instead")
        return self._chat

    def _encode_guarded(self, text: str, hidden: Placeholders) -> list[int]:
        """Encode as the tokenizer itself would, cut at markers first, but with the hidden texts as text."""
        ids: list[int] = []
        at = 0
        for marker in self._markers.finditer(text) if self._markers else ():
            ids += self._encode_between(hidden.restore(text[at : marker.start()]), at)
            spelling = marker[0] if marker[0] in self._specials else marker[0].strip()
            ids.append(self._specials[spelling])
            at = marker.end()
        return ids + self._encode_between(hidden.restore(text[at:]), at)

    def _encode_between(self, text: str, at: int) -> list[int]:
        return self._encode_plain(self._plain_inside if at else self._plain, text)

    def _encode_plain(self, tokenizer: Tokenizer, text: str) -> list[int]:
        ids = _encode(tokenizer, text)
        if self._vocabulary.special_ids.isdisjoint(ids):
            return ids
        return [part for i in ids for part in (self._spelled(i) if self.is_control(i) else [i])]

    def _spelled(self, token_id: int) -> list[int]:
        """A control token's spelling in single bytes: merges alone gave the token, as few vocabularies do."""
        ids = self._vocabulary.spell(self._vocabulary.bytes_of(token_id))
        if ids is None:
            raise RequestError("the text spells a control token that this model can't write otherwise")
        return ids


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if not text:
        return []
    try:
        # Unlike encode, the batch call runs without the interpreter lock.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError:
        raise RequestError("the text holds half of a surrogate pair, which is no character") from None
    return ids


def _specials(tokenizer: Tokenizer, eos_ids: Iterable[int]) -> dict[str, int]:
    """Spelling and id of every control token; an added token that ends a reply counts as one."""
    ends = set(eos_ids)
    added = tokenizer.get_added_tokens_decoder()
    found = {token.content: i for i, token in added.items() if token.special or i in ends}
    tokenizer.add_special_tokens([added[i] for i in found.values() if not added[i].special])
    return found


def _marker_pattern(tokenizer: Tokenizer, specials: Mapping[str, int]) -> re.Pattern[str] | None:
    """Matches control tokens as the tokenizer does: leftmost, longest, with the white space they eat."""
    flags = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    choices = [
        (r"\s*" if flags[text].lstrip else "") + re.escape(text) + (r"\s*" if flags[text].rstrip else "")
        for text in sorted(specials, key=len, reverse=True)
    ]
    return re.compile("|".join(choices)) if choices else None


def _inside(plain: Tokenizer) -> Tokenizer:
    """The tokenizer for text that does not begin the prompt: no space is put in front of it."""
    state = json.loads(plain.pre_tokenizer.__getstate__()) if plain.pre_tokenizer else {}
    steps = state.get("pretokenizers", [state])
    if not any(step.get("prepend_scheme") == "first" for step in steps):
        return plain
    whole = json.loads(plain.to_str())
    for step in whole["pre_tokenizer"].get("pretokenizers", [whole["pre_tokenizer"]]):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    inside = Tokenizer.from_str(json.dumps(whole))
    inside.encode_special_tokens = True
    return inside
