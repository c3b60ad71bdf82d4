#!/usr/bin/env bash
# Runs every check of this repository: lint, types, unit tests, integration tests. `./run_tests.sh --help` says more.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=setup_env.sh
source "$root/setup_env.sh"

usage() {
    cat <<TEXT
Usage: ./run_tests.sh [--lint] [--unit] [--integration] [--faults]

Runs the named stages, by default the first three: lint (ruff check, ruff format, mypy), unit (pytest tests/unit_tests),
integration (tests/integration_tests, launches of run_train.sh), and faults (tests/fault_tests: ranks killed at chosen and
at random points, signals, two nodes, determinism, two tests at a time; then a long run; then more random configs and damaged
files than the unit tests try; about 20 minutes). BLOCKGROW_FAULT_REPORT=NAME has it write what was tried and what was
lost to NAME.md and NAME.json, and what the long run used to NAME-long-run.md and .json. A failing stage does not stop the
later ones. The last line counts the tests; the exit status is 0 if every stage passed. The first use makes .venv beside
this script, unless the active environment has blockgrow_titan and the test tools; BLOCKGROW_USE_VENV=1 uses .venv in any
case.

One unit test:         python -m pytest tests/unit_tests/FILE.py -k NAME
One integration test:  python -m tests.integration_tests.run_tests --test_name NAME
TEXT
}

stages=""
for argument in "$@"; do
    case $argument in
        -h | --help)
            usage
            exit 0
            ;;
        --lint | --unit | --integration | --faults) stages+=" ${argument#--}" ;;
        *) die "unknown argument '$argument'; see ./run_tests.sh --help" ;;
    esac
done
stages=${stages:- lint unit integration}

setup_env "$root" test
cd "$root"
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
# pytest and the harness end a Ctrl-C themselves with an exit status, after which bash would go on to the next stage.
trap 'exit 130' INT
failed_stages=()

# stage COMMAND...: runs it under a header line and notes its failure.
stage() {
    printf '\n==== %s\n' "$*"
    "$@" || failed_stages+=("$*")
}

for name in $stages; do
    case $name in
        lint)
            stage "$PYTHON" -m ruff check .
            stage "$PYTHON" -m ruff format --check .
            stage "$PYTHON" -m mypy
            ;;
        unit) stage "$PYTHON" -m pytest tests/unit_tests "--junitxml=$reports/unit.xml" ;;
        integration)
            stage "$PYTHON" -m tests.integration_tests.run_tests --junitxml "$reports/integration.xml"
            ;;
        faults)
            # The long run alone, since it shows the time of its steps. Each file in one process, which makes what it shares.
            stage "$PYTHON" -m pytest tests/fault_tests --ignore=tests/fault_tests/test_soak.py -n 2 --dist=loadfile \
                "--junitxml=$reports/faults.xml"
            stage env "BLOCKGROW_FAULT_REPORT=${BLOCKGROW_FAULT_REPORT:+$BLOCKGROW_FAULT_REPORT-long-run}" \
                "$PYTHON" -m pytest tests/fault_tests/test_soak.py "--junitxml=$reports/long_run.xml"
            stage env BLOCKGROW_EXAMPLES=60 "$PYTHON" -m pytest tests/unit_tests/test_config_properties.py \
                tests/unit_tests/test_fuzz_readers.py tests/unit_tests/test_fuzz_messages.py "--junitxml=$reports/fuzz.xml"
            ;;
    esac
done

printf '\n==== summary\n'
for failed in ${failed_stages[@]+"${failed_stages[@]}"}; do echo "failed: $failed"; done
echo "total: $SECONDS s"
# The counts of the JUnit reports; a test stage that left no report counts as one failed test.
"$PYTHON" - "$reports" "$stages" <<'PY'
import pathlib, sys
import xml.etree.ElementTree as ET

count = {"passed": 0, "failed": 0, "skipped": 0}
stages = set(sys.argv[2].split())
for stage in sorted(stages - {"lint"} | ({"long_run", "fuzz"} if "faults" in stages else set())):
    report = pathlib.Path(sys.argv[1]) / f"{stage}.xml"
    if not report.is_file():
        count["failed"] += 1
        continue
    for suite in ET.parse(report).iter("testsuite"):
        tests, failures, errors, skipped = (int(suite.get(k)) for k in ("tests", "failures", "errors", "skipped"))
        count["passed"] += tests - failures - errors - skipped
        count["failed"] += failures + errors
        count["skipped"] += skipped
print(", ".join(f"{n} {what}" for what, n in count.items() if n or what != "skipped"))
PY
[ ${#failed_stages[@]} -eq 0 ]
