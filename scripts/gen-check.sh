#!/usr/bin/env bash
# Fails if what is committed in gen/ is not what the sources generate, or if a proto change breaks what is already spoken.
# It generates beside the tree, so that it changes nothing in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

bin/buf generate --output "$work"
if ! diff -r -u "$work/gen" gen >"$work/diff" 2>&1; then
  head -60 "$work/diff"
  echo "gen/ is not what proto/ generates: run make gen" >&2
  exit 1
fi

untracked=$(git ls-files --others --exclude-standard -- gen 2>/dev/null || true)
if [[ -n $untracked ]]; then
  printf 'generated, but not in the repository:\n%s\n' "$untracked" >&2
  exit 1
fi

# Against the commit this work started from: main's when it is another one,
# else the one before. A shallow or first clone has none, and nothing to break.
against=
here=$(git rev-parse --verify -q HEAD || true)
for ref in origin/main main HEAD~1; do
  commit=$(git rev-parse --verify -q "$ref^{commit}" || true)
  if [[ -n $commit && $commit != "$here" ]]; then
    against=$(git merge-base "$commit" HEAD 2>/dev/null || true)
    break
  fi
done
if [[ -n $against ]] && git cat-file -e "$against:buf.yaml" 2>/dev/null &&
  [[ -n $(git ls-tree -r --name-only "$against" -- proto) ]]; then
  mkdir "$work/against"
  git archive "$against" | tar -x -C "$work/against"
  bin/buf breaking --against "$work/against"
else
  echo "no earlier proto to compare with" >&2
fi
echo "generated code is up to date"
