"""Keys files by the letter, and whose cached pages a request may share."""

from __future__ import annotations

import hashlib
import hmac
import logging

import pytest

from engine import ConfigError, Namespace
from server.config import ServerConfig
from server.tenancy import keys as key_module
from server.tenancy import namespace_for
from server.tenancy.access import open_keys
from server.tenancy.keys import Keys, entry_line, new_key

KEY, OTHER = new_key(), new_key()
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def keys_of(path, *lines):
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return Keys(str(path))


def test_a_file_holds_comments_several_keys_an_account_and_either_case_of_digits(tmp_path):
    second = new_key()
    keys = keys_of(
        tmp_path / "keys",
        "# our customers",
        "",
        f"  sha256:{DIGEST.upper()}   acme  # since May",
        entry_line(second, "acme"),
        entry_line(OTHER, "team/b-2@example.org"),
    )
    assert keys.account(KEY) == keys.account(second) == "acme"
    assert keys.account(OTHER) == "team/b-2@example.org"
    for unknown in ("", KEY[:-1], KEY + "x", KEY.upper(), DIGEST, f"sha256:{DIGEST}", "schlüssel", "\udcff"):
        assert keys.account(unknown) is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (KEY, "must begin with sha256: and hold a key's hash, never the key"),
        (f"{DIGEST} acme", "must begin with sha256:"),
        (f"sha256:{DIGEST[:-1]} acme", "64 hexadecimal digits"),
        (f"sha256:{DIGEST[:-1]}g acme", "64 hexadecimal digits"),
        (f"sha256:{DIGEST}", "one account"),
        (f"sha256:{DIGEST} # acme", "one account"),
        (f"sha256:{DIGEST} acme {KEY}", "one account"),
        (f"sha256:{DIGEST} {KEY}-é", "bad account"),
        (f"sha256:{DIGEST} {'x' * 129}", "bad account"),
        (f"sha256:{DIGEST} other", "the key of line 2 again"),
    ],
)
def test_a_bad_line_is_told_by_number_and_reason_and_never_shown(tmp_path, line, reason):
    with pytest.raises(ConfigError) as caught:
        keys_of(tmp_path / "keys", "# keys", f"sha256:{DIGEST} acme", line)
    told = str(caught.value)
    assert told.startswith(f"HEADWATER_API_KEYS_FILE: {tmp_path / 'keys'}, line 3: ")
    assert reason in told
    for secret in (KEY, DIGEST, "xxxx"):
        assert secret not in told


def test_a_file_that_cannot_be_read_is_told_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "latin").write_bytes(b"# caf\xe9\n")
    (tmp_path / "long").write_bytes(b"#" * 4_000_001)
    for name, reason in [
        ("none", "No such file"),
        ("", "not a regular file"),
        ("latin", "not UTF-8"),
        ("long", "larger than 4000000 bytes"),
        ("a\0b", "not a path"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            Keys(f"{tmp_path}/{name}")
    monkeypatch.setattr(key_module, "MAX_KEYS", 2)
    with pytest.raises(ConfigError, match="line 3: more than 2 keys"):
        keys_of(tmp_path / "many", *(entry_line(new_key(), "acme") for _ in range(3)))


def test_a_key_is_compared_with_every_entry_wherever_its_own_stands(tmp_path, monkeypatch):
    """O086: in constant time each, and no match ends the comparing early."""
    stored = [new_key() for _ in range(5)]
    keys = keys_of(tmp_path / "keys", *(entry_line(key, f"account-{i}") for i, key in enumerate(stored)))
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return compare_digest(a, b)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key, account in [(stored[0], "account-0"), (stored[4], "account-4"), (KEY, None), ("", None)]:
        compared.clear()
        assert keys.account(key) == account
        assert [a for a, _ in compared] == [hashlib.sha256(k.encode()).digest() for k in stored]


def test_what_looks_like_a_mistake_is_warned_of(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    keys_of(tmp_path / "keys", entry_line(KEY, "acme")).announce()
    assert caplog.messages == [f"API keys: 1 of 1 accounts, from {tmp_path / 'keys'}"]
    caplog.clear()
    empty = keys_of(tmp_path / "keys", "# none yet")
    (tmp_path / "keys").chmod(0o640)
    empty.reload()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2
    assert "every request is refused" in warned[0]
    assert "mode 0640" in warned[1]
    assert empty.account(KEY) is None


def test_reloading_swaps_all_keys_or_none(tmp_path, caplog):
    path = tmp_path / "keys"
    keys = keys_of(path, entry_line(KEY, "acme"))
    keys_of(path, entry_line(OTHER, "acme"), "# and more")
    keys.reload()
    assert (keys.account(KEY), keys.account(OTHER)) == (None, "acme")
    path.write_text(entry_line(KEY, "acme") + "\nbroken")
    keys.reload()
    path.unlink()
    keys.reload()
    assert (keys.account(KEY), keys.account(OTHER)) == (None, "acme")
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "line 2" in caplog.messages[0]
    assert "No such file" in caplog.messages[1]


@pytest.mark.parametrize("key", ["short", "x" * 19, "x" * 1001, "with blank " + KEY, KEY + "\n", "ключ" * 9])
def test_no_line_is_made_for_a_key_that_is_weak_or_cannot_be_sent(key):
    with pytest.raises(ConfigError, match="a key m") as caught:
        entry_line(key, "acme")
    assert key.strip() not in str(caught.value)


def test_new_keys_are_long_and_never_the_same():
    drawn = {new_key() for _ in range(100)}
    assert len(drawn) == 100
    assert all(key.startswith("hw_") and len(key) == 46 for key in drawn)


def test_serverless_needs_keys_and_dedicated_does_not(tmp_path):
    assert open_keys(ServerConfig()) is None
    with pytest.raises(ConfigError, match="HEADWATER_API_KEYS_FILE"):
        open_keys(ServerConfig(mode="serverless"))
    keys_of(tmp_path / "keys", entry_line(KEY, "acme"))
    for mode in ("dedicated", "serverless"):
        keys = open_keys(ServerConfig(mode=mode, api_keys_file=str(tmp_path / "keys")))
        assert keys.account(KEY) == "acme"


@pytest.mark.parametrize(
    ("mode", "account", "key", "namespace"),
    [
        ("dedicated", None, None, Namespace()),
        ("dedicated", "acme", None, Namespace()),
        ("dedicated", None, "k", Namespace(isolation_key="k")),
        ("dedicated", "acme", "k", Namespace(account="acme", isolation_key="k")),
        ("dedicated", "acme", "", Namespace(account="acme", isolation_key="")),
        ("serverless", "acme", None, Namespace(account="acme")),
        ("serverless", "acme", "", Namespace(account="acme", isolation_key="")),
        ("serverless", "acme", "k", Namespace(account="acme", isolation_key="k")),
    ],
)
def test_the_account_stands_in_front_of_what_a_client_names(mode, account, key, namespace):
    assert namespace_for(mode, account, key) == namespace


def test_no_client_reaches_another_accounts_pages_by_what_it_sends():
    """O011: whatever isolation key either sends, two accounts meet only in the one cache that all share."""
    values = [None, "", "k", "a", "b"]
    for mode in ("dedicated", "serverless"):
        mine = {namespace_for(mode, "a", key) for key in values}
        theirs = {namespace_for(mode, "b", key) for key in values}
        assert mine & theirs == ({Namespace()} if mode == "dedicated" else set())
    with pytest.raises(ValueError, match="no account"):
        namespace_for("serverless", None, "k")
