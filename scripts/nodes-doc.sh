#!/usr/bin/env bash
# Makes docs/nodes-in-each-row.md anew from what `gpuaas drill run --all --nodes-dir D` has written into D. The headings
# and texts of the document stay; the output below them is replaced. Lines that say nothing about a row are left out, and
# directories of the drills' meshes stand as those of an installed agent.
set -euo pipefail

if [[ $# -ne 1 || ! -d $1 ]]; then
	echo "usage: $0 DIRECTORY" >&2
	exit 2
fi
doc=$(dirname "$0")/../docs/nodes-in-each-row.md
new=$(mktemp "$doc.XXXXXX")
trap 'rm -f "$new"' EXIT

left_out='^(NAME |WORKSPACE|ID |AGENT |REPLICA|SLOTS|GPUS|HEARTBEAT|SINCE|REASON *$|counters|host  )'
left_out+='|^verdict: (reason|family|next action)|^session: peer|^gate: (epochs|workspace)'

# shown FILE: what the document has of a drill's output.
shown() {
	grep -Ev "$left_out" "$1" |
		sed -E -e 's#[^ ]*/gpuaas-drill-[0-9]+/mesh/agents/[^/ ]+/state#/var/lib/gpuaas#g' \
			-e 's#[^ ]*/gpuaas-drill-[0-9]+/mesh/agents/[^/ ]+/etc#/etc/gpuaas#g' -e 's/[[:space:]]+$//'
}

file='' inside=''
while IFS= read -r line; do
	if [[ $line =~ ^'## Row '([0-9]+)': `'(.*)'`'$ ]]; then
		file=$1/$(printf '%02d-%s.txt' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}")
		[[ -f $file ]] || echo "$file is missing: the document keeps what it has" >&2
	fi
	if [[ $line == '```text' && -f $file ]]; then
		inside=yes
		printf '%s\n' "$line"
		shown "$file"
	elif [[ $line == '```' ]]; then
		inside=''
		printf '%s\n' "$line"
	elif [[ -z $inside ]]; then
		printf '%s\n' "$line"
	fi
done <"$doc" >"$new"

if grep -n 'gpuaas-drill-' "$new"; then
	echo "a path of a drill is left" >&2
	exit 1
fi
for file in "$1"/*.txt; do
	name=$(basename "$file" .txt)
	grep -q "^## Row $((10#${name%%-*})): \`${name#*-}\`$" "$new" || echo "the document has no text for $name" >&2
done
chmod 644 "$new"
mv "$new" "$doc"
trap - EXIT
