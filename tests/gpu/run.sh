#!/usr/bin/env bash
# On a machine with a CUDA GPU: the GPU tests, then the benchmark, as JSON rows. Needs that machine's python3 with torch,
# triton, numpy, safetensors, tokenizers, jinja2, tqdm and pytest; nothing is installed, and nothing is fetched. Tests of
# the server want its packages too (a folder of them on PYTHONPATH will do), and one wants a real model's directory in
# ATOLL_TEST_MODEL; without them they are skipped, and say so. The presets' tests start large models in fp8, and want a
# card of 80 GB for themselves.
#
#   tests/gpu/run.sh              all of it (about 25 minutes on an H100)
#   tests/gpu/run.sh tests        only the tests
#   tests/gpu/run.sh sanitize     every kernel's check under compute-sanitizer, of the CUDA toolkit (minutes)
#   tests/gpu/run.sh bench        only the benchmark: random weights in the real shapes of Qwen3, Qwen3.6 and Gemma 4
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
what=${1:-all}

if [ "$what" = sanitize ]; then
    tool=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}
    if [ -z "$tool" ]; then
        echo "run.sh sanitize: compute-sanitizer is not on the path; it is part of the CUDA toolkit." >&2
        echo "Install it, or name it: COMPUTE_SANITIZER=/usr/local/cuda/bin/compute-sanitizer tests/gpu/run.sh sanitize" >&2
        exit 2
    fi
    # Without torch's cache of memory, so that each tensor has an end that a kernel can be seen to cross.
    for check in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$tool" --tool "$check" --error-exitcode 3 --print-limit 20 \
            python3 -m engine.selftest --in-process
    done
    exit
fi
if [ "$what" != bench ]; then
    # Apart from the other tests: those run Triton's kernels in its interpreter, in the whole process.
    python3 -m pytest -q -rs --durations=10 tests/gpu -p no:cacheprovider -o addopts="" -W ignore::pytest.PytestConfigWarning
fi
if [ "$what" != tests ]; then
    bench() { python3 -m engine.bench workload "$@" --repeats 3 --json; }
    configs=engine/bench/configs
    bench mixed single --model $configs/qwen3-0.6b
    bench mixed mixed-small single --model $configs/qwen3-8b
    bench prefill --model $configs/qwen3-8b
    bench mixed single --model $configs/qwen3-8b --quantization fp8 --kv-cache-dtype fp8
    bench prefill --model $configs/qwen3-8b --quantization fp8 --kv-cache-dtype fp8
    bench mixed mixed-small single --model $configs/qwen3.6-27b --quantization fp8
    bench prefill --model $configs/qwen3.6-27b --quantization fp8
    bench mixed-small single --model $configs/gemma4-31b --quantization fp8
    bench mixed-small single --model $configs/gemma4-31b --quantization fp8 --kv-cache-dtype fp8
    bench prefill --model $configs/gemma4-31b --quantization fp8
    for place in host gpu; do  # what the bus costs
        bench mixed mixed-small single --model $configs/gemma4-e2b --per-layer-embeddings $place
        bench prefill --model $configs/gemma4-e2b --per-layer-embeddings $place
    done
    bench single --model $configs/gemma4-26b-a4b --quantization fp8
    bench single --model $configs/qwen3.6-35b-a3b --quantization fp8
    python3 -m engine.bench moe --model $configs/qwen3-30b-a3b --json
fi
