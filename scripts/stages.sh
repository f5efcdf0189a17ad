# shellcheck shell=bash
# Sourced by the scripts that run stages: each is timed, and all are listed at
# the end with their verdict.
rows=()
failed=0

# stage NAME COMMAND ... runs a command and keeps its verdict.
stage() {
  local name=$1 began=$SECONDS verdict=ok
  shift
  printf '\n== %s\n' "$name"
  if ! "$@"; then
    verdict=FAILED
    failed=1
  fi
  rows+=("$(printf '  %-10s %-6s %4d s' "$name" "$verdict" $((SECONDS - began)))")
  [[ $verdict == ok ]]
}

# finish [COMMAND ...] lists the stages, runs a last command and exits.
finish() {
  printf '\n'
  printf '%s\n' "${rows[@]}"
  "$@"
  exit "$failed"
}
