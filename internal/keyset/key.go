package keyset

import (
	"crypto/ed25519"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// Kind is what a key signs.
type Kind string

// The kinds. Recovery signs join states, lifecycle signs tasks, and readmodel signs on whose behalf it calls.
const (
	JoinState   Kind = "join_state"
	TaskSigning Kind = "task_signing"
	Assertion   Kind = "assertion"
)

// Kinds returns all kinds.
func Kinds() []Kind { return []Kind{JoinState, TaskSigning, Assertion} }

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
}

// endorsementDomain begins what is signed to endorse a key.
const endorsementDomain = "gpuaas.mesh/key-endorsement\x00"

func endorsed(kind Kind, public []byte) []byte {
	return append([]byte(endorsementDomain+string(kind)+"\x00"), public...)
}

// Endorse returns the signature by which the holders of a key of the kind learn to trust another one.
func Endorse(by ed25519.PrivateKey, kind Kind, public ed25519.PublicKey) []byte {
	return ed25519.Sign(by, endorsed(kind, public))
}

// Trusted returns the keys that follow from those that are pinned: each key of rows that a trusted one has endorsed, over any number of steps. Of
// the result those that rows call retired are taken out at the end; they may endorse, and verify nothing.
func Trusted(kind Kind, pinned map[string]ed25519.PublicKey, rows []Key) map[string]ed25519.PublicKey {
	out := maps.Clone(pinned)
	for more := true; more; {
		more = false
		for _, row := range rows {
			by, ok := out[row.EndorsedBy]
			if row.Kind != kind || out[row.KeyID] != nil || !ok || row.KeyID != pki.KeyID(row.PublicKey) {
				continue
			}
			if ed25519.Verify(by, endorsed(kind, row.PublicKey), row.Endorsement) {
				out[row.KeyID], more = slices.Clone(row.PublicKey), true
			}
		}
	}
	for _, row := range rows {
		if row.Kind == kind && row.State == Retired {
			delete(out, row.KeyID)
		}
	}
	return out
}

// keySet makes a set of the keys; nil of none.
func keySet(keys map[string]ed25519.PublicKey) *pki.KeySet {
	set, err := pki.NewKeySet(slices.Collect(maps.Values(keys))...)
	if err != nil {
		return nil // there is none, or there are more than a set takes: rotations are refused long before
	}
	return set
}
