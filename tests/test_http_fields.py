"""docs/http.md lists every field of the three dialects, and says of each what the code does."""

from __future__ import annotations

import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import RequestError
from server.cli import main
from server.schema import anthropic, messages, requests, responses_api, responses_items, strict
from server.schema.doc_dialects import BODIES, UNSAID, Body
from server.schema.doc_fields import (
    IGNORED,
    REFUSED,
    WORKS,
    Field,
    fields_of,
    fields_of_part,
    inner_structs,
    markdown,
)

ROOT = Path(__file__).resolve().parents[1]
PATHS = {body.path: body for body in BODIES}
# What the packages' types of a path's body are called.
PACKAGES = [
    ("/v1/completions", "openai.types.completion_create_params.CompletionCreateParams"),
    ("/v1/completions", "fireworks.types.completion_create_params.CompletionCreateParams"),
    ("/v1/chat/completions", "openai.types.chat.completion_create_params.CompletionCreateParams"),
    ("/v1/chat/completions", "fireworks.types.chat.completion_create_params.CompletionCreateParams"),
    ("/v1/responses", "openai.types.responses.response_create_params.ResponseCreateParams"),
    ("/v1/messages", "anthropic.types.message_create_params.MessageCreateParams"),
    ("/v1/messages", "anthropic.types.beta.message_create_params.MessageCreateParams"),
    ("/v1/messages", "fireworks.types.message_create_params.MessageCreateParams"),
    (
        "/v1/messages/count_tokens",
        "anthropic.types.message_count_tokens_params.MessageCountTokensParams",
    ),
]
# Parameters of the clients' methods that they send as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
# Parts of bodies: where they stand, of which path, and the packages' types of them.
PARTS = [
    ("messages[]", "/v1/chat/completions", "openai.types.chat.ChatCompletionMessageParam"),
    ("messages[]", "/v1/chat/completions", "fireworks.types.shared_params.chat_message.ChatMessage"),
    ("messages[].content[]", "/v1/chat/completions", "openai.types.chat.ChatCompletionContentPartTextParam"),
    (
        "messages[].tool_calls[]",
        "/v1/chat/completions",
        "openai.types.chat.ChatCompletionMessageFunctionToolCallParam",
    ),
    ("tools[]", "/v1/chat/completions", "openai.types.chat.ChatCompletionFunctionToolParam"),
    ("tools[].function", "/v1/chat/completions", "openai.types.shared_params.FunctionDefinition"),
    ("stream_options", "/v1/chat/completions", "openai.types.chat.ChatCompletionStreamOptionsParam"),
    ("response_format", "/v1/chat/completions", "openai.types.shared_params.ResponseFormatJSONSchema"),
    (
        "response_format.json_schema",
        "/v1/chat/completions",
        "openai.types.shared_params.response_format_json_schema.JSONSchema",
    ),
    ("stream_options", "/v1/responses", "openai.types.responses.response_create_params.StreamOptions"),
    ("text", "/v1/responses", "openai.types.responses.ResponseTextConfigParam"),
    (
        "text.format",
        "/v1/responses",
        "openai.types.responses.ResponseFormatTextJSONSchemaConfigParam",
    ),
    ("reasoning", "/v1/responses", "openai.types.shared_params.Reasoning"),
    ("tools[]", "/v1/responses", "openai.types.responses.FunctionToolParam"),
    ("input[] of type message", "/v1/responses", "openai.types.responses.EasyInputMessageParam"),
    ("input[] of type message", "/v1/responses", "openai.types.responses.ResponseOutputMessageParam"),
    (
        "input[] of type function_call",
        "/v1/responses",
        "openai.types.responses.ResponseFunctionToolCallParam",
    ),
    (
        "input[] of type function_call_output",
        "/v1/responses",
        "openai.types.responses.response_input_param.FunctionCallOutput",
    ),
    ("input[] of type reasoning", "/v1/responses", "openai.types.responses.ResponseReasoningItemParam"),
    (
        "input[].content[] of type input_text",
        "/v1/responses",
        "openai.types.responses.ResponseInputTextParam",
    ),
    (
        "input[].content[] of type output_text",
        "/v1/responses",
        "openai.types.responses.ResponseOutputTextParam",
    ),
    ("messages[]", "/v1/messages", "anthropic.types.MessageParam"),
    ("messages[].content[] of type text", "/v1/messages", "anthropic.types.TextBlockParam"),
    ("messages[].content[] of type tool_use", "/v1/messages", "anthropic.types.ToolUseBlockParam"),
    ("messages[].content[] of type tool_result", "/v1/messages", "anthropic.types.ToolResultBlockParam"),
    ("messages[].content[] of type thinking", "/v1/messages", "anthropic.types.ThinkingBlockParam"),
    (
        "messages[].content[] of type redacted_thinking",
        "/v1/messages",
        "anthropic.types.RedactedThinkingBlockParam",
    ),
    ("tools[]", "/v1/messages", "anthropic.types.ToolParam"),
    ("tool_choice of type tool", "/v1/messages", "anthropic.types.ToolChoiceToolParam"),
    ("thinking of type enabled", "/v1/messages", "anthropic.types.ThinkingConfigEnabledParam"),
    ("output_config", "/v1/messages", "anthropic.types.OutputConfigParam"),
    ("metadata", "/v1/messages", "anthropic.types.MetadataParam"),
    ("cache_control", "/v1/messages", "anthropic.types.CacheControlEphemeralParam"),
]


def keys(name: str) -> set[str]:
    """Names of a TypedDict's fields on the wire, or of all dicts of a union."""
    module, _, found = name.rpartition(".")
    return _keys(getattr(import_module(module), found))


def _keys(found: Any) -> set[str]:
    if typing.get_origin(found) is typing.Union:
        return set().union(*map(_keys, typing.get_args(found)))
    hints = typing.get_type_hints(found, include_extras=True)
    return {_wire_name(name, hint) for name, hint in hints.items()}


def _wire_name(name: str, hint: Any) -> str:
    # The packages' own annotations rename what is no name in Python, such as "async".
    for part in _metadata(hint):
        if alias := getattr(part, "alias", None):
            return str(alias)
    return name


def _metadata(hint: Any) -> list[Any]:
    found = list(getattr(hint, "__metadata__", ()))
    for part in typing.get_args(hint):
        found += _metadata(part)
    return found


def test_the_table_is_the_codes() -> None:
    assert (ROOT / "docs/http.md").read_text() == markdown(), (
        "run: headwater fields --markdown > docs/http.md"
    )


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fields", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown()
    assert main(["fields"]) == 0
    assert "/v1/chat/completions  temperature  works\n" in capsys.readouterr().out


@pytest.mark.parametrize(("path", "name"), PACKAGES, ids=lambda x: x.rsplit(".", 3)[0])
def test_every_field_that_a_package_can_send_is_listed(path: str, name: str) -> None:
    sent = keys(name) - HEADERS
    assert len(sent) > 8
    assert sent - {field.name for field in fields_of(PATHS[path])} == set()


@pytest.mark.parametrize(("place", "path", "name"), PARTS, ids=lambda x: x.rsplit(".", 1)[-1])
def test_every_field_of_what_bodies_hold_is_listed(place: str, path: str, name: str) -> None:
    (struct,) = (s for s, places in inner_structs().items() if path in places.get(place, ()))
    listed = {field.name for field in fields_of_part(struct)}
    assert keys(name) - listed == set()


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.path)
def test_each_field_stands_once_with_one_of_three_words(body: Body) -> None:
    fields = fields_of(body)
    names = [field.name for field in fields]
    assert len(set(names)) == len(names)
    assert {field.status for field in fields} <= {WORKS, IGNORED, REFUSED}
    assert [field.name for field in fields if UNSAID in field.note] == []


READERS = {
    "/v1/chat/completions": (requests.read_chat, {"model": "m", "messages": []}),
    "/v1/completions": (requests.read_completion, {"model": "m", "prompt": "a"}),
    "/v1/responses": (
        lambda body: responses_api.read_request(strict.loads(body)),
        {"model": "m", "input": "a"},
    ),
    "/v1/messages": (
        anthropic.read_messages,
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    ),
    "/v1/messages/count_tokens": (
        anthropic.read_count_tokens,
        {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    ),
}


def refused(path: str, field: Field, value: Any) -> bool:
    """Whether a path's body with this field is refused because of it."""
    read, body = READERS[path]
    try:
        read(msgspec.json.encode({**body, field.name: value}))
    except RequestError as error:
        return (error.param or "").split(".")[0] == field.name
    return False


@pytest.mark.parametrize("path", READERS)
def test_what_the_table_says_is_what_the_code_does(path: str) -> None:
    """Refused fields are refused with a value that asks for something, taken with null; others are known."""
    for field in fields_of(PATHS[path]):
        if field.status == REFUSED:
            if field.name not in PATHS[path].refused:
                assert any(refused(path, field, value) for value in ({"x": 1}, "x", True, [1], 7)), field
            assert not refused(path, field, None), field
        elif field.name not in READERS[path][1]:
            assert not refused(path, field, None), field


def test_a_field_that_no_table_lists_is_refused() -> None:
    for read, body in READERS.values():
        with pytest.raises(RequestError, match="Extra inputs are not permitted, field: 'nonesuch'"):
            read(msgspec.json.encode({**body, "nonesuch": 1}))


def test_parts_that_are_read_by_hand_are_read_as_their_tables_say() -> None:
    with pytest.raises(RequestError) as refusal:
        messages.read_messages([{"role": "user", "content": "a", "audio": {"id": "x"}}])
    assert refusal.value.param == "messages.0.audio"
    item = {"type": "message", "role": "user", "content": "a", "phase": "commentary", "status": "completed"}
    assert responses_items.read_turns([item], None) == [{"role": "user", "content": "a"}]
