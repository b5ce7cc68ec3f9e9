#!/usr/bin/env bash
# Rewrites requirements/lock.txt from pyproject.toml: everything `make` installs, pinned.
# torch is installed before the lock, from wherever the installer is configured to look, so that a
# CPU build is taken where one is offered; the lock therefore leaves it out.
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_FIND_LINKS="${UV_FIND_LINKS:-$(pip config get global.find-links 2>/dev/null || true)}"
.venv/bin/uv pip compile -q pyproject.toml --extra dev --extra engine-cpu \
    --python-version 3.11 --override requirements/overrides.txt --no-annotate --no-header \
    --no-emit-package torch -o requirements/lock.txt
