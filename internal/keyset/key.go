package keyset

import (
	"crypto/ed25519"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// Kind names the messages or certificates that a key signs.
type Kind string

// The kinds. Recovery signs join states and recovery tokens, lifecycle signs tasks, and readmodel signs assertions of
// the person on whose behalf it calls. The keys of Services are the issuers of services' certificates: no service has
// their private halves (see Certificates).
const (
	JoinState     Kind = "join_state"
	TaskSigning   Kind = pki.TaskKind
	Assertion     Kind = "assertion"
	Services      Kind = pki.ServicesKind
	RecoveryToken Kind = "recovery_token"
)

// The states of a key, in their order.
const (
	VerifyOnly     = "verify_only"
	Signing        = "signing"
	VerifyingAfter = "verifying_after"
	Retired        = "retired"
)

// Key is a row of mesh.signing_key.
type Key struct {
	Kind        Kind      `db:"kind"`
	KeyID       string    `db:"key_id"`
	PublicKey   []byte    `db:"public_key"`
	State       string    `db:"state"`
	File        string    `db:"file"`
	EndorsedBy  string    `db:"endorsed_by"`
	Endorsement []byte    `db:"endorsement"`
	MadeBy      string    `db:"made_by"`
	MadeAt      time.Time `db:"made_at"`
	StateAt     time.Time `db:"state_at"`
	NeededBy    string    `db:"needed_by"`
	Returned    bool      `db:"returned"` // stored again from its file after a restore: what it has signed is unknown
}

// First reports whether the key existed before the set was kept.
func (k Key) First() bool { return k.EndorsedBy == "" }

// Endorse returns the signature, with the key by, of another key of the kind: a peer that trusts the first comes to
// trust the other.
func Endorse(by ed25519.PrivateKey, kind Kind, public ed25519.PublicKey) []byte {
	return pki.Endorse(by, string(kind), public)
}

// Links returns the rows of a kind as links of its chain.
func Links(kind Kind, rows []Key) []pki.Link {
	var out []pki.Link
	for _, row := range rows {
		if row.Kind == kind {
			out = append(out, pki.Link{
				KeyID: row.KeyID, Public: row.PublicKey, EndorsedBy: row.EndorsedBy, Endorsement: row.Endorsement,
				Retired: row.State == Retired,
			})
		}
	}
	return out
}

// Trusted returns the keys that follow from those that are pinned: each key of rows that a trusted one has endorsed,
// over any number of steps. Keys that are retired according to rows are removed from the result at the end: they may
// endorse, but verify nothing.
func Trusted(kind Kind, pinned map[string]ed25519.PublicKey, rows []Key) map[string]ed25519.PublicKey {
	out := pki.Follow(string(kind), pinned, Links(kind, rows))
	for _, row := range rows {
		if row.Kind == kind && row.State == Retired {
			delete(out, row.KeyID)
		}
	}
	return out
}

// keySet returns a set of the keys, nil if there are none.
func keySet(keys map[string]ed25519.PublicKey) *pki.KeySet {
	set, err := pki.NewKeySet(slices.Collect(maps.Values(keys))...)
	if err != nil {
		return nil // there are none, or more than a set takes, before which rotations are refused
	}
	return set
}
