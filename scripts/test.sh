#!/usr/bin/env bash
# All tests: those without I/O first, so that a broken build shows in a minute,
# then all of them under the race detector. The last line is "N passed, N failed".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/stages.sh
source scripts/stages.sh

summary=$(mktemp)
trap 'rm -f "$summary"' EXIT

full_tests() {
  local wrap=
  if [[ -d internal/testkit/pgserver ]]; then
    wrap="go run ./internal/testkit/pgserver --"
  fi
  # Two packages at a time: each brings processes of its own, and the timeouts
  # of the drills are meant for a machine that is busy, not drowned.
  # Up to two tests that fail are run once more, alone; what passes then is
  # listed as flaky in the last lines, with its first output under bin/flaky.
  GOTEST_WRAP=$wrap GOTEST_SUMMARY=$summary GOTEST_AGAIN="$wrap go test -json -race -timeout 25m" \
    scripts/gotest.sh -race -p 2 -timeout 25m ./...
}

totals() {
  if [[ -s $summary ]]; then cat "$summary"; else echo "0 passed, 1 failed"; fi
}

stage build go build ./... || finish totals
stage test-fast scripts/gotest.sh -short ./... || true
stage test full_tests
finish totals
