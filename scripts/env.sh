# shellcheck shell=bash
# Sourced by the scripts and by make: where this machine's Postgres and Redis
# are, and how Go builds. It installs nothing, and sets PATH, GOFLAGS, MESH_POSTGRES,
# and GPUAAS_PG_BIN if the cache is all there is.

# The cache is machine-wide for root, because Postgres then runs under another
# uid, which may not enter root's home.
mesh_cache() {
  if [[ $EUID -eq 0 ]]; then
    echo /var/cache/gpuaas
  else
    echo "${XDG_CACHE_HOME:-$HOME/.cache}/gpuaas"
  fi
}

is_postgres() {
  [[ -x $1/initdb && -x $1/postgres && -x $1/pg_ctl ]]
}

# find_postgres prints the directory of initdb, pg_ctl and postgres: the one
# named by hand, the one on PATH, the system's newest, the cached one.
find_postgres() {
  local dir
  if [[ -n ${GPUAAS_PG_BIN:-} ]]; then
    is_postgres "$GPUAAS_PG_BIN" && echo "$GPUAAS_PG_BIN"
    return
  fi
  while read -r dir; do
    if [[ -n $dir ]] && is_postgres "$dir"; then
      echo "$dir"
      return 0
    fi
  done < <(
    dirname "$(command -v initdb || echo /nonexistent/initdb)"
    pg_config --bindir 2>/dev/null || true
    printf '%s\n' /usr/lib/postgresql/*/bin /usr/pgsql-*/bin \
      /opt/homebrew/opt/postgresql*/bin /usr/local/opt/postgresql*/bin | sort -rV
    echo "$(mesh_cache)/postgres/bin"
  )
  return 1
}

PATH="$PATH:$(mesh_cache)/redis/bin"
export PATH
# Programs look on the machine by themselves; only the cache needs a hint.
MESH_POSTGRES=$(find_postgres) || MESH_POSTGRES=
if [[ $MESH_POSTGRES == "$(mesh_cache)"/* ]]; then
  export GPUAAS_PG_BIN=$MESH_POSTGRES
fi

# Without the names of directories in them, what one clone has compiled is taken
# from the build cache by the next. A user's own flags stay.
GOFLAGS=$(go env GOFLAGS 2>/dev/null || echo "${GOFLAGS:-}")
[[ " $GOFLAGS " == *" -trimpath "* ]] || GOFLAGS="${GOFLAGS:+$GOFLAGS }-trimpath"
export GOFLAGS
