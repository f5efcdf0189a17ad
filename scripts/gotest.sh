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

# Random tests draw the same in every run, so that a change fails by what it
# changed; make test-long draws anew.
[[ -n ${GPUAAS_TEST_LONG:-} ]] || export RAPID_SEED=${RAPID_SEED:-1}

# With -short the tests that need I/O are left out on purpose.
flags=()
[[ ${CI:-} != true || " $* " == *" -short "* ]] || flags+=(-skips-fail)

# What tests write is synced at each commit and gone a minute later: in memory it
# costs a tenth. A file system in memory is taken where it runs programs and has
# room; TMPDIR, if set, is kept. Directories of runs that were killed go.
in_memory() {
  local shm=/dev/shm dir free available
  [[ -z ${TMPDIR:-} && -w $shm ]] || return 0
  [[ $(stat -f -c %T "$shm") == tmpfs ]] || return 0
  free=$(($(stat -f -c '%a * %S' "$shm") >> 30))
  available=$(($(awk '/^MemAvailable:/ {print $2}' /proc/meminfo) >> 20))
  ((free >= 6 && available >= 10)) || return 0
  for dir in "$shm"/gt.*; do
    [[ -f $dir/lock && -O $dir/lock ]] || continue
    flock -n "$dir/lock" rm -rf "$dir" || true
  done
  dir=$(mktemp -d "$shm/gt.XXXX") || return 0
  chmod 711 "$dir" # servers and workloads drop to other users
  exec 9>"$dir/lock"
  flock -n 9
  if ! install -m 755 "$(type -P true)" "$dir/true" || ! "$dir/true"; then
    rm -rf "$dir"
    return 0
  fi
  memory=$dir
  trap leave EXIT
  # What is built is large, and stays on disk: testexec.sh takes GOTMPDIR from the tests again.
  [[ -n ${GOTMPDIR:-} ]] || export GOTMPDIR=/tmp GPUAAS_TEST_IN_MEMORY=1
  export TMPDIR=$dir
}
# What a failed test kept for inspection stays until the next run.
leave() {
  local code=$?
  if [[ $code -ne 0 && ${CI:-} != true ]]; then
    echo "kept until the next run: $memory" >&2
  else
    rm -rf "$memory"
  fi
}
[[ " $* " == *" -short "* ]] || in_memory

# Compilers and linkers spend a tenth of their time on the collection of garbage: below a gigabyte they do
# without. testexec.sh takes both from the tests again.
[[ -n ${GOGC:-}${GOMEMLIMIT:-} ]] || export GOGC=off GOMEMLIMIT=1GiB GPUAAS_TEST_BUILD_GC=1

mkdir -p bin
go build -o bin/testreport ./internal/tools/testreport
set +e +o pipefail
# shellcheck disable=SC2086 # the wrapper is a command with its arguments
# testexec.sh is found by PATH: go test splits what -exec is given at spaces.
export PATH="$PWD/scripts:$PATH"
# A process that outlives the run must not keep the lock: 9 is closed for all.
${GOTEST_WRAP:-} go test -json -exec testexec.sh "$@" 9>&- |
  bin/testreport -summary "${GOTEST_SUMMARY:-}" -again "${GOTEST_AGAIN:-}" "${flags[@]}" 9>&-
status=("${PIPESTATUS[@]}")
case ${status[1]} in
  0) exit "${status[0]}" ;;
  3) exit 0 ;; # what failed has passed the second time
  *) exit "${status[1]}" ;;
esac
