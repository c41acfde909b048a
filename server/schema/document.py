"""The OpenAPI 3.1 document of a server: from the wire's structs, its routes and the served model's limits.

Schemas come from msgspec; `doc_rules` adds what types can't say. Building takes tens of milliseconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from server import __version__
from server.errors import AnthropicErrorBody, ErrorBody
from server.schema.doc_routes import Route, routes
from server.schema.doc_rules import body_structs, refine
from server.schema.doc_shapes import Limits
from server.schema.responses import ContentLogprobs, LegacyLogprobs

Json = dict[str, Any]
TEMPLATE = "#/components/schemas/{name}"
_MODULES = "server.schema."

_ABOUT = """\
LLM serving with a token-exact prefix cache. Clients of OpenAI, Fireworks and Anthropic need only another \
base URL. Everything under `/v1` is also served under `/inference/v1`.

Fields that no table here knows are refused with 400. A field that is null counts as absent."""

# Schemas that others name without holding them.
_NAMED = (ContentLogprobs, LegacyLogprobs)

_ERRORS = {
    400: "A field is missing, wrong or asks for what this server does not do; the message names it.",
    401: "The API key is missing or unknown.",
    404: "No such path, or the model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is larger than is taken.",
    415: "The body is not JSON, or is compressed.",
    500: "The step that ran this request failed.",
    503: "Overloaded, loading or shutting down; Retry-After tells how long to wait.",
}

_TAGS = {
    "Generate": "Text from the model.",
    "Tokens": "Between text and token ids.",
    "Models": "What is served.",
    "Operations": "For those who run the server.",
    "Not here": "What clients may ask for and this server does not have.",
}


def build(limits: Limits) -> Json:
    """Build the document for what is served now."""
    found = routes()
    wire = [
        t for r in found for t in (r.request, r.reply, r.event) if t is not None and not isinstance(t, str)
    ]
    types = list(dict.fromkeys([*body_structs(), *wire, *_NAMED, ErrorBody, AnthropicErrorBody]))
    refs, schemas = msgspec.json.schema_components(types, ref_template=TEMPLATE)
    of = dict(zip(types, refs, strict=True))
    refine(schemas, {struct: of[struct]["$ref"].rsplit("/", 1)[1] for struct in body_structs()}, limits)
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headwater",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"key": []}, *([] if limits.keys else [{}])],
        "tags": [{"name": name, "description": about} for name, about in _TAGS.items()],
        "paths": _paths(found, of, limits),
        "components": {
            "schemas": schemas,
            "responses": {
                **_error_responses("error", of[ErrorBody]),
                **_error_responses("anthropic_error", of[AnthropicErrorBody]),
            },
            "headers": _headers(),
            "parameters": _parameters(limits),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
                "key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "An API key, as Anthropic's clients send it.",
                },
            },
        },
    }
    shortened: Json = _shorten(document)
    return shortened


def _shorten(found: Any) -> Any:
    # Where two structs have one name, msgspec gives the schemas' names their modules in full.
    if isinstance(found, dict):
        return {key.replace(_MODULES, ""): _shorten(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_shorten(item) for item in found]
    return found.replace(_MODULES, "") if isinstance(found, str) else found


def _paths(found: tuple[Route, ...], of: dict[Any, Json], limits: Limits) -> Json:
    paths: Json = {}
    for route in found:
        for index, path in enumerate(route.paths):
            operation = _operation(route, of, limits)
            if index:
                operation["operationId"] += "Twin" + (str(index) if index > 1 else "")
                operation["x-twin-of"] = route.paths[0]
            paths.setdefault(path, {})[route.method] = operation
    return paths


def _operation(route: Route, of: dict[Any, Json], limits: Limits) -> Json:
    operation: Json = {
        "operationId": route.name,
        "tags": [route.tag],
        "summary": route.summary,
        "description": route.about,
        "parameters": [{"$ref": "#/components/parameters/request_id"}],
        "responses": {} if route.reply is None else {"200": _success(route, of)},
    }
    if route.open:
        operation["security"] = []
    for name in ("model", "id"):
        if f"{{{name}}}" in route.paths[0]:
            operation["parameters"].insert(0, {"$ref": f"#/components/parameters/{name}"})
    if route.tells_cache:
        operation["parameters"] += [
            {"$ref": f"#/components/parameters/{name}"} for name in ("isolation_key", "session", "affinity")
        ]
    if route.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {
                    "schema": of[route.request],
                    "examples": {
                        _key(title): {"summary": title, "value": {"model": limits.models[0], **example}}
                        for title, example in route.examples
                    },
                }
            },
        }
    kind = "anthropic_error" if route.anthropic else "error"
    for status in _statuses(route):
        operation["responses"][str(status)] = {"$ref": f"#/components/responses/{kind}_{status}"}
    return operation


def _statuses(route: Route) -> tuple[int, ...]:
    if route.open:
        return (503,) if route.name != "metrics" else ()
    if route.reply is None:
        return (401, 404)
    if route.request is None:
        return (401, 404, 503) if "{model}" in route.paths[0] else (401, 503)
    return tuple(_ERRORS)


def _success(route: Route, of: dict[Any, Json]) -> Json:
    content: Json = {}
    if isinstance(route.reply, str):
        schema = {"type": "object"} if route.reply == "application/json" else {"type": "string"}
        content[route.reply] = {"schema": schema}
    elif route.reply is not None:
        content["application/json"] = {"schema": of[route.reply]}
    if route.event is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "With `stream: true`. " + _stream_words(route),
                "contentMediaType": "application/json",
                "contentSchema": of[route.event],
            }
        }
    headers = {"x-request-id": {"$ref": "#/components/headers/request_id"}}
    if route.tells_cache:
        headers |= {name: {"$ref": f"#/components/headers/{name}"} for name in _CACHE_HEADERS}
    return {"description": "Done.", "headers": headers, "content": content}


def _stream_words(route: Route) -> str:
    if route.anthropic:
        return "Each event has a name and a `data:` line of JSON with the same `type`."
    return (
        "Each `data:` line holds one JSON object, the last `[DONE]`; lines that begin with a colon are "
        "comments. What fails once the stream has begun comes as an object with `error`."
    )


def _error_responses(kind: str, schema: Json) -> Json:
    found: Json = {}
    for status, about in _ERRORS.items():
        headers: Json = {"x-request-id": {"$ref": "#/components/headers/request_id"}}
        if status == 503:
            headers["Retry-After"] = {"$ref": "#/components/headers/retry_after"}
        content = {"application/json": {"schema": schema}}
        found[f"{kind}_{status}"] = {"description": about, "headers": headers, "content": content}
    return found


_CACHE_HEADERS = {
    "fireworks-prompt-tokens": ("integer", "Tokens of the prompt, cached ones included."),
    "fireworks-cached-prompt-tokens": ("integer", "Those of them whose attention state was in the cache."),
    "fireworks-server-time-to-first-token": ("number", "Seconds from the request to its first token."),
    "fireworks-server-processing-time": ("number", "Seconds from the request to its end; not on streams."),
}


def _headers() -> Json:
    found: Json = {
        "request_id": {"description": "The request's id: the client's own, else a new one.", "schema": _TEXT},
        "retry_after": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}},
    }
    for name, (kind, about) in _CACHE_HEADERS.items():
        words = about + " Also sent as `x-headwater-" + name.removeprefix("fireworks-") + "`."
        found[name] = {"description": words, "schema": {"type": kind, "minimum": 0}}
    return found


_TEXT = {"type": "string"}


def _parameters(limits: Limits) -> Json:
    key = {"type": "string", "maxLength": limits.max_key_chars, "pattern": "^[!-~]*$"}

    def header(name: str, about: str, schema: Json) -> Json:
        return {"name": name, "in": "header", "required": False, "description": about, "schema": schema}

    return {
        "model": {
            "name": "model",
            "in": "path",
            "required": True,
            "description": "One of the served names.",
            "schema": {"type": "string", "enum": list(limits.models)},
        },
        "id": {
            "name": "id",
            "in": "path",
            "required": True,
            "description": "A response's id.",
            "schema": {"type": "string", "pattern": "^resp_[0-9a-f]+$"},
        },
        "request_id": header(
            "x-request-id",
            "An id for logs; echoed.",
            {"type": "string", "pattern": "^[A-Za-z0-9._:/+=-]{1,128}$"},
        ),
        "isolation_key": header(
            "x-prompt-cache-isolation-key",
            "Requests with different keys share no cache. Must not differ from the body's key.",
            key,
        ),
        "session": header(
            "x-multi-turn-session-id", "Keeps a conversation's requests together; a hint.", key
        ),
        "affinity": header("x-session-affinity", "The same, where the other header is absent.", key),
    }


def _key(title: str) -> str:
    return title.lower().replace(" ", "_")
