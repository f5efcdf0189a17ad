#!/usr/bin/env bash
# All tests: those without I/O first, so that a broken build shows in a minute,
# then all of them under the race detector. The last line is "N passed, N failed".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/stages.sh
source scripts/stages.sh

summary=$(mktemp)
trap 'rm -f "$summary"' EXIT

longest=(./mesh/e2e ./services/lifecycle/workspace ./drill)

full_tests() {
  local wrap=
  if [[ -d internal/testkit/pgserver ]]; then
    wrap="go run ./internal/testkit/pgserver --"
  fi
  # Three packages at a time, the longest first: each brings processes of its
  # own and mostly waits for them.
  # Up to two tests that fail are run once more, alone; what passes then is
  # listed as flaky in the last lines, with its first output under bin/flaky.
  GOTEST_WRAP=$wrap GOTEST_SUMMARY=$summary GOTEST_AGAIN="$wrap go test -json -race -timeout 25m" \
    scripts/gotest.sh -race -p 3 -timeout 25m "${longest[@]}" ./...
}

totals() {
  if [[ -s $summary ]]; then cat "$summary"; else echo "0 passed, 1 failed"; fi
}

stage build go build ./... || finish totals
stage test-fast scripts/gotest.sh -short ./... || true
stage test full_tests
finish totals
