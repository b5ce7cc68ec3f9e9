#!/usr/bin/env bash
# Rewrites requirements/lock.txt from pyproject.toml: everything `make` installs but torch, pinned,
# with the hashes of every file that the registry has of it. Pins that still fit are kept; arguments
# go to uv: `requirements/lock.sh --upgrade`, `--upgrade-package aiohttp`.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/uv pip compile -q --no-config --no-python-downloads "$@" \
    pyproject.toml requirements/torch.in --extra dev --extra engine-cpu \
    --python-version 3.11 --override requirements/overrides.txt --generate-hashes \
    --no-annotate --no-header -o requirements/lock.txt
