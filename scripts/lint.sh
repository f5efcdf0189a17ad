#!/usr/bin/env bash
# golangci-lint run. What it has found in a package stands in its cache with the absolute paths of files, so a cache
# serves one directory only. A new clone would lint everything: it therefore lints a copy of the tree, in a directory of
# this user that clones use in turn, with the cache beside it. Paths in the output are relative to the tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
linter=$PWD/bin/golangci-lint

# in_place lints the tree itself, with a cache of its own.
in_place() {
  GOLANGCI_LINT_CACHE=$PWD/bin/.lint-cache exec "$linter" run "$@"
}

# Flags may name files, or change them, and a path may lead out of the copy.
for arg in "$@"; do
  case $arg in
    -* | /* | .. | ../* | */../* | */..) in_place "$@" ;;
  esac
done
[[ $EUID -eq 0 || -n ${XDG_CACHE_HOME:-}${HOME:-} ]] || in_place "$@"
type -P flock tar >/dev/null && [[ $(git rev-parse --show-toplevel 2>/dev/null) == "$PWD" ]] || in_place "$@"
# shellcheck source=scripts/env.sh
source scripts/env.sh
shared=$(mesh_cache)/lint
mkdir -p "$shared/cache" 2>/dev/null && [[ -w $shared && -w $shared/cache ]] || in_place "$@"
[[ ! -e $shared/lock || -w $shared/lock ]] || in_place "$@"

exec 9>>"$shared/lock"
# A lint in another clone may have the least right to the processors.
flock -w 60 9 || in_place "$@"
# The linter forgets what it has not used for five days; in between a cache grows with each change of a package that
# many import.
if (($(du -sk "$shared/cache" | cut -f1) > 1 << 20)); then
  rm -rf "$shared/cache"
fi
# Removed files that git still lists are left out. Times are those of the copying: of two files of one size, from two
# clones, none is taken for the other.
rm -rf "$shared/tree"
mkdir "$shared/tree"
git ls-files -z --cached --others --exclude-standard |
  while IFS= read -r -d '' file; do [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"; done |
  tar --null --ignore-failed-read -T - -cf - | tar -xmf - -C "$shared/tree"
cd "$shared/tree"
# Without the lock: a process of the linter that stays must not keep it.
GOLANGCI_LINT_CACHE=$shared/cache "$linter" run "$@" 9>&-
