#!/usr/bin/env bash
# Makes the CPU environment: a virtual environment with the locked packages and this project, editable.
#   scripts/install.sh [VENV [kernels]]   VENV: argument, else $VENV, else .venv in the repository
#                                         kernels: also requirements/kernels.lock, which tests and benchmarks need
# Environment: PYTHON (an interpreter to use), PIP_* and pip's configuration files (indexes, wheel folders).
# A second call does nothing until a lock, pyproject.toml, this script or a location changes. Each lock has a stamp of
# its own: a call without "kernels" leaves what that lock put there alone.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$(realpath -m -- "${1:-${VENV:-$root/.venv}}")
py=$venv/bin/python
busy=$venv/.tba-installing
uv_version=0.13.9
torch_index=https://download.pytorch.org/whl/cpu

say() { printf 'install: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

(($# <= 2)) && [[ ${1:-} != kernels && ${2:-kernels} == kernels ]] || die "usage: scripts/install.sh [VENV [kernels]], not: $*"
locks=(cpu ${2:+"$2"})

lock_of() { echo "$root/requirements/$1.lock"; }
stamp_of() { echo "$venv/.tba-installed-$1"; }
key() { # LOCK
    { echo "$root $venv" && "$py" -V && cat "$(lock_of "$1")" "$root/pyproject.toml" "$root/scripts/install.sh"; } |
        sha256sum
}
current() { # LOCK...
    [[ -x $py && ! -e $busy ]] || return 1
    local name stamp
    for name in "$@"; do
        stamp=$(stamp_of "$name")
        [[ -f $stamp && $(<"$stamp") == "$(key "$name")" ]] || return 1
    done
}
current "${locks[@]}" && exit 0

# Two installs into one place would break each other. (No lock where the file system has none.)
exec 9<"$root" && flock 9 2>/dev/null || true
current "${locks[@]}" && exit 0
[[ $(uname -sm) == "Linux x86_64" ]] || die "the locks in requirements/ are for Linux on x86-64"

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# A killed install may leave half a package that looks whole: start again. A venv of another Python, too.
if [[ ! -x $py || -e $busy ]] || ! "$py" -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    python=$(find_python) || die "no Python 3.11 with venv and ensurepip (tried ${PYTHON:-} python3.11 python3)"
    if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        die "$venv exists and is not a virtual environment: not touched"
    fi
    say "making $venv with $python"
    "$python" -m venv --clear "$venv" || die "could not make $venv"
fi

pip() { "$py" -m pip --disable-pip-version-check -qq "$@"; }

# uv does not read pip's configuration. Only options that both understand are passed on.
sources=()
while IFS= read -r line; do sources+=("$line"); done < <("$py" - <<'PYTHON'
import ast, subprocess, sys

found = {}
listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
for line in listing.splitlines():
    name, _, value = line.partition("=")
    section, _, key = name.rpartition(".")
    found[section, key] = ast.literal_eval(value)
for key in ("index-url", "extra-index-url", "find-links", "trusted-host", "no-index"):
    # pip's own order: the environment, then [install], then [global]
    value = next((found[s, key] for s in (":env:", "install", "global") if (s, key) in found), "")
    if key == "no-index":
        if value.lower() in ("1", "true", "yes", "on"):
            print("--no-index")
        continue
    for part in value.split():
        print(f"--{key}", part, sep="\n")
PYTHON
)

# PyTorch's CPU index, where no folder of wheels has torch. An index that does not answer would cost
# pip seconds for each package, and uv the whole install: so ask first.
torch=$(sed -n 's/^torch==//p' "$(lock_of cpu)")
have_torch() {
    "$py" -c "import sys, importlib.metadata as m; sys.exit(m.version('torch') != '$torch')" 2>/dev/null && return
    local i
    for ((i = 0; i + 1 < ${#sources[@]}; i++)); do
        [[ ${sources[i]} == --find-links ]] || continue
        compgen -G "${sources[i + 1]#file://}/torch-$torch-*.whl" >/dev/null && return
    done
    return 1
}
torch_note=
if ! have_torch; then
    if timeout 3 "$py" -c 'import sys, urllib.request as u
u.urlopen(u.Request(sys.argv[1], method="HEAD"), timeout=2)' "$torch_index/torch/" 2>/dev/null; then
        sources+=(--extra-index-url "$torch_index")
    else
        torch_note="; $torch_index does not answer, and no folder in PIP_FIND_LINKS has torch $torch"
    fi
fi

# Byte code: written by the first import, which is cheaper than compiling everything now (+28 s). But where
# Python is told not to write it, every process would compile anew: 17 s to import the engine, not 8.
compile=()
[[ -z ${PYTHONDONTWRITEBYTECODE:-} ]] || compile=(--compile-bytecode)

export UV_PYTHON_DOWNLOADS=never
uv_install() {
    local status=0
    # best match over all indexes, as pip does: PyTorch's index has old copies of other packages
    "$venv/bin/uv" --quiet pip install --python "$py" --index-strategy unsafe-best-match "$@" || status=$?
    ((status < 128)) || exit "$status" # killed: leave the mark
    return "$status"
}
install_lock() { # LOCK
    local lock start=$SECONDS
    lock=$(lock_of "$1")
    say "installing $(grep -c '==' "$lock") packages of requirements/$1.lock"
    rm -f "$(stamp_of "$1")"
    touch "$busy"
    if pip install --retries 1 "uv==$uv_version" && uv_install --no-deps "${compile[@]}" "${sources[@]}" -r "$lock"; then
        :
    else
        say "uv could not install the lock, trying pip"
        pip install --retries 1 --no-deps "${sources[@]}" -r "$lock" || {
            (($? < 128)) || exit 1
            rm -f "$busy" # both tools fail before they write: unlike after a kill, the venv can be kept
            die "could not install requirements/$1.lock (see above). It needs a package index$torch_note"
        }
    fi
    if [[ $1 == cpu ]]; then
        # setuptools is in this lock: nothing is downloaded here.
        pip install --no-deps --no-build-isolation --no-index -e "$root" || die "could not install the project itself"
    fi
    key "$1" >"$busy" && mv "$busy" "$(stamp_of "$1")"
    say "done in $((SECONDS - start)) s: $venv"
}
for name in "${locks[@]}"; do
    current "$name" || install_lock "$name"
done
