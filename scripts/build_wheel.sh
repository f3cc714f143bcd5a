#!/usr/bin/env bash
# Builds dist/hisparse-*.whl from the last commit. Times in the wheel are those of the commit, so the
# same commit gives the same bytes wherever it is built with the setuptools of requirements/cpu.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git archive HEAD | tar -x -C "$source"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) .venv/bin/python -m pip wheel --quiet --no-deps \
    --no-build-isolation --wheel-dir dist "$source"
sha256sum dist/*.whl
