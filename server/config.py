"""Settings of the HTTP server, in the style of engine/config.py: read by engine.config.load."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the server: the socket, the clients' limits and the shutdown."""

    host: Annotated[str, Meta(description="Address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes any free one and reports it")
    ] = 8000
    served_model_name: Annotated[
        str,
        Meta(description="More names that the model answers to, comma separated"),
    ] = ""
    mode: Annotated[
        Literal["dedicated", "serverless"],
        Meta(description="dedicated: one shared cache; serverless: a cache for each account, needs API keys"),
    ] = "dedicated"
    api_keys_file: Annotated[
        str,
        Meta(description="File of the API keys that are let in, read again on SIGHUP; empty lets all in"),
    ] = ""
    cors_origins: Annotated[
        str,
        Meta(description="Origins whose web pages may use the server, comma separated; * for all"),
    ] = ""
    headers_after: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3600.0,
            description="Seconds after which a stream's headers go out without its time to first token",
        ),
    ] = 10.0
    heartbeat: Annotated[
        float,
        Meta(ge=0.1, le=3600.0, description="Seconds between SSE comments while a stream has no token"),
    ] = 15.0
    write_timeout: Annotated[
        float,
        Meta(ge=0.1, le=3600.0, description="Seconds a client may stop reading before it is dropped"),
    ] = 60.0
    write_buffer_kb: Annotated[
        int,
        Meta(ge=1, le=65536, description="kB held for one client that reads slowly before its stream waits"),
    ] = 64
    body_timeout: Annotated[
        float, Meta(ge=0.1, le=3600.0, description="Seconds a client may take to send a request's body")
    ] = 60.0
    drain_timeout: Annotated[
        float,
        Meta(ge=0.0, le=86400.0, description="Seconds running requests get to end after the first signal"),
    ] = 30.0
    close_timeout: Annotated[
        float,
        Meta(
            ge=0.0, le=3600.0, description="Seconds that requests cut by a shutdown get to send their error"
        ),
    ] = 2.0
    keepalive_timeout: Annotated[
        float, Meta(ge=0.0, le=3600.0, description="Seconds an idle connection is kept open")
    ] = 75.0
    retry_after: Annotated[
        int, Meta(ge=1, le=3600, description="Seconds named in Retry-After with a 503")
    ] = 2
    max_body_mb: Annotated[int, Meta(ge=1, le=4096, description="MB a request's body may have")] = 32
    max_prompts: Annotated[
        int, Meta(ge=1, le=65536, description="Prompts that one completions request may hold")
    ] = 256
    max_choices: Annotated[
        int, Meta(ge=1, le=65536, description="Choices that one request may ask for, over all its prompts")
    ] = 256
    max_logprobs: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000_000,
            description="Log-probabilities that one request may ask for, over all tokens and alternatives",
        ),
    ] = 1_000_000
    max_stop_chars: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Characters that one stop string may have")
    ] = 1024
    max_key_chars: Annotated[
        int, Meta(ge=1, le=65536, description="Characters that an isolation key, cache key or user may have")
    ] = 1024
    default_max_tokens: Annotated[
        int, Meta(ge=1, le=10_000_000, description="Tokens generated where the request names no max_tokens")
    ] = 2048
    text_threads: Annotated[
        int,
        Meta(ge=1, le=256, description="Threads that read long requests; as many more write long replies"),
    ] = 2
    max_compiling: Annotated[
        int,
        Meta(ge=1, le=65536, description="Grammars that may wait to be compiled; more get a 503"),
    ] = 64
    long_body_kb: Annotated[
        int, Meta(ge=0, le=65536, description="kB above which a body is decoded in a worker thread")
    ] = 64
    long_prompt_bytes: Annotated[
        int,
        Meta(
            ge=0, le=10_000_000, description="Bytes of body above which its prompt is tokenized in a worker"
        ),
    ] = 2000
    long_reply_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000_000,
            description="Log-probabilities above which a reply is written in a worker thread",
        ),
    ] = 256
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe log lines shown")
    ] = "info"
