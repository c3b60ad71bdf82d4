#!/usr/bin/env bash
# Trains one job: sets up the Python environment on first use, then starts torchrun (tools/launch.py). `./run_train.sh --help` says more.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=setup_env.sh
source "$root/setup_env.sh"

usage() {
    cat <<TEXT
Usage: [VARIABLE=value ...] ./run_train.sh [--job.config_file FILE.toml] [--section.field value ...]

Trains the job of a TOML file. Further arguments override its fields, for example --training.steps 10. The first use
makes .venv beside this script, unless the active environment has blockgrow_titan.

  CONFIG_FILE  the TOML file, unless --job.config_file names one (default: train_configs/grow_post.toml)
  NGPU         ranks to start (default: the larger of 2 and the number of visible GPUs)
  LOG_RANK     ranks whose output is shown, as 0,1 (default: 0)
  TRAIN_FILE   the module to run (default: blockgrow_titan.train)
  MAX_RESTARTS how often torchrun starts the ranks again after a failure; they go on from the last checkpoint (default: 0)
  COMM_MODE    run one process without torchrun: fake_backend or local_tensor (default: empty)
  OMP_NUM_THREADS  threads of a rank, also of its tokenizer (default: cores divided by NGPU)

Ctrl-C or SIGTERM lets the job finish its step, saves, and ends with status 0; the same command resumes. A second one
ends it at once.

Relative paths are relative to the current folder. Every field and its meaning, once .venv is there:
  .venv/bin/python -m blockgrow_titan.train --job.config_file train_configs/grow_post.toml --help
TEXT
}

# visible_gpus: how many GPUs the ranks will see, from nvidia-smi and CUDA_VISIBLE_DEVICES.
visible_gpus() {
    local count
    count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || count=0
    if [ "$count" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        # An id of -1 hides itself and all that follow it.
        count=$(awk -F, '{ for (i = 1; i <= NF && $i != "-1"; i++) n += ($i != "") } END { print n + 0 }' \
            <<<"$CUDA_VISIBLE_DEVICES")
    fi
    echo "$count"
}

config_file=${CONFIG_FILE:-$root/train_configs/grow_post.toml}
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --job.config_file=* | --job.config-file=*) config_file=${1#*=} ;;
        --job.config_file | --job.config-file)
            [ $# -gt 1 ] || die "$1 needs a file name after it"
            config_file=$2
            shift
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
[ -f "$config_file" ] || die "config file '$config_file' does not exist; set --job.config_file or CONFIG_FILE"

gpus=$(visible_gpus)
NGPU=${NGPU:-$((gpus > 2 ? gpus : 2))}
[[ $NGPU =~ ^[1-9][0-9]*$ ]] || die "NGPU is '$NGPU', must be a positive number of ranks"
[[ ${MAX_RESTARTS:=0} =~ ^[0-9]+$ ]] || die "MAX_RESTARTS is '$MAX_RESTARTS', must be a number, 0 or more"
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    OMP_NUM_THREADS=$((cores > NGPU ? cores / NGPU : 1))
fi
train_file=${TRAIN_FILE:-blockgrow_titan.train}

setup_env "$root" run
export OMP_NUM_THREADS RAYON_NUM_THREADS=${RAYON_NUM_THREADS:-$OMP_NUM_THREADS} # the second: of the tokenizer
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# On CPUs, glibc keeps what tensors have freed, instead of getting zeroed pages from the kernel anew at every step
# (docs/performance.md).
[ "$gpus" -gt 0 ] || export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:--1}
# This checkout's code runs, wherever the command is given and whichever copy the environment has.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

if [ -n "${COMM_MODE:-}" ]; then
    export NGPU LOCAL_RANK=0
    command=("$PYTHON" -m "$train_file" --job.config_file "$config_file"
        ${arguments[@]+"${arguments[@]}"} "--comm.mode=$COMM_MODE")
else
    command=("$PYTHON" "$root/tools/launch.py" "--nproc_per_node=$NGPU" --rdzv_backend c10d
        --rdzv_endpoint=localhost:0 "--max_restarts=$MAX_RESTARTS" --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3
        -m "$train_file" --job.config_file "$config_file" ${arguments[@]+"${arguments[@]}"})
fi
printf '+ OMP_NUM_THREADS=%s' "$OMP_NUM_THREADS"
printf ' %q' "${command[@]}"
echo
exec "${command[@]}"
