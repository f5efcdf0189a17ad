#!/usr/bin/env bash
# What a change must pass beside its tests. What does not build ends it at once;
# any later stage that fails lets the others still report. The linter vets.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/stages.sh
source scripts/stages.sh

# Without failpoints, clock offsets and facts roots, which a release must not have: what
# depends on them must still compile. Vet is for the packages that have
# files of either kind; the linter vets everything else.
release() {
  local out status=0
  out=$(mktemp -d)
  go build -tags release -o "$out/" ./cmd/gpuaas ./cmd/gpuaas-node-agent &&
    go vet -tags release ./internal/wallclock ./agent/hostfacts ./internal/failpoint || status=1
  rm -rf "$out"
  return "$status"
}

# The linter holds the syntax and types of all packages: collecting garbage as often
# as a service does takes a third of its time.
export GOGC=${GOGC:-400} GOMEMLIMIT=${GOMEMLIMIT:-5GiB}

stage release release || finish true
# A module of its own, which `./...` leaves out.
stage peers go vet -C bench/peers ./...
stage lint make --no-print-directory lint
stage gen-check make --no-print-directory gen-check
finish true
