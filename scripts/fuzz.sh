#!/usr/bin/env bash
# Runs every fuzzer, or those of the packages that are named (./internal/bundle), for FUZZ_TIME each (60s). An input
# that fails is kept under testdata/fuzz of the package, where it belongs into the repository with the repair.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh
# shellcheck source=scripts/stages.sh
source scripts/stages.sh

fuzz() { # DIR NAME
  go test -run '^$' -fuzz "^$2\$" -fuzztime "${FUZZ_TIME:-60s}" "$1"
}

while IFS=: read -r file name; do
  stage "$(dirname "$file") $name" fuzz "$(dirname "$file")" "$name"
done < <(grep -ro --include='*_test.go' -e '^func Fuzz[A-Za-z0-9]*' "${@:-.}" | sed 's|^\([^./]\)|./\1|; s/func //' | sort -u)
finish
