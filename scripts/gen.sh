#!/usr/bin/env bash
# Regenerates everything that is generated: gen/ from proto/. The tools are those
# of bin/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin/buf generate
