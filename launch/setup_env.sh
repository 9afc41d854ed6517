#!/usr/bin/env bash
# Makes .venv, the environment that the tests and the quickstart share; returns at once where it is up to date.
#
#   bash launch/setup_env.sh
#   PYTHON=python3.13 bash launch/setup_env.sh   # with this Python instead of the first suitable one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=train,dev
candidates=${PYTHON:-python3.11 python3.12 python3.13 python3 python}

say() { echo "setup_env: $*"; }
fail() { say "$*" >&2; exit 1; }

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }
version_of() { "$1" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in $candidates; do
        if suitable "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

apt_install() {
    local root=()
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || return 1
        root=(sudo)
    fi
    say "installing Debian packages: $*"
    ${root[@]+"${root[@]}"} apt-get -qq update &&
        ${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "$@" >/dev/null
}

# All that decides what .venv holds: an editable install points at its folder; pytest's settings change nothing in it.
wanted=$(pwd; echo "$extras"; cat pyproject.toml; sed '/^\[tool:pytest\]/,$d; /^ *#/d' setup.cfg)
# Without PYTHON the Python of an existing .venv stays; with it the versions must agree.
same_python() { [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of .venv/bin/python)" ]; }
if [ "$(cat .venv/made_from 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null && same_python; then
    say ".venv is up to date"
    exit
fi

if suitable .venv/bin/python && same_python; then
    say "bringing .venv up to date"
else
    if ! python=$(find_python); then
        [ -z "${PYTHON:-}" ] && apt_install python3 python3-venv && python=$(find_python) ||
            fail "no Python 3.11 to 3.13 with its venv module among: $candidates. Install one" \
                 "(Debian 12: apt-get install python3 python3-venv) or name it: PYTHON=/where/python bash $0"
    fi
    say "making .venv with $("$python" --version) ($python)"
    "$python" -m venv --clear .venv
fi
say "installing venus_jax[$extras] and what it needs into .venv: about 2 GB, a minute or two"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" ||
    fail "pip could not install the packages, for the reason above; making .venv needs a network, using it does not"
echo "$wanted" >.venv/made_from
say ".venv is ready"
