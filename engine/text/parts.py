"""What a loader hands to the codec, whatever the files looked like."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer and everything its files say about using it.

    `prefix` and `suffix` are the ids that the tokenizer's rule puts around raw text (BOS, rarely EOS).
    `templates` maps a name to Jinja source; "default" serves all but where "tool_use" exists.
    `template_tokens` are the named tokens a template may write, such as bos_token.
    """

    tokenizer: Tokenizer
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    templates: dict[str, str] = field(default_factory=dict)
    template_tokens: dict[str, str] = field(default_factory=dict)
    generation_defaults: dict[str, float] = field(default_factory=dict)
