package pki

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// MaxChain bounds a chain of keys that a peer sends.
const MaxChain = 64

// TaskKind is the kind of the keys by which tasks are signed.
const TaskKind = "task_signing"

// Link is a public key of a chain. A key but the first ones is endorsed by the signature of an earlier one.
type Link struct {
	KeyID       string
	Public      []byte
	EndorsedBy  string
	Endorsement []byte
	Retired     bool // it may endorse other keys, and verifies no signature
}

// endorsementDomain begins the signed bytes of an endorsement.
const endorsementDomain = "gpuaas.mesh/key-endorsement\x00"

func endorsed(kind string, public []byte) []byte {
	return append([]byte(endorsementDomain+kind+"\x00"), public...)
}

// Endorse returns the signature by which the holders of a key of the kind learn to trust another one.
func Endorse(by ed25519.PrivateKey, kind string, public ed25519.PublicKey) []byte {
	return ed25519.Sign(by, endorsed(kind, public))
}

// Follow returns the known keys and those that follow from them: each link that one of the result has endorsed for the
// kind, over any number of steps and in any order of links. Retired links are in the result.
func Follow(kind string, known map[string]ed25519.PublicKey, links []Link) map[string]ed25519.PublicKey {
	out := make(map[string]ed25519.PublicKey, len(known)+len(links))
	maps.Copy(out, known)
	for more := true; more; {
		more = false
		for _, link := range links {
			by, ok := out[link.EndorsedBy]
			if out[link.KeyID] != nil || !ok || len(link.Public) != ed25519.PublicKeySize || link.KeyID != KeyID(link.Public) {
				continue
			}
			if ed25519.Verify(by, endorsed(kind, link.Public), link.Endorsement) {
				out[link.KeyID], more = slices.Clone(link.Public), true
			}
		}
	}
	return out
}

// ErrNoChain is returned if no endorsement leads from the keys that are held to a list of keys.
var ErrNoChain = errors.New("no key of the list is held or endorsed by one that is held")

// Advance returns the key set that replaces a held set after a list of keys: the held keys that the list does not
// retire, and the keys of the list to which endorsements lead. A key that is held and not listed stays. The returned
// ids are those of listed keys that are neither retired nor trusted. A list to which no endorsement leads from a held
// key is refused with ErrNoChain, and so is one that would leave no key. A listed key from which endorsements lead to a
// trusted one is neither trusted nor among the ids: it was held before, and dropped when a list marked it as retired.
func Advance(kind string, held *KeySet, links []Link) (*KeySet, []string, error) {
	if len(links) > MaxChain {
		return nil, nil, fmt.Errorf("follow keys: a list of %d, more than %d", len(links), MaxChain)
	}
	known := map[string]ed25519.PublicKey{}
	if held != nil {
		maps.Copy(known, held.keys)
	}
	reached := Follow(kind, known, links)
	next := maps.Clone(known)
	var unbelieved []string
	leads := false
	for _, link := range links {
		key, ok := reached[link.KeyID]
		leads = leads || ok
		switch {
		case link.Retired:
			delete(next, link.KeyID)
		case ok:
			next[link.KeyID] = key
		default:
			unbelieved = append(unbelieved, link.KeyID)
		}
	}
	before := ancestors(kind, reached, links)
	unbelieved = slices.DeleteFunc(unbelieved, func(id string) bool { return before[id] })
	if !leads {
		return nil, unbelieved, fmt.Errorf("follow keys: %w", ErrNoChain)
	}
	set, err := NewKeySet(slices.Collect(maps.Values(next))...)
	if err != nil {
		return nil, unbelieved, fmt.Errorf("follow keys: %w", err)
	}
	return set, unbelieved, nil
}

// ancestors returns the ids of the listed keys that have endorsed a reached one, over any number of steps.
func ancestors(kind string, reached map[string]ed25519.PublicKey, links []Link) map[string]bool {
	listed := make(map[string]Link, len(links))
	for _, link := range links {
		if len(link.Public) == ed25519.PublicKeySize && link.KeyID == KeyID(link.Public) {
			listed[link.KeyID] = link
		}
	}
	out := map[string]bool{}
	for id := range reached {
		for at := listed[id]; at.KeyID != ""; {
			by, ok := listed[at.EndorsedBy]
			if !ok || out[by.KeyID] || !ed25519.Verify(by.Public, endorsed(kind, at.Public), at.Endorsement) {
				break
			}
			out[by.KeyID], at = true, by
		}
	}
	return out
}
