#!/usr/bin/env bash
# The packages with tests that repeat what they claim (testkit.Repeat) or draw it
# (rapid.Check), with the repetitions that make test leaves out and draws of this
# run's own. The last line is "N passed, N failed".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/programs.sh
source scripts/programs.sh

trap 'rm -rf "$programs"' EXIT
build_programs
mapfile -t packages < <(grep -rl --include='*_test.go' -e 'testkit\.Repeat(' -e 'rapid\.Check(' . | xargs -n 1 dirname | sort -u)
export GPUAAS_TEST_LONG=1 RAPID_CHECKS=${RAPID_CHECKS:-1000}
GOTEST_WRAP="go run ./devstack/sharedpg --" \
  scripts/gotest.sh -race -vet=off -p 2 -timeout 60m "${packages[@]}"
