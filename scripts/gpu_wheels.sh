#!/usr/bin/env bash
# Downloads what `make gpu-check` needs besides PyTorch into build/gpu-wheels, for Python 3.12 on
# x86-64 Linux: to be carried to a machine that has a GPU but no package index.
#
#   PYTHON_VERSION=3.12   of that machine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(apache-tvm-ffi pytest pytest-xdist execnet hypothesis iniconfig pluggy packaging
    sortedcontainers attrs rich markdown-it-py mdurl Pygments psutil numpy typing_extensions xxhash)
wanted=()
for package in "${packages[@]}"; do
    wanted+=("$(grep -io "^${package}==[^ ]*" requirements/cpu.txt)")
done
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010; do
    platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest build/gpu-wheels \
    --python-version "${PYTHON_VERSION:-3.12}" --implementation cp "${platforms[@]}" "${wanted[@]}"
ls build/gpu-wheels
