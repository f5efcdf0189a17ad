#!/bin/sh
# What go test runs each test's program by. GOTMPDIR says where go builds, on disk;
# t.TempDir would follow it there from the memory that TMPDIR names.
unset GOTMPDIR
exec "$@"
