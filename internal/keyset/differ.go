package keyset

import (
	"crypto/ed25519"
	"fmt"
	"path/filepath"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// difference is one way in which a replica's files differ from the set.
type difference struct {
	what, remedy string
	starts       bool // it is a problem, but the replica starts
}

// differ returns the error with which a replica refuses to start.
func differ(p *part, d difference) error {
	return fault.New(commonv1.Reason_REASON_SIGNING_KEYS_DIFFER,
		fmt.Sprintf("the keys of %s differ from the set of the mesh: %s", p.Kind, d.what),
		fault.Remedy(d.remedy))
}

// unreadable returns the error for a directory or a file of keys that cannot be read. It does not wrap the cause, which
// the start would take for one of the database's connection and wait for its end.
func unreadable(kind Kind, path string, err error) error {
	return fault.New(commonv1.Reason_REASON_SIGNING_KEYS_DIFFER,
		fmt.Sprintf("the keys of %s cannot be read from %s: %s", kind, path, err),
		fault.Remedy("give this process the right to read "+path+", or copy it from a replica that holds it"))
}

// malformed returns the error for a file that was read and has no keys of the kind.
func malformed(kind Kind, path string, err error) error {
	return fault.New(commonv1.Reason_REASON_SIGNING_KEYS_DIFFER,
		fmt.Sprintf("%s has no keys of %s: %s", path, kind, err),
		fault.Remedy("copy it from a replica whose file is whole"))
}

// differs lists how the replica's files differ from the set. A key in the state verify_only may be missing: it does not
// sign before this replica has it.
func (p *part) differs(rows, all []Key, trusted map[string]ed25519.PublicKey, bad map[string]string) []difference {
	var out []difference
	for _, row := range rows {
		switch {
		case p.Signs && row.State == Signing && p.private(row.KeyID) == nil:
			what := fmt.Sprintf("key %s signs, and its file %s is not in %s", row.KeyID, row.File, p.Files.Dir)
			if why := bad[row.File]; why != "" {
				what = fmt.Sprintf("key %s signs, and its file %s in %s is refused: %s", row.KeyID, row.File, p.Files.Dir, why)
			}
			out = append(out, difference{what: what, remedy: fmt.Sprintf(
				"copy the file %s from a replica that holds it into %s; `gpuaas keys list` names them", row.File, p.Files.Dir)})
		case row.State != Retired && row.State != VerifyOnly && trusted[row.KeyID] == nil:
			out = append(out, p.untrusted(row))
		}
	}
	returning := p.orphans(rows)
	for _, key := range p.keys {
		if slices.ContainsFunc(rows, func(row Key) bool { return row.KeyID == key.id }) {
			continue
		}
		if i := slices.IndexFunc(all, func(row Key) bool { return row.KeyID == key.id }); i >= 0 {
			out = append(out, difference{
				what: fmt.Sprintf("the file %s in %s holds key %s, which is a key of %s: no key serves two kinds", key.file,
					p.Files.Dir, key.id, all[i].Kind),
				remedy: fmt.Sprintf("remove the file %s from %s", key.file, p.Files.Dir),
			})
			continue
		}
		d := difference{
			what:   fmt.Sprintf("the file %s in %s holds key %s, which the set does not have", key.file, p.Files.Dir, key.id),
			remedy: fmt.Sprintf("remove the file %s from %s; new keys are made by `gpuaas keys rotate`", key.file, p.Files.Dir),
		}
		if slices.ContainsFunc(returning, func(orphan privateKey) bool { return orphan.id == key.id }) {
			continue // a key of a rotation that is not over, or that the database lost
		}
		out = append(out, d)
	}
	return out
}

func (p *part) untrusted(row Key) difference {
	if !p.Signs {
		return difference{
			what:   fmt.Sprintf("key %s is used, and no key of %s vouches for it", row.KeyID, p.Pinned),
			remedy: fmt.Sprintf("replace %s by that of a replica that runs", p.Pinned),
		}
	}
	return difference{
		what: fmt.Sprintf("key %s is needed to verify what it has signed, and its file %s is not in %s", row.KeyID,
			row.File, p.Files.Dir),
		remedy: fmt.Sprintf("copy the file %s from a replica that holds it into %s", filepath.Base(row.File), p.Files.Dir),
	}
}
