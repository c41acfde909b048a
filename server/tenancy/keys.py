"""API keys: a file of hashes, each with its account, that is read again on demand.

A line is `sha256:<64 hex digits> <account>`; `#` begins a comment; an account may have several keys. Keys
are long and random, so a plain SHA-256 keeps them: there is nothing to guess. No message ever shows a
line of the file, which may hold a key put there by mistake.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError

log = logging.getLogger("headwater.server")

SETTING = "HEADWATER_API_KEYS_FILE"
PREFIX = "hw_"
# A presented key is compared with every entry, on the event loop: this many take a few milliseconds.
MAX_KEYS = 10_000
MAX_FILE_BYTES = 4_000_000
# What people make up is shorter, and can be guessed from its hash.
MIN_KEY_CHARS = 20
MAX_KEY_CHARS = 1000

_SCHEME = "sha256:"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}")


class Entry(NamedTuple):
    """One key that is let in: its SHA-256 and whose it is."""

    digest: bytes
    account: str


def new_key() -> str:
    """Draw a key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def entry_line(key: str, account: str) -> str:
    """Write the line of the keys file that lets `key` in for `account`.

    Raises ConfigError for a key that is too weak or can't be sent in a header, and for a bad account.
    """
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError("a key may have only printable ASCII characters and no blanks")
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        raise ConfigError(
            f"a key must have {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters; this one has {len(key)}: its "
            "hash protects only what is long and random (make one with: headwater keys new ACCOUNT)"
        )
    if not _ACCOUNT.fullmatch(account):
        raise ConfigError(f"account {account!r} is not allowed: {_ACCOUNT_RULE}")
    return f"{_SCHEME}{_digest(key).hex()} {account}"


_ACCOUNT_RULE = "give 1 to 128 letters, digits or . _ : @ / + - and begin with a letter or digit"


class Keys:
    """The keys that are let in. Owned by the application; `reload` swaps them all at once."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises ConfigError with one line that names file, line and reason."""
        self._path = Path(path).expanduser()
        self._entries, self._mode = _read(self._path)

    def account(self, key: str) -> str | None:
        """Return whose key this is, or None. Takes equally long for every key of a length."""
        digest = _digest(key)
        found = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.account
        return found

    def reload(self) -> None:
        """Read the file again; a broken one changes nothing but the log."""
        try:
            self._entries, self._mode = _read(self._path)
        except ConfigError as error:
            log.error("the API keys from before stay in force: %s", error)
        else:
            self.announce()

    def announce(self) -> None:
        """Log what is in force, and warn of what looks like a mistake."""
        accounts = len({entry.account for entry in self._entries})
        log.info("API keys: %d of %d accounts, from %s", len(self._entries), accounts, self._path)
        if not self._entries:
            log.warning("%s holds no API key: every request is refused", self._path)
        if self._mode & 0o077:
            log.warning("%s is open to others than its owner (mode %04o): chmod 600", self._path, self._mode)


def _read(path: Path) -> tuple[tuple[Entry, ...], int]:
    # Entries, and the file's permissions.
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{SETTING}: {str(path)!r} is not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{SETTING}: {str(path)!r} is larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{SETTING}: {str(path)!r} is not UTF-8") from None
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "not a path"
        raise ConfigError(f"{SETTING}: {str(path)!r} can't be read: {reason}") from None
    return _parse(text, path), stat.S_IMODE(status.st_mode)


def _parse(text: str, path: Path) -> tuple[Entry, ...]:
    lines: dict[bytes, int] = {}
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", maxsplit=1)[0].split()
        if not words:
            continue
        where = f"{SETTING}: {path}, line {number}"
        entry = _entry(words, where)
        if (other := lines.setdefault(entry.digest, number)) != number:
            raise ConfigError(f"{where}: the key of line {other} again")
        entries.append(entry)
        if len(entries) > MAX_KEYS:
            raise ConfigError(f"{where}: more than {MAX_KEYS} keys")
    return tuple(entries)


def _entry(words: list[str], where: str) -> Entry:
    if not words[0].startswith(_SCHEME):
        raise ConfigError(f"{where}: it must begin with {_SCHEME} and hold a key's hash, never the key")
    digest = words[0].removeprefix(_SCHEME)
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: after {_SCHEME} there must be 64 hexadecimal digits")
    if len(words) != 2:
        raise ConfigError(f"{where}: after the hash there must be one account")
    if not _ACCOUNT.fullmatch(words[1]):
        raise ConfigError(f"{where}: bad account: {_ACCOUNT_RULE}")
    return Entry(bytes.fromhex(digest), words[1])


def _digest(key: str) -> bytes:
    # What isn't ASCII is no key, but gets the same work: header bytes that are not UTF-8 come as surrogates.
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
