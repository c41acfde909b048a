"""The page at /docs: the OpenAPI document as one HTML file without scripts or outside resources."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from server.ui.fields import field_rows, resolve

Json = dict[str, Any]
_METHODS = ("get", "post", "delete")


class Page(NamedTuple):
    """An HTML page and the content security policy that lets its own style in, and nothing else."""

    html: bytes
    policy: str


def render(document: Json) -> Page:
    """Render an OpenAPI document. The policy allows no script, no frame and no request."""
    style = files("server.ui").joinpath("style.css").read_text("utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    info = document["info"]
    body = "\n".join(
        [
            f"<header><h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
            *(f"<p>{_prose(part)}</p>" for part in info["description"].split("\n\n")),
            '<p>The same as data: <a href="openapi.json">openapi.json</a></p></header>',
            _contents(document),
            "<main>",
            *(_tag(document, tag) for tag in document["tags"]),
            _schemas(document),
            "</main>",
        ]
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(info['title'])} API</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )
    return Page(html.encode(), policy)


class _Operation(NamedTuple):
    path: str
    method: str
    spec: Json
    twins: tuple[str, ...]


def _operations(document: Json, tag: str) -> Iterator[_Operation]:
    twins: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        for method in _METHODS:
            if "x-twin-of" in item.get(method, {}):
                twins.setdefault(item[method]["x-twin-of"], []).append(path)
    for path, item in document["paths"].items():
        for method in _METHODS:
            spec = item.get(method)
            if spec and tag in spec["tags"] and "x-twin-of" not in spec:
                yield _Operation(path, method, spec, tuple(twins.get(path, ())))


def _contents(document: Json) -> str:
    lines = ['<nav aria-label="Contents"><ul>']
    for tag in document["tags"]:
        lines.append(f"<li>{escape(tag['name'])}<ul>")
        for operation in _operations(document, tag["name"]):
            name = operation.spec["operationId"]
            lines.append(f'<li><a href="#{name}">{escape(operation.path)}</a></li>')
        lines.append("</ul></li>")
    lines.append('<li><a href="#schemas">Schemas</a></li></ul></nav>')
    return "\n".join(lines)


def _tag(document: Json, tag: Json) -> str:
    parts = [f"<section><h2>{escape(tag['name'])}</h2><p>{_prose(tag['description'])}</p>"]
    parts += [_operation(document, operation) for operation in _operations(document, tag["name"])]
    return "\n".join([*parts, "</section>"])


def _operation(document: Json, operation: _Operation) -> str:
    spec, method = operation.spec, operation.method.upper()
    parts = [
        f'<article id="{spec["operationId"]}">',
        f"<h3><b>{method}</b> <code>{escape(operation.path)}</code></h3>",
        f"<p>{_prose(spec['summary'])}. {_prose(spec['description'])}</p>",
    ]
    if operation.twins:
        also = ", ".join(f"<code>{escape(path)}</code>" for path in operation.twins)
        parts.append(f"<p>Also at {also}.</p>")
    parts += _body(document, operation)
    parts += _parameters(document, spec)
    parts += _replies(document, spec)
    return "\n".join([*parts, "</article>"])


def _body(document: Json, operation: _Operation) -> list[str]:
    body = operation.spec.get("requestBody")
    if body is None:
        if operation.method == "get" and "{" not in operation.path:
            return [f"<pre>{escape(_curl(operation.path))}</pre>"]
        return []
    content = body["content"]["application/json"]
    parts = []
    for example in content.get("examples", {}).values():
        parts.append(f"<p>{_prose(example['summary'])}:</p>")
        parts.append(f"<pre>{escape(_curl(operation.path, example['value']))}</pre>")
    rows = field_rows(document, resolve(document, content["schema"]))
    return [*parts, "<h4>Fields</h4>", _table(("Field", "Type", "For"), rows, wide=True)]


def _curl(path: str, body: Any = None) -> str:
    if body is None:
        return f"curl $URL{path}"
    text = json.dumps(body, indent=2, ensure_ascii=False).replace("'", "'\\''")
    flags = " --no-buffer" if body.get("stream") else ""
    return f"curl{flags} $URL{path} -H 'Content-Type: application/json' -d '{text}'"


def _parameters(document: Json, spec: Json) -> list[str]:
    found = [resolve(document, parameter) for parameter in spec.get("parameters", ())]
    rows = [
        (
            f"<code>{escape(p['name'])}</code>" + (" <em>required</em>" if p["required"] else ""),
            escape(p["in"]),
            _prose(p["description"]),
        )
        for p in found
    ]
    return ["<h4>Parameters</h4>", _table(("Name", "In", "For"), rows)] if rows else []


def _replies(document: Json, spec: Json) -> list[str]:
    rows = []
    for status, reply in spec["responses"].items():
        reply = resolve(document, reply)
        kinds = "<br>".join(_kind(kind, content) for kind, content in reply.get("content", {}).items())
        named = ", ".join(f"<code>{escape(name)}</code>" for name in reply.get("headers", {}))
        headers = f"<br>Headers: {named}" if named else ""
        rows.append((f"<b>{status}</b>", kinds, _prose(reply["description"]) + headers))
    return ["<h4>Replies</h4>", _table(("Status", "Body", "When"), rows)]


def _kind(kind: str, content: Json) -> str:
    schema = content["schema"]
    found = schema.get("contentSchema", schema).get("$ref")
    told = _prose(schema["description"]) if "contentSchema" in schema else ""
    link = f' of <a href="#{_anchor(found)}">{escape(_last(found))}</a>' if found else ""
    return f"<code>{escape(kind)}</code>{link}" + (f"<br>{told}" if told else "")


def _schemas(document: Json) -> str:
    parts = ['<section id="schemas"><h2>Schemas</h2>']
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f'<article id="{_anchor(name)}"><h3><code>{escape(name)}</code></h3>')
        if "description" in schema:
            parts.append(f"<p>{_prose(schema['description'])}</p>")
        rows = field_rows(document, schema)
        if rows:
            parts.append(_table(("Field", "Type", "For"), rows, wide=True))
        parts.append("</article>")
    return "\n".join([*parts, "</section>"])


def _table(head: Iterable[str], rows: Iterable[tuple[str, ...]], *, wide: bool = False) -> str:
    lines = ['<div class="wide"><table>' if wide else "<div><table>"]
    lines.append("<tr>" + "".join(f'<th scope="col">{cell}</th>' for cell in head) + "</tr>")
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table></div>"])


def _anchor(ref: str) -> str:
    return "schema-" + _last(ref)


def _last(ref: str) -> str:
    return ref.rsplit("/", 1)[-1]


def _prose(text: str) -> str:
    """Escape a text; what stands in backticks becomes code."""
    parts = text.split("`")
    return "".join(f"<code>{escape(p)}</code>" if i % 2 else escape(p) for i, p in enumerate(parts))
