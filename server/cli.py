"""The `headwater` command: serve, models, keys, settings.

Exit codes: 0 well, 1 the model or the machine is at fault, 2 a flag or setting is, 130 ended by SIGINT, 143
by SIGTERM; a server that was ready ends well by either.
Whatever needs torch is imported where it is used, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import errno
import getpass
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from engine.config import EngineConfig, Setting, load, settings
from engine.errors import ConfigError, HeadwaterError, ModelError
from server import __version__
from server.config import ServerConfig
from server.settings import STRUCTS, effective, markdown, show, unknown_variables


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); return the exit code."""
    try:
        with _unwound_by_sigterm():
            args, strays = (parser := _parser()).parse_known_args(argv)
            if strays:
                getattr(args, "parser", parser).error("unrecognized arguments: " + " ".join(strays))
            command: Callable[[argparse.Namespace], int] = args.run
            return command(args)
    except ConfigError as error:
        return _fail(str(error), 2)
    except HeadwaterError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        # The reader went away (`headwater settings | head`): keep the exit from raising once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let a SIGTERM end the process the way ctrl-C does, so that nothing half-written stays behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "headwater", description="LLM serving with a token-exact prefix cache.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"headwater {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve",
        help="start the HTTP server",
        usage="headwater serve [--FLAG VALUE ...]",
        description="Start the HTTP server. Each flag is also an environment variable; the flag wins.",
        allow_abbrev=False,
    )
    for title, struct in STRUCTS:
        group = serve.add_argument_group(f"{title.lower()} settings")
        for setting in settings(struct):
            _add_setting(group, setting)
    serve.set_defaults(run=_serve, parser=serve)

    _add_models(commands.add_parser("models", help="fetch, list or locate models", allow_abbrev=False))

    _add_keys(commands.add_parser("keys", help="make API keys, or hash your own", allow_abbrev=False))

    shown = commands.add_parser("settings", help="print the settings in force", allow_abbrev=False)
    shown.add_argument("--markdown", action="store_true", help="print docs/settings.md instead")
    shown.set_defaults(run=_settings)

    fields = commands.add_parser("fields", help="print the fields of requests", allow_abbrev=False)
    fields.add_argument("--markdown", action="store_true", help="print docs/http.md instead")
    fields.set_defaults(run=_fields)
    return parser


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> None:
    default = show(setting.default) or "empty"
    text = f"{setting.help} [{setting.allowed}; default {default}; {setting.env}]".replace("%", "%%")
    # A bare flag turns a switch on. Texts stay texts: load() judges flags and variables alike.
    switch = {"nargs": "?", "const": "true"} if setting.kind == "bool" else {}
    group.add_argument(
        setting.flag,
        dest=setting.field,
        default=argparse.SUPPRESS,
        metavar=setting.kind.upper(),
        help=text,
        **switch,  # type: ignore[arg-type]
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    default = "default: HEADWATER_MODEL, else the default model"
    fetch = actions.add_parser("fetch", help="download a model unless it is here", allow_abbrev=False)
    fetch.add_argument("model", nargs="?", help=default)
    fetch.set_defaults(run=_models_fetch)
    listing = actions.add_parser("list", help="list the models Headwater knows by name", allow_abbrev=False)
    listing.set_defaults(run=_models_list)
    path = actions.add_parser("path", help="print where a model lies on disk", allow_abbrev=False)
    path.add_argument("model", nargs="?", help=default)
    path.set_defaults(run=_models_path)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    account = "whose key it is"
    new = actions.add_parser(
        "new", help="print a new key, and its line for the keys file", allow_abbrev=False
    )
    new.add_argument("account", metavar="ACCOUNT", help=account)
    new.set_defaults(run=_keys_new)
    hashing = actions.add_parser(
        "hash", help="read a key from stdin, print its line for the keys file", allow_abbrev=False
    )
    hashing.add_argument("account", metavar="ACCOUNT", help=account)
    hashing.set_defaults(run=_keys_hash)


def _settings(args: argparse.Namespace) -> int:
    if args.markdown:
        sys.stdout.write(markdown())
        return 0
    _configs({})
    print("\n".join(effective(os.environ)))
    return 0


def _fields(args: argparse.Namespace) -> int:
    from server.schema.doc_fields import lines, markdown

    sys.stdout.write(markdown() if args.markdown else "\n".join(lines()) + "\n")
    return 0


def _serve(args: argparse.Namespace) -> int:
    given = {field: text for field, text in vars(args).items() if field not in ("run", "parser")}
    engine_config, server_config = _configs(given)
    _warn_of_strays()
    try:
        _make_present(engine_config.model, server_config)
        return _run(engine_config, server_config)
    except socket.gaierror as error:
        return _fail(f"host {server_config.host!r} can't be resolved: {error.strerror}", 1)
    except OSError as error:
        return _fail(_socket_trouble(error, server_config), 1)


def _configs(given: Mapping[str, str]) -> tuple[EngineConfig, ServerConfig]:
    """Read the settings. ConfigError for all that would stop the start and shows without a model."""
    engine_config, server_config = load(EngineConfig, overrides=given), load(ServerConfig, overrides=given)
    from engine import Engine
    from server.cors import Cors
    from server.tenancy.access import open_keys

    Engine.judge(engine_config)
    open_keys(server_config)
    Cors(server_config.cors_origins)
    return engine_config, server_config


def _run(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    import uvloop

    from server.lifecycle import serve

    try:
        code = uvloop.run(serve(engine_config, server_config))
    except KeyboardInterrupt:
        code = 130
    if code > 128:
        # A load that was cut off goes on in its thread, and an ordinary exit would wait for that.
        os._exit(code)
    return code


def _socket_trouble(error: OSError, config: ServerConfig) -> str:
    """Say in one line why the server can't listen; re-raise what has another cause."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {config.port} on {config.host} is taken: stop what listens there, or give another --port"
        )
    if error.errno == errno.EACCES and error.filename is None:
        return f"port {config.port} needs rights that this user lacks: give a --port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{config.host} is no address of this machine: give another --host"
    raise error


def _warn_of_strays() -> None:
    strays = unknown_variables(os.environ)
    if strays:
        told = ", ".join(name + (f" (did you mean {near}?)" if near else "") for name, near in strays)
        _tell(f"warning: nothing reads {told}")


def _models_fetch(args: argparse.Namespace) -> int:
    from engine.models.store import fetch

    print(fetch(_model(args), progress=_tell).path)
    return 0


def _models_list(args: argparse.Namespace) -> int:
    from engine.models.store import list_models

    for model in list_models():
        where = str(model.path or "not fetched")
        print(f"{model.name}  {model.size / 1e6:.0f} MB  {model.licence}  {where}")
    return 0


def _models_path(args: argparse.Namespace) -> int:
    from engine.models.store import resolve

    print(resolve(_model(args)).path)
    return 0


def _keys_new(args: argparse.Namespace) -> int:
    from server.tenancy.keys import entry_line, new_key

    key = new_key()
    line = entry_line(key, args.account)
    _tell("the key, for the client; it can't be shown again:")
    print(key, flush=True)
    _tell("the line to add to the keys file (HEADWATER_API_KEYS_FILE), then send SIGHUP:")
    print(line)
    return 0


def _keys_hash(args: argparse.Namespace) -> int:
    from server.tenancy.keys import entry_line

    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    print(entry_line(key.strip(), args.account))
    return 0


def _model(args: argparse.Namespace) -> str:
    return args.model or load(EngineConfig).model


def _make_present(model: str, config: ServerConfig) -> None:
    """Fetch a model that isn't here. What is here is used without a look at the network.

    Raises OSError before anything is downloaded where the server could not listen afterwards.
    """
    from engine.models.store import fetch, resolve

    try:
        resolve(model)
    except ModelError:
        from server.lifecycle import bind

        for sock in bind(config.host, config.port):
            sock.close()
        fetch(model, progress=_tell)


def _tell(line: str) -> None:
    print(f"headwater: {line}", file=sys.stderr, flush=True)


def _fail(message: str, code: int) -> int:
    _tell(" ".join(message.split()))
    return code
