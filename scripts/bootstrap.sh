#!/usr/bin/env bash
# Makes .venv ready: bootstrap.sh [EXTRA ...], with extras of pyproject.toml. Torch comes first, then Headwater
# itself, editable, all within constraints.txt. Does nothing when that is done already. Talks on stderr only.
#   HEADWATER_TORCH_INDEX   a package index to take torch, and only torch, from (such as PyTorch's CPU index)
set -euo pipefail
exec 1>&2

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
stamp=$venv/.headwater-bootstrap
say() { printf 'headwater: %s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}

# What an installation depends on, apart from its extras: the two files, the interpreter and the place.
installation_key() {
    cat "$root/pyproject.toml" "$root/constraints.txt" "$venv/pyvenv.cfg" <(printf '%s' "$root") | hash_text
}

hash_text() {
    if command -v sha256sum >/dev/null 2>&1; then sha256sum; else shasum -a 256; fi
}

installed_extras() { [ -f "$stamp" ] && sed -n 2p "$stamp" || true; }

is_ready() {
    [ -x "$python" ] && [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$(installation_key)" ] || return 1
    local extra have
    have=" $(installed_extras) "
    for extra in "$@"; do [[ $have == *" $extra "* ]] || return 1; done
}

find_python() {
    local name seen="" without=""
    for name in python3.11 python3.12 python3.13 python3; do
        command -v "$name" >/dev/null 2>&1 || continue
        seen="$seen $name ($("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo broken))"
        "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue
        if "$name" -c 'import venv, ensurepip' 2>/dev/null; then
            command -v "$name"
            return
        fi
        without=$name
    done
    if [ -n "$without" ]; then
        die "$without is here, but not its venv module: install that (Debian, Ubuntu: the package $("$without" -c \
            'import sys; print("python%d.%d-venv" % sys.version_info[:2])')) and run this again."
    fi
    die "Python 3.11, 3.12 or 3.13 is needed; found:${seen:- none}. Install one and run this again."
}

# A virtual environment names its own place and its interpreter: moved, or left without it, it is made anew.
make_venv() {
    if [ -x "$python" ] && grep -qsF "$venv/bin/" "$venv/bin/pip" &&
        "$python" -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
        return
    fi
    local base
    base=$(find_python)
    say "making $venv with $base"
    rm -rf "$venv"
    "$base" -m venv "$venv" || die "$base could not make $venv (its message is above)."
}

has_nvidia() { command -v nvidia-smi >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; }

announce() {
    local torch=""
    if ! "$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
        if [ -n "${HEADWATER_TORCH_INDEX:-}" ]; then
            torch="torch from HEADWATER_TORCH_INDEX (about 200 MB for a CPU build) and "
        elif [ "$(uname -s)" = Linux ]; then
            torch="torch (200 MB to 3 GB, depending on what your package index offers) and "
            has_nvidia || say "no NVIDIA card found: with HEADWATER_TORCH_INDEX set to PyTorch's CPU index the" \
                "download is about 2.5 GB smaller (see README.md); to do that, stop this and start it again"
        else
            torch="torch (about 100 MB) and "
        fi
    fi
    say "installing into .venv: ${torch}about $([[ " $* " == *" dev "* ]] && echo 150 || echo 50) MB of other" \
        "packages, less what is here already"
}

free_mb() { df -Pk "$venv" | awk 'NR == 2 { print int($4 / 1024) }'; }

check_disk() {
    local free needed=2000
    free=$(free_mb)
    if [ "$free" -lt "$needed" ]; then
        die "the disk that holds $root has $free MB free, and the packages need at least $needed MB:" \
            "make room and run this again."
    fi
}

pip() {
    local log=$venv/bootstrap.log
    rm -f "$log"
    # --log keeps the progress bars on the terminal and still leaves a text to look for causes in.
    "$python" -m pip install --log "$log" --constraint "$root/constraints.txt" "$@" </dev/null && return
    # A full disk may have cut the log short too.
    if [ "$(free_mb)" -lt 50 ] || grep -qsE 'No space left on device|Errno 28|Disk quota exceeded' "$log"; then
        die "the disk is full: make room and run this again."
    elif grep -qsE "$network_trouble" "$log"; then
        die "the package index can't be reached: check the network (and HEADWATER_TORCH_INDEX, if set)," \
            "then run this again."
    elif grep -qsE '\(constraint\) torch==|No matching distribution found for torch' "$log"; then
        die "the package index has no $(grep '^torch==' "$root/constraints.txt") for this Python and system."
    fi
    die "pip failed (its message is above; details in .venv/bootstrap.log)."
}
network_trouble='NameResolutionError|NewConnectionError|ConnectTimeoutError|ReadTimeoutError|Failed to establish'
network_trouble+='|getaddrinfo|name resolution|Network is unreachable|ProxyError'

# FlashInfer's wrappers are tested on the CPU, without the 300 MB of GPU libraries that they declare.
install_wrappers() {
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        say "FlashInfer is not offered for this system: the tests of its wrappers will be skipped"
    elif ! "$python" -m pip install --log "$venv/bootstrap.log" --constraint "$root/constraints.txt" --no-deps \
        flashinfer-python apache-tvm-ffi nvidia-ml-py </dev/null >/dev/null 2>&1; then
        say "FlashInfer can't be installed: the tests of its wrappers will fail (details in .venv/bootstrap.log)"
    fi
}

install() {
    make_venv
    # Extras that are installed stay: serve after test must not make test start over.
    local extras
    extras=$(printf '%s\n' "$@" $(installed_extras) | sort -u)
    extras=$(echo $extras)
    rm -f "$stamp"
    announce "$extras"
    check_disk
    if [ -n "${HEADWATER_TORCH_INDEX:-}" ]; then
        # Only torch: what it needs comes from the usual index, where constraints.txt holds.
        pip --no-deps --index-url "$HEADWATER_TORCH_INDEX" torch
    else
        pip torch
    fi
    pip --editable "$root${extras:+[${extras// /,}]}"
    [[ " $extras " != *" dev "* ]] || install_wrappers
    printf '%s\n%s\n' "$(installation_key)" "$extras" >"$stamp"
    say "ready"
}

is_ready "$@" && exit 0
cd "$root"
if command -v flock >/dev/null 2>&1; then
    exec 9>"$root/.venv.lock"
    flock -n 9 || {
        say "another set-up is at work here; waiting for it"
        flock 9
    }
    is_ready "$@" && exit 0
fi
install "$@"
