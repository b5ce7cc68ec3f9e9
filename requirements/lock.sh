#!/usr/bin/env bash
# Rewrites the pinned requirements, with the hashes of every file that the registry has of them:
#   lock.txt     everything `make` installs but torch
#   runtime.txt  of it, what runs in the image
#   build.txt    what builds the image's wheel
# Pins that still fit are kept; arguments go to uv: `requirements/lock.sh --upgrade`,
# `--upgrade-package aiohttp`.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() { .venv/bin/uv pip compile -q --no-config --no-python-downloads --python-version 3.11 \
    --generate-hashes --no-annotate --no-header "$@"; }
compile "$@" pyproject.toml requirements/torch.in --extra all --extra dev --extra docs --extra engine-cpu \
    --override requirements/overrides.txt -o requirements/lock.txt
# There are no builds of them for other machines; their tests skip themselves there.
for name in helm-binary mooncake-transfer-engine-non-cuda; do
    sed -i "s/^$name==[^ ]*/& ; platform_machine == 'x86_64'/" requirements/lock.txt
done
compile pyproject.toml --extra kubernetes --constraint requirements/lock.txt -o requirements/runtime.txt
compile "$@" requirements/build.in -o requirements/build.txt
