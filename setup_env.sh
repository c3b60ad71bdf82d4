# shellcheck shell=bash
# Chooses the Python environment; sourced by run_train.sh and run_tests.sh, which call `setup_env ROOT run|test`.
#
# 1. An environment that has the package and torchtitan (an activated one, or the python3 on PATH) is used as it is.
# 2. Else ROOT/.venv, if it is complete.
# 3. Else ROOT/.venv is made: virtual environment, torch, then the package in editable mode.
# Afterwards $PYTHON is the interpreter to use (exported). BLOCKGROW_USE_VENV=1 skips 1.
#
# The state of a .venv that was made here is one line in .venv/blockgrow_titan.stamp: "installing", or at the very end
# "<checksum of pyproject.toml> <run|test> <ROOT>". So an interrupted install is redone, a changed pyproject.toml
# installs what changed, and a copied checkout does not run another checkout's code.

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# has_packages PYTHON DISTRIBUTION...: true if all are installed. Asks for their metadata, because an import would find
# the source tree in the current folder; -P keeps that folder out, and Python before 3.11 does not know the option.
has_packages() {
    "$1" -P -c 'import sys; from importlib.metadata import version; [version(name) for name in sys.argv[1:]]' \
        "${@:2}" >/dev/null 2>&1
}

# find_base_python: sets $base to a Python 3.11 or newer that can make virtual environments.
find_base_python() {
    local candidate version found="" no_venv=""
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        version=$("$candidate" -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue
        found="${found:+$found, }$candidate $version"
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            base=$candidate
            return
        fi
        no_venv=$candidate
    done
    if [ -n "$no_venv" ]; then
        die "$no_venv lacks the modules venv and ensurepip, which make .venv. On Debian and Ubuntu: apt install ${no_venv}-venv"
    fi
    die "Python 3.11 or newer is needed; found ${found:-none}. Install it, or put it first on PATH, and run this again."
}

# run_pip LABEL ARGUMENT...: pip with its output in .venv/install.log and a sign of life on the console.
run_pip() {
    local label=$1 log=$venv/install.log ticker status=0 start=$SECONDS
    echo "  $label"
    (
        while sleep 15 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
            echo "      $((SECONDS - start)) s: $(grep -oE '^ *(Collecting|Downloading|Installing) [^:]*' "$log" | tail -n 1)"
        done
    ) 9>&- &
    ticker=$!
    PIP_USER=0 "$venv/bin/python" -m pip install --progress-bar off "${@:2}" >>"$log" 2>&1 || status=$?
    kill "$ticker" 2>/dev/null
    wait "$ticker" 2>/dev/null
    if [ "$status" -ne 0 ]; then
        tail -n 15 "$log" >&2
        die "the installation failed (whole log: $log). Run the same command again to retry."
    fi
}

# venv_is_complete KIND: true if .venv was installed to the end from this pyproject.toml, for KIND or more.
venv_is_complete() {
    [ -x "$venv/bin/python" ] && [ -f "$stamp" ] || return 1
    local state
    state=$(cat "$stamp")
    [ "$state" = "$checksum test $root" ] || { [ "$1" = run ] && [ "$state" = "$checksum run $root" ]; }
}

# install_venv KIND: makes or updates .venv. Runs in a subshell that holds the lock on descriptor 9.
install_venv() {
    local kind=$1 extras="" torch_range start=$SECONDS
    "$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
        echo "Another command is setting up .venv; waiting for it."
        "$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || die "cannot lock $root/.venv.lock"
    }
    if venv_is_complete "$kind"; then return; fi
    if [ -e "$venv" ] && [ ! -f "$stamp" ]; then
        die "$venv exists, but was not made by this script and lacks one of: ${needed[*]}. Remove it, or activate it" \
            "and run \`pip install -e '${root}[test]'\`."
    fi
    if "$venv/bin/python" -c '' 2>/dev/null && [[ $(cat "$stamp") == *" $root" ]]; then
        echo "Updating $venv: pyproject.toml changed, or the test tools are missing."
        if [[ $(cat "$stamp") == *" test "* ]]; then kind="test"; fi
        echo installing >"$stamp"
    else
        cat <<TEXT
First use: this makes a virtual environment in $venv and installs torch, torchtitan and the rest into it.
It takes some minutes and 3 GB with a CPU build of torch, several times that with a CUDA build; once.
To use an environment of your own instead, activate it and run \`pip install -e $root\`.
TEXT
        rm -rf "$venv" || die "cannot remove $venv"
        mkdir "$venv" || die "cannot write to $root"
        echo installing >"$stamp"
        echo "  1/3 virtual environment ($("$base" --version), $(command -v "$base"))"
        "$base" -m venv "$venv" || die "\`$base -m venv $venv\` failed."
    fi
    # torch first, by its range in pyproject.toml, so that no other requirement picks the version.
    torch_range=$("$venv/bin/python" -c '
import sys, tomllib
with open(sys.argv[1], "rb") as f:
    print(next(d for d in tomllib.load(f)["project"]["dependencies"] if d.startswith("torch>")))
' "$root/pyproject.toml") || die "found no requirement torch>... in $root/pyproject.toml"
    run_pip "2/3 $torch_range" "$torch_range"
    if [ "$kind" = test ]; then extras="[test]"; fi
    run_pip "3/3 blockgrow_titan$extras and its other requirements" -e "$root$extras"
    printf '%s %s %s\n' "$checksum" "$kind" "$root" >"$stamp"
    echo "  done in $((SECONDS - start)) s."
}

# setup_env ROOT run|test: the steps at the top of this file; exports what makes .venv the active environment.
setup_env() {
    local root=$1 kind=$2 base=""
    local venv=$root/.venv
    local stamp=$venv/blockgrow_titan.stamp checksum
    local needed=(blockgrow_titan torchtitan torch)
    if [ "$kind" = test ]; then needed+=(pytest pytest-xdist ruff mypy scipy hypothesis); fi

    export PYTHON=python3
    if [ -z "${BLOCKGROW_USE_VENV:-}" ] && has_packages python3 "${needed[@]}"; then return; fi
    checksum=$(cksum <"$root/pyproject.toml" | tr ' ' '-')
    if [ -e "$venv" ] && [ ! -f "$stamp" ] && has_packages "$venv/bin/python" "${needed[@]}"; then
        : # made by hand, and has all that is needed
    elif ! venv_is_complete "$kind"; then
        echo "The active Python ($(command -v python3)) lacks one of: ${needed[*]}."
        find_base_python
        (install_venv "$kind") 9>"$root/.venv.lock" || exit 1
    fi
    PYTHON=$venv/bin/python
    export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    unset PYTHONHOME
}
