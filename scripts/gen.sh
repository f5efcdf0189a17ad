#!/usr/bin/env bash
# Regenerates everything that is generated: gen/ from proto/, and each service's
# internal/db from its queries. The tools are those of bin/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin/buf generate
if grep -q '^[^#]*engine:' sqlc.yaml; then
  bin/sqlc generate
fi
