#!/usr/bin/env bash
# Patches the vLLM of the environment on the PATH on disk, for an image: then its start-up only
# compares hashes. An environment that other programs use with stock vLLM must not be baked.
set -euo pipefail

fork=$(mktemp -d)
trap 'rm -rf "$fork"' EXIT
vllm_thunder patches export "$fork/patches"

cd "$(python -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')/.."
for patch in "$fork"/patches/*.patch; do
    patch -p1 --fuzz=0 <"$patch"
done
vllm_thunder patches check
