# shellcheck shell=bash
# Sourced by the scripts that run tests of several packages.

# The directory that build_programs has made, which the caller removes.
programs=

# build_programs builds the two programs once, for all packages whose tests run
# them: each would build and link them for itself. GPUAAS_TEST_BIN names their
# directory; one that is given is used as it is.
build_programs() {
  [[ -z ${GPUAAS_TEST_BIN:-} ]] || return 0
  programs=$(mktemp -d) || return 1
  chmod 711 "$programs" # workloads run the agent's program as other users
  go build -ldflags '-s -w' -o "$programs/" ./cmd/gpuaas ./cmd/gpuaas-node-agent || return 1
  export GPUAAS_TEST_BIN=$programs
}

# How long the race detector waits at the end of each process, so that others
# may still report: a second if it is not told.
export GORACE=${GORACE:-atexit_sleep_ms=50}
