#!/usr/bin/env bash
# Installs what the tests need and this machine lacks: a C compiler (the race
# detector needs cgo), git, openssl, curl, Postgres, Redis. As root by apt-get, without
# starting or creating any service; otherwise Postgres and Redis go into a cache
# directory of the user's. A machine that has everything is left alone. With
# arguments it looks after those packages only: scripts/deps.sh redis-server.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

if ! command -v go >/dev/null; then
  echo "Go is needed (the version is in go.mod): https://go.dev/dl/" >&2
  exit 1
fi

wanted=" $* "
packages=()
has() { command -v "$1" >/dev/null; }
# need adds packages unless others were asked for.
need() {
  local package
  for package in "$@"; do
    if [[ $wanted == "  " || $wanted == *" $package "* ]]; then packages+=("$package"); fi
  done
}
has gcc || has clang || need gcc libc6-dev
has git || need git ca-certificates
has openssl || need openssl
has curl || need curl ca-certificates
[[ -n $MESH_POSTGRES ]] || need postgresql
has redis-server || need redis-server
[[ ${#packages[@]} -gt 0 ]] || exit 0

# install_as_root keeps the packages from starting daemons: policy-rc.d refuses
# them all, and Debian's Postgres is told not to create a cluster of its own.
install_as_root() {
  local policy=/usr/sbin/policy-rc.d cluster=/etc/postgresql-common/createcluster.d/gpuaas.conf
  local undo=()
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 0755 "$policy"
    undo+=("$policy")
  fi
  if [[ ! -e $cluster ]]; then
    mkdir -p "$(dirname "$cluster")"
    echo 'create_main_cluster = false' >"$cluster"
    undo+=("$cluster")
  fi
  # shellcheck disable=SC2064 # the list is complete here, and local
  trap "rm -f ${undo[*]:-}" EXIT
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@"
}

# unpack_redis takes the distribution's package apart without installing it.
unpack_redis() {
  local target work pkg
  target=$(mesh_cache)/redis
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  (cd "$work" && apt-get download -qq redis-server redis-tools \
    libjemalloc2 liblzf1 liblua5.1-0 lua-bitop lua-cjson libatomic1 libhiredis0.14)
  mkdir -p "$work/unpacked" "$target/bin"
  for pkg in "$work"/*.deb; do dpkg -x "$pkg" "$work/unpacked"; done
  rm -rf "$target/unpacked"
  mv "$work/unpacked" "$target/unpacked"
  cat >"$target/bin/redis-server" <<EOF
#!/bin/sh
LD_LIBRARY_PATH=$(echo "$target"/unpacked/usr/lib/*-linux-gnu) exec "$target/unpacked/usr/bin/redis-server" "\$@"
EOF
  chmod 0755 "$target/bin/redis-server"
  "$target/bin/redis-server" --version >&2
}

if [[ $EUID -eq 0 ]] && has apt-get; then
  echo "installing ${packages[*]}" >&2
  if install_as_root "${packages[@]}"; then
    exit 0
  fi
  echo "apt-get failed; trying without it" >&2
fi

missing=0
for package in "${packages[@]}"; do
  case $package in
    postgresql) scripts/postgres.sh || missing=1 ;;
    redis-server) (has apt-get && has dpkg && unpack_redis) || missing=1 ;;
    *)
      echo "$package is needed and was not found" >&2
      missing=1
      ;;
  esac
done
if [[ $missing -ne 0 ]]; then
  echo "install these, then run make again: ${packages[*]}" >&2
  exit 1
fi
