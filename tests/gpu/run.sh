#!/usr/bin/env bash
# On a machine with a CUDA GPU: the GPU tests, then the benchmark, as JSON rows. Needs that machine's python3 with torch,
# triton, numpy, safetensors, tokenizers, jinja2, tqdm and pytest; nothing is installed, and nothing is fetched. Tests of
# the server and of the preflight want their packages too (a folder of them on PYTHONPATH will do), and one wants a real
# model's directory in ATOLL_TEST_MODEL; without them they are skipped, and say so.
#
# Most tests run side by side, a process a file, or some for its families of models: they wait for compilers and for the
# CPU they are compared with. What judges speed or the whole card's memory is marked `alone`, and comes when the others
# are done; of these the presets' tests start large models in fp8, and want a card of 80 GB.
#
#   tests/gpu/run.sh                    all of it (about 25 minutes on an H100)
#   tests/gpu/run.sh tests              only the tests
#   tests/gpu/run.sh beside [FILE...]   only those that run side by side, JOBS=n at a time
#   tests/gpu/run.sh alone [FILE...]    only those that need the machine to themselves
#   tests/gpu/run.sh sanitize           every kernel's check under compute-sanitizer, of the CUDA toolkit (minutes)
#   tests/gpu/run.sh bench              only the benchmark: random weights in the real shapes of Qwen3, Qwen3.6, Gemma 4
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
what=${1:-all}
[ $# = 0 ] || shift

# Apart from the other rooms' tests: those run Triton's kernels in its interpreter, in the whole process.
run_tests() {
    python3 -m pytest -q -rs --durations=5 -p no:cacheprovider -o addopts="" -W ignore::pytest.PytestConfigWarning "$@"
}

# One process's tests, and what they said once they are done. Nothing to run there (5) is no failure.
beside_one() {
    local file families code=0 said
    IFS='|' read -r file families <<< "$1"
    said=$(run_tests -m "not alone" "$file" ${families:+-k "$families"} 2>&1) || code=$?
    printf '== %s\n%s\n' "$file${families:+ -k \"$families\"}" "$said"
    [ "$code" = 0 ] || [ "$code" = 5 ]
}
export -f run_tests beside_one

run_beside() {
    local cores jobs threads
    cores=$(env -u OMP_NUM_THREADS nproc)
    jobs=${JOBS:-$((cores < 4 ? 1 : cores < 16 ? cores / 2 : 8))}
    # What the GPU is compared with runs on the CPU, in thousands of small pieces of work. Left alone, each process has a
    # thread for every core, and each piece waits until the last of them had its turn: seven files were not done after
    # 270 s on 16 cores. All of a process's arithmetic, the engine's too, keeps to this number.
    threads=${OMP_NUM_THREADS:-$((cores > jobs ? cores / jobs : 1))}
    { longest "$@"; printf '%s\n' "$@"; } | awk '!seen[$0]++' | by_families |
        OMP_NUM_THREADS=$threads xargs -P "$jobs" -d '\n' -I{} bash -c 'beside_one "$1"' _ {}
}

# They go first: the last one decides when all are done.
longest() {
    local name file
    for name in moe long_context fp8 engine hybrid delta; do
        for file; do
            [[ $file != *test_gpu_$name.py ]] || echo "$file"
        done
    done
}

# Files, a line each -> FILE, or FILE|FAMILIES for each of several processes: these files start an engine for every
# family, and every start waits for compilers, if only for a few kernels.
by_families() {
    local file
    while read -r file; do
        case $file in
            *test_gpu_fp8.py | *test_gpu_engine.py) printf "$file|%s\n" gemma qwen "not gemma and not qwen" ;;
            *test_gpu_hybrid.py) printf "$file|%s\n" gemma "not gemma" ;;
            *) echo "$file" ;;
        esac
    done
}

run_alone() {
    local code=0
    run_tests -m alone "$@" || code=$?
    [ "$code" = 0 ] || [ "$code" = 5 ]
}

if [ "$what" = sanitize ]; then
    tool=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}
    if [ -z "$tool" ]; then
        echo "run.sh sanitize: compute-sanitizer is not on the path; it is part of the CUDA toolkit." >&2
        echo "Install it, or name it: COMPUTE_SANITIZER=/usr/local/cuda/bin/compute-sanitizer tests/gpu/run.sh sanitize" >&2
        exit 2
    fi
    # Without torch's cache of memory, so that each tensor has an end that a kernel can be seen to cross.
    sanitized() {
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$tool" --tool "$@" --error-exitcode 3 --print-limit 20 \
            python3 -m engine.selftest --in-process --no-rates
    }
    sanitized memcheck
    # Our kernels alone, whose names all end so: with the library's it had not come to the first check after 150 s. The
    # GPU's speed is not measured: racecheck of CUDA 13.0 fails in the library's product, which that multiplies with.
    sanitized racecheck --kernel-name kns=_kernel --kernel-name-exclude kns=native
    exit
fi
[ $# != 0 ] || set -- tests/gpu/test_gpu_*.py
failed=0
case $what in
    beside) run_beside "$@" ;;
    alone) run_alone "$@" ;;
    tests | all)
        run_beside "$@" || failed=$?
        run_alone "$@" || failed=$?
        [ "$failed" = 0 ] || exit "$failed"
        ;;
    bench) ;;
    *)
        sed -n 's/^#   //p' "$0" >&2
        exit 2
        ;;
esac
if [ "$what" = all ] || [ "$what" = bench ]; then
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
