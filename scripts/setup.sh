#!/usr/bin/env bash
# Makes .venv in the project's root with everything that the demo and the tests need.
#
#   scripts/setup.sh            the CPU set-up, or the CUDA one where nvidia-smi finds a GPU
#   HISPARSE_SETUP=cpu|cuda     choose yourself
#   PYTHON=/path/to/python3     choose the interpreter (3.11 or newer)
#
# Running it again does nothing until a file that it reads has changed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
cd "$root"
sglang=$(grep -o '^sglang==[^ ]*' requirements/sglang.txt)

die() { echo "setup: error: $*" >&2; exit 1; }
step() { echo "setup: [$1/5] $2"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "no Python 3.11 or newer among: ${PYTHON:-python3.11 python3.12 python3.13 python3}" \
        "($sglang needs it); install one, or name it with PYTHON=/path/to/python3"
}

find_kind() {
    case "${HISPARSE_SETUP:-}" in
        cpu | cuda) echo "$HISPARSE_SETUP" ;;
        "") if nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda; else echo cpu; fi ;;
        *) die "HISPARSE_SETUP is '$HISPARSE_SETUP', expected cpu or cuda" ;;
    esac
}

# What the stamp holds: if this is unchanged there is nothing to do.
fingerprint() {
    {
        echo "$1 $root $2"
        find pyproject.toml scripts/setup.sh requirements cpu_standins \
            \( -name '*.py' -o -name '*.txt' -o -name '*.toml' -o -name '*.sh' \) \
            -not -path '*/build/*' -not -path '*.egg-info/*' -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum | cut -d ' ' -f 1
}

# pip with its progress bars on a terminal; elsewhere one line for each package it gets.
pip_install() {
    if [ -t 1 ]; then
        "$venv/bin/python" -m pip install "$@"
    else
        "$venv/bin/python" -m pip install --progress-bar off "$@" |
            { grep --line-buffered -E '^(Collecting|Successfully installed)' || true; } |
            cut -c 1-120
    fi
}

# The real distributions that the stand-ins of cpu_standins/ would shadow, if any.
real_ones() {
    "$venv/bin/python" - <<'PY'
from importlib.metadata import distributions

real = {"torchvision", "sgl-kernel", "sglang-kernel", "sgl-kernel-cpu", "sglang-kernel-cpu"}
names = {(d.metadata["Name"] or "").lower().replace("_", "-") for d in distributions()}
print(" ".join(sorted(real & names)))
PY
}

setup_cpu() {
    local real
    step 2 "torch for the CPU"
    if ! pip_install --no-deps "torch==2.13.0+cpu" 2>/dev/null; then
        echo "setup: pip finds no CPU-only build of torch, so this gets the usual one, which can be" \
            "several GB (pip's option extra-index-url or find-links can name a place with CPU builds)"
        pip_install -c requirements/constraints.txt "torch==2.13.0" ||
            die "torch 2.13.0 could not be installed; pip's message is above"
    fi
    step 3 "the pinned packages of requirements/cpu.txt"
    pip_install --no-deps --require-hashes -r requirements/cpu.txt ||
        die "a package of requirements/cpu.txt could not be installed; pip's message is above"
    step 4 "$sglang, without its requirements"
    pip_install --no-deps --require-hashes -r requirements/sglang.txt ||
        die "$sglang could not be installed; pip's message is above"
    real=$(real_ones)
    if [ -n "$real" ]; then
        echo "setup: $real is installed, so the stand-ins of cpu_standins/ stay out"
    else
        pip_install --no-deps --no-build-isolation --force-reinstall ./cpu_standins ||
            die "cpu_standins/ could not be installed; pip's message is above"
    fi
    step 5 "hisparse itself, from this folder"
    pip_install --no-deps --no-build-isolation -e . ||
        die "hisparse could not be installed; pip's message is above"
}

setup_cuda() {
    echo "setup: the CUDA set-up lets pip resolve $sglang; it is untested here"
    step 2 "hisparse from this folder with sglang, torch and the tools for tests (several GB)"
    pip_install -e ".[sglang,kvcm,dev]" ||
        die "hisparse[sglang,kvcm,dev] could not be installed; pip's message is above"
}

python=$(find_python)
kind=$(find_kind)
stamp=$(fingerprint "$kind" "$("$python" -V)")
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.hisparse-setup" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python has no ensurepip; install its venv package (on Debian: apt install python3-venv)"
step 1 "$venv with $("$python" -V), for $kind (takes some minutes and about 3 GB the first time)"
"$python" -m venv "$venv" || die "$venv could not be made; the message is above"
rm -f "$venv/.hisparse-setup"
"setup_$kind"
echo "$stamp" > "$venv/.hisparse-setup"
echo "setup: done"
