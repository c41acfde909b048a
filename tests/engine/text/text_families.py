"""Chat templates in the manner of the families that call tools or reason, and codecs that use them."""

from __future__ import annotations

from text_tokenizers import byte_level_tokenizer

from engine.text import TextCodec
from engine.text.parts import TokenizerParts

HERMES = (
    "{%- if tools %}<|im_start|>system\nUse these: <tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'Answer with <tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>\n'
    "<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}{%- endif %}<|im_end|>{{ '\n' }}{%- endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A hybrid: its prompt ends with an empty block where thinking is switched off.
QWEN3 = (
    HERMES.replace("\n{{ m.content }}", "\n{{ m.content.split('</think>')[-1] }}")
    + "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
# Thinking begins in the prompt.
OPENED = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}"
# The template only cuts reasoning off: each reply is expected to begin with it.
IMPLICIT = HERMES.replace("\n{{ m.content }}", "\n{{ m.content.split('</think>')[-1] }}")
LLAMA3 = (
    "{{ bos_token }}{%- if not date_string is defined %}{% set date_string = '1 Jan 2026' %}{% endif %}"
    "{%- for m in messages %}{%- if m.tool_calls is defined and m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}Today is {{ date_string }}. Tools:\n{{ tools | tojson(indent=4) }}"
    "\n\n{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}CALLS{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% endif %}{% endfor %}"
)
MISTRAL = _MISTRAL.replace(
    "CALLS",
    "[TOOL_CALLS] [{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]',
)
MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}",
)
UNKNOWN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.content is none %}{% for c in m.tool_calls %}<call>{{ c.function.name }}</call>{% endfor %}"
    "{% endif %}\n{% endfor %}"
)

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
MISTRAL_TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def make_codec(template: str, *control: str, plain: tuple[str, ...] = ()) -> TextCodec:
    """A codec of single bytes, BOS, EOS, and further control tokens and plain added tokens."""
    tokenizer = byte_level_tokenizer("<s>", "</s>", *control, plain=plain)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return TextCodec(
        TokenizerParts(
            tokenizer=tokenizer,
            vocab_size=size,
            bos_id=256,
            eos_ids=(257,),
            templates={"default": template},
            template_tokens=named,
        )
    )


def token(codec: TextCodec, text: str) -> int:
    """The id of a control or added token."""
    (found,) = codec.encode(text)
    return found
