#!/usr/bin/env bash
# What only a CUDA GPU can show, on one GPU in under 8 minutes: the tests that need CUDA, then benchmarks as JSON.
#
#   tools/benchmarks/gpu.sh [FOLDER]     writes FOLDER/SUBJECT.json and .log (default: outputs/gpu)
#
#   objective      chunked loss at Qwen3-8B's sizes, also against TRL and Liger-Kernel where they are installed
#   micro_batches  packed rows against balanced and count
#   overlap        student and teacher as two processes on the one GPU
#   gpu_step       nine layers of Qwen3-8B's dimensions at 8,192 tokens in BF16: MFU and peak memory (takes about 50 GiB)
#
# It takes the active environment's `python`, or PYTHON. Nothing else should run on the GPU. Each part has its own time
# limit, and one that fails does not stop the next: the last lines say which did, and the exit status is then 1.
# Not run on a GPU yet: on a machine without one only its parts' logic is tested (tests/unit_tests/test_benchmarks.py).
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(mkdir -p "${1:-$root/outputs/gpu}" && cd "${1:-$root/outputs/gpu}" && pwd) || exit 2
python=${PYTHON:-python}
cd "$root" || exit 2
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: $python has no torch that can use a CUDA GPU here" >&2
    exit 2
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$folder/gpu.txt"

failed=()
# part NAME SECONDS COMMAND...: runs it for so long at most, its output also in FOLDER/NAME.log, and notes its failure.
part() {
    local name=$1 limit=$2
    shift 2
    printf '\n==== %s: %s\n' "$name" "$*"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$folder/$name.log" || failed+=("$name (see $folder/$name.log)")
}

part tests 90 "$python" -m pytest tests/unit_tests -k cuda -q
for subject_and_limit in objective:110 micro_batches:100 overlap:80 gpu_step:80; do
    subject=${subject_and_limit%:*}
    part "$subject" "${subject_and_limit#*:}" "$python" -m tools.benchmarks "$subject" --json "$folder/$subject.json"
done

printf '\n%s s; results in %s\n' "$SECONDS" "$folder"
for name in ${failed[@]+"${failed[@]}"}; do echo "failed: $name"; done
((${#failed[@]} == 0))
