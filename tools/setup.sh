#!/usr/bin/env bash
# Make .venv, with torch and this package in it, or leave it alone when it is whole: `bash tools/setup.sh run|dev`.
# `run` is what the demo needs, `dev` adds what the tests need. Reads PYTHON, TORCH, TORCH_INDEX (see `make help`).
set -euo pipefail
cd "$(dirname "$0")/.."

level=${1:-run}
venv=$PWD/.venv
disk=$PWD
if [[ $PWD == *[[:space:]]* ]]; then
    # torch.compile hands its own folder to a C++ compiler and does not quote it: there, .venv is a link to a path without spaces.
    venv=${XDG_CACHE_HOME:-$HOME/.cache}/diladiff/venv-$(printf %s "$PWD" | cksum | cut -d ' ' -f 1)
    disk=$HOME
fi
stamp=$venv/diladiff-setup
default_torch="torch==2.13.0"
in_range='import re, torch; v = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])); assert (2, 11) <= v < (3, 0)'

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
python_is_right() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not a command: name a Python 3.11 to 3.14, such as PYTHON=/usr/bin/python3.12"
        python_is_right "$PYTHON" && return
        die "$PYTHON is $("$PYTHON" --version 2>&1): too old or too new; name a Python 3.11 to 3.14 by PYTHON=..."
    fi
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if python_is_right "$candidate"; then PYTHON=$candidate; return; fi
    done
    die "no Python 3.11 to 3.14 found (python3 is $(python3 --version 2>&1 || echo missing)): install one, or name it by PYTHON=..."
}

need_space() { # megabytes, what for
    local folder free
    for folder in "$disk" "${TMPDIR:-/tmp}"; do
        free=$(df -Pm "$folder" | awk 'NR == 2 { print $4 }')
        [ "$free" -ge "$1" ] || die "the disk is too full: $2 needs about $1 MB and $folder has $free MB free"
    done
}

make_venv() {
    local share=""
    # A virtual environment cannot lend its packages to another one.
    local lends="$in_range; import sys; assert sys.prefix == sys.base_prefix"
    [ -z "${TORCH:-}${TORCH_INDEX:-}" ] && "$PYTHON" -c "$lends" >/dev/null 2>&1 && share=--system-site-packages
    need_space 200 "a virtual environment"
    say "making ${venv/#$PWD\//} with $("$PYTHON" --version)${share:+, which brings its own torch}"
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || die "$PYTHON has no venv module: install it (on Debian and Ubuntu: the package python3-venv)"
    rm -rf .venv
    mkdir -p "$(dirname "$venv")"
    "$PYTHON" -m venv --clear $share "$venv" || die "could not make $venv"
    [ "$venv" = "$PWD/.venv" ] || ln -s "$venv" .venv
}

install_torch() {
    local wanted=${TORCH:-} report build quiet=-qq
    [ -z "$wanted" ] && "$venv/bin/python" -c "$in_range" >/dev/null 2>&1 && return
    [ -z "$wanted" ] && wanted=$default_torch
    local source=()
    [ -n "${TORCH_INDEX:-}" ] && source=(--index-url "$TORCH_INDEX")
    say "asking the package index for $wanted"
    report=$("$venv/bin/python" -m pip install --dry-run --quiet --no-deps --report - ${source[@]+"${source[@]}"} "$wanted" 2>/dev/null) ||
        die "the package index has no $wanted for $("$venv/bin/python" --version), or cannot be reached"
    build=$(printf '%s' "$report" | "$venv/bin/python" -c 'import json, sys; print(*(x["metadata"]["version"] for x in json.load(sys.stdin)["install"]))')
    [ -n "$build" ] || return 0 # it is there already
    case "$(uname -s)-$build" in
        *+cpu | Darwin-*)
            need_space 2000 "torch $build"
            say "downloading torch $build: about 0.2 GB" ;;
        *)
            quiet=--progress-bar=on # minutes of download want a bar
            need_space 9000 "torch $build with CUDA"
            say "downloading torch $build, maybe with CUDA: up to 3 GB, 7 GB on the disk"
            say "(for a machine without a GPU: stop this, and name an index of CPU builds by TORCH_INDEX=...)" ;;
    esac
    "$venv/bin/python" -m pip install "$quiet" ${source[@]+"${source[@]}"} "$wanted" || die "torch was not installed: see the lines above"
}

install_package() {
    local what="." size="about 0.1 GB"
    [ "$level" = dev ] && what=".[dev]" size="about 0.2 GB"
    need_space 1000 "the package with what it imports"
    say "installing diladiff and what it imports ($level): $size"
    "$venv/bin/python" -m pip install -qq --editable "$what" || die "the package was not installed: see the lines above"
    "$venv/bin/python" -c "$in_range" || die "$venv holds $("$venv/bin/python" -c 'import torch; print(torch.__version__)'): torch>=2.11,<3 is needed; remove $venv and try again"
}

[ "$level" = run ] || [ "$level" = dev ] || die "say run or dev, not $level"
# The stamp says for what the environment was made: in another folder, or for another wish, it is made again from nothing;
# with another pyproject.toml, or for more, it is added to.
wish="PYTHON=${PYTHON:-} TORCH=${TORCH:-} TORCH_INDEX=${TORCH_INDEX:-}"
project=$(cksum < pyproject.toml)
old_folder="" old_wish="" old_project="" old_level=""
if [ -d .venv ] && [ -f "$stamp" ] && "$venv/bin/python" -c "" 2>/dev/null; then
    { read -r old_folder; read -r old_wish; read -r old_project; read -r old_level; } < "$stamp" || true
fi
[ "$wish" = "PYTHON= TORCH= TORCH_INDEX=" ] && [ -n "$old_wish" ] && wish=$old_wish
[ "$old_level" = dev ] && level=dev

if [ "$PWD" = "$old_folder" ] && [ "$wish" = "$old_wish" ]; then
    [ "$project" = "$old_project" ] && [ "$level" = "$old_level" ] && exit 0
else
    find_python
    make_venv
fi
install_torch
install_package
printf '%s\n' "$PWD" "$wish" "$project" "$level" > "$stamp"
say "ready"
