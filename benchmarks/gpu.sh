#!/bin/sh
# What a GPU decides, within eight minutes: agreement with the CPU first, then costs of
# SmolLM2-135M-Instruct and of a random Llama of seven billion parameters in bfloat16.
# Without a GPU: sh benchmarks/gpu.sh --size smoke
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks --size gpu --only on_device large "$@"
