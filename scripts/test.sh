#!/usr/bin/env bash
# All tests, under the race detector. The last line is "N passed, N failed".
# With GPUAAS_TEST_LONG set, those that repeat what they claim do so for long.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/stages.sh
source scripts/stages.sh

# shellcheck source=scripts/programs.sh
source scripts/programs.sh

summary=$(mktemp)
trap 'rm -rf "$summary" "$programs"' EXIT

# They start first, the longest at once, and the others fill what they leave: one that came last would run alone.
longest=(
  ./drill ./mesh/e2e ./services/lifecycle/operation
  ./mesh/plans ./mesh/dev ./services/lifecycle/findings ./services/readmodel ./services/recovery/drift/judge ./services/nodeapi
  ./services/recovery/watchdog ./services/recovery ./services/recovery/enrol ./bench/fleet ./agent ./services/lifecycle/task/dispatch
  ./agent/session ./services/lifecycle/saga/drive ./internal/events ./mesh/cluster
)

# make check vets. Nothing reads debug information of a hundred programs, which takes a third of the time to link them,
# and nothing reads their symbol tables; stacks need neither.
flags=(-race -vet=off -ldflags=-s -timeout 40m)

# slow reports whether the start of a process takes milliseconds of processor time on this machine, as it does where each
# page that a process touches first costs a trap into a hypervisor. Each package brings processes of its own and mostly
# waits for them; on such a machine four packages, and four meshes of one package, would wait past their limits. What
# else runs on the machine is no part of it: beside it a start takes as long, and the processors are shared.
slow() {
  local program took i
  program=$(type -P true)
  took=$({
    TIMEFORMAT='%U %S'
    time for i in {1..100}; do "$program"; done
  } 2>&1)
  awk -v took="$took" 'BEGIN { split(took, t, " "); exit !((t[1] + t[2]) / 100 > 0.0025) }'
}

full_tests() {
  local wrap= beside=(-p 4)
  if slow; then
    beside=(-p 2 -parallel 2)
    echo "a process takes milliseconds to start on this machine: two packages run at a time, and two tests of each"
  fi
  build_programs || return 1
  if [[ -d devstack/sharedpg ]]; then
    wrap="go run ./devstack/sharedpg --"
  fi
  # Those that take longest come first.
  # Up to two tests that fail are run once more, alone; what passes then is
  # listed as flaky in the last lines, with its first output under bin/flaky.
  GOTEST_WRAP=$wrap GOTEST_SUMMARY=$summary GOTEST_AGAIN="$wrap go test -json -exec testexec.sh ${flags[*]}" \
    scripts/gotest.sh "${beside[@]}" "${flags[@]}" "${longest[@]}" ./...
}

totals() {
  if [[ -s $summary ]]; then cat "$summary"; else echo "0 passed, 1 failed"; fi
}

stage test full_tests
finish totals
