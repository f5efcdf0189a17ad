#!/bin/sh
# What go test runs each test's program by. Where gotest.sh has set GOTMPDIR, it says
# where go builds, on disk; t.TempDir would follow it there from the memory that
# TMPDIR names.
[ -z "${GPUAAS_TEST_IN_MEMORY:-}" ] || unset GOTMPDIR
# GOGC is for what is built, where gotest.sh has set it.
[ -z "${GPUAAS_TEST_BUILD_GOGC:-}" ] || unset GOGC
exec "$@"
