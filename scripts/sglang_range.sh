#!/usr/bin/env bash
# Runs the contract test, that served tokens are those of dense attention, on older releases of SGLang.
#
#   scripts/sglang_range.sh                   0.5.20 and 0.5.16, as `make test-all PART=range` does
#   scripts/sglang_range.sh 0.5.18 0.5.22     choose yourself
#
# Each release lies in .venv/sglang-<release>/, in front of the packages of .venv. Those before 0.5.20
# do not start with the transformers of .venv, so they get the one that they ask for. Only servers get
# these packages: what they are held against is the transformers of .venv, as the older one leaves
# yarn's mscale out of DeepSeek-V2's softmax scale.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$root/.venv/bin/python"
cd "$root"

fetch() {
    local release=$1 folder=$2 packages=("sglang==$1")
    case $release in
        0.5.16 | 0.5.17 | 0.5.18 | 0.5.19) packages+=("transformers==5.12.1" "tokenizers==0.22.2") ;;
    esac
    [ -f "$folder/.complete" ] && return
    rm -rf "$folder"
    "$python" -m pip install --quiet --no-deps --target "$folder" "${packages[@]}" ||
        { echo "sglang_range: error: ${packages[*]} could not be installed" >&2; exit 1; }
    touch "$folder/.complete"
}

[ $# -gt 0 ] || set -- 0.5.20 0.5.16
for release in "$@"; do
    start=$SECONDS
    folder="$root/.venv/sglang-$release"
    fetch "$release" "$folder"
    got=$(PYTHONPATH="$folder" "$python" -c \
        'from importlib.metadata import version; print(version("sglang"))')
    [ "$got" = "$release" ] ||
        { echo "sglang_range: error: got sglang $got, expected $release" >&2; exit 1; }
    echo "sglang_range: sglang $release, set up after $((SECONDS - start)) s"
    SERVER_PYTHONPATH="$folder" "$python" -m pytest --quiet --durations=0 --durations-min=20 \
        tests/server/test_exact.py tests/server/test_deepseek.py \
        -k "(llama and (alone or eight or radix or abort or dummy)) or mla"
    echo "sglang_range: sglang $release passed after $((SECONDS - start)) s"
done
