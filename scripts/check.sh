#!/usr/bin/env bash
# Everything a change must pass, cheapest first. What does not build ends it at
# once; any later stage that fails lets the others still report.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

summary=$(mktemp)
trap 'rm -f "$summary"' EXIT
rows=()
failed=0

stage() {
  local name=$1 began=$SECONDS verdict=ok
  shift
  printf '\n== %s\n' "$name"
  if ! "$@"; then
    verdict=FAILED
    failed=1
  fi
  rows+=("$(printf '  %-10s %-6s %4d s' "$name" "$verdict" $((SECONDS - began)))")
  [[ $verdict == ok ]]
}

finish() {
  printf '\n'
  printf '%s\n' "${rows[@]}"
  if [[ -s $summary ]]; then cat "$summary"; else echo "0 passed, 1 failed"; fi
  exit "$failed"
}

# Without failpoints and clock offsets, which a release must not have: what
# depends on them must compile all the same.
release() {
  local out status=0
  out=$(mktemp -d)
  go vet -tags release ./... && go build -tags release -o "$out/" ./cmd/gpuaas ./cmd/gpuaas-node-agent || status=1
  rm -rf "$out"
  return "$status"
}

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

stage build go build ./... || finish
stage vet go vet ./...
stage release release
stage test-fast scripts/gotest.sh -short ./...
stage lint make --no-print-directory lint
stage gen-check make --no-print-directory gen-check
stage test full_tests
finish
