#!/bin/sh
# What go test runs each test's program by. Where gotest.sh has set GOTMPDIR, it says
# where go builds, on disk; t.TempDir would follow it there from the memory that
# TMPDIR names.
[ -z "${GPUAAS_TEST_IN_MEMORY:-}" ] || unset GOTMPDIR
# These two are for what is built, where gotest.sh has set them.
[ -z "${GPUAAS_TEST_BUILD_GC:-}" ] || unset GOGC GOMEMLIMIT
exec "$@"
