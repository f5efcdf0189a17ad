#!/usr/bin/env bash
# go test with readable failures and a last line "N passed, N failed". All
# arguments go to go test. With CI=true a skipped test is a failure,
# unless -short asked for it.
#   GOTEST_WRAP     a command that runs go test as its child
#   GOTEST_SUMMARY  a file that gets the last line too
#   GOTEST_AGAIN    the command, without packages, that runs a failed test once
#                   more; without it none is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

# With -short the tests that need I/O are left out on purpose.
flags=()
[[ ${CI:-} != true || " $* " == *" -short "* ]] || flags+=(-skips-fail)

mkdir -p bin
go build -o bin/testreport ./internal/tools/testreport
set +e +o pipefail
# shellcheck disable=SC2086 # the wrapper is a command with its arguments
${GOTEST_WRAP:-} go test -json "$@" |
  bin/testreport -summary "${GOTEST_SUMMARY:-}" -again "${GOTEST_AGAIN:-}" "${flags[@]}"
status=("${PIPESTATUS[@]}")
case ${status[1]} in
  0) exit "${status[0]}" ;;
  3) exit 0 ;; # what failed has passed the second time
  *) exit "${status[1]}" ;;
esac
