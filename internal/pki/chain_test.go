package pki_test

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pki"
)

// chainOf makes keys, each endorsed by the one before.
func chainOf(t *testing.T, n int) ([]pki.Link, []ed25519.PrivateKey) {
	t.Helper()
	links, privates := make([]pki.Link, n), make([]ed25519.PrivateKey, n)
	for i := range links {
		public, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		privates[i], links[i] = private, pki.Link{KeyID: pki.KeyID(public), Public: public}
		if i > 0 {
			links[i].EndorsedBy, links[i].Endorsement = links[i-1].KeyID, pki.Endorse(privates[i-1], pki.TaskKind, public)
		}
	}
	return links, privates
}

func setOf(t *testing.T, links ...pki.Link) *pki.KeySet {
	t.Helper()
	var keys []ed25519.PublicKey
	for _, link := range links {
		keys = append(keys, link.Public)
	}
	set, err := pki.NewKeySet(keys...)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// TestAListOfKeysIsFollowedFromWhatIsHeld tries lists as an honest and as a hostile control plane would send them.
func TestAListOfKeysIsFollowedFromWhatIsHeld(t *testing.T) {
	links, privates := chainOf(t, 4)
	foreign, foreigners := chainOf(t, 2)
	retired := func(links []pki.Link, places ...int) []pki.Link {
		out := slices.Clone(links)
		for _, i := range places {
			out[i].Retired = true
		}
		return out
	}
	forged := slices.Clone(links)
	forged[2].Endorsement = pki.Endorse(foreigners[0], pki.TaskKind, forged[2].Public)
	renamed := slices.Clone(links)
	renamed[1].Public = foreign[0].Public
	otherKind := slices.Clone(links)
	otherKind[1].Endorsement = pki.Endorse(privates[0], "join_state", otherKind[1].Public)
	short := slices.Clone(links)
	short[1].Public = short[1].Public[:5]
	short[1].KeyID = pki.KeyID(short[1].Public)
	long, _ := chainOf(t, pki.MaxChain+1)
	forgedLast := slices.Clone(links)
	forgedLast[3].Endorsement = pki.Endorse(foreigners[0], pki.TaskKind, forgedLast[3].Public)
	branch := foreign[1]
	branch.EndorsedBy, branch.Endorsement = links[1].KeyID, pki.Endorse(privates[1], pki.TaskKind, branch.Public)
	reversed := slices.Clone(links)
	slices.Reverse(reversed)
	tests := []struct {
		name       string
		held       []pki.Link
		list       []pki.Link
		want       []pki.Link
		unbelieved []pki.Link
		refused    string
	}{
		{name: "the same key", held: links[:1], list: links[:1], want: links[:1]},
		{name: "the next key", held: links[:1], list: links[:2], want: links[:2]},
		{name: "two rotations missed", held: links[:1], list: retired(links, 0, 1, 2), want: links[3:]},
		{name: "a former key is retired", held: links[:2], list: retired(links[:2], 0), want: links[1:2]},
		{name: "reordered", held: links[:1], list: reversed, want: links},
		{name: "cut at its beginning, and what is held is in it", held: links[1:2], list: links[1:], want: links[1:]},
		{name: "cut at its end: what is held stays", held: links[:3], list: links[:2], want: links[:3]},
		{
			name: "cut in its middle", held: links[:1], list: []pki.Link{links[0], links[2], links[3]}, want: links[:1],
			unbelieved: links[2:],
		},
		{
			name: "cut behind what is held", held: links[:1], list: links[2:], unbelieved: links[2:],
			refused: pki.ErrNoChain.Error(),
		},
		{name: "an unknown root", held: links[:1], list: foreign, unbelieved: foreign, refused: pki.ErrNoChain.Error()},
		{
			name: "a key beside an unknown root", held: links[:1], list: append(slices.Clone(links[:1]), foreign...),
			want: links[:1], unbelieved: foreign,
		},
		{name: "a forged endorsement", held: links[:2], list: forged, want: links[:2], unbelieved: links[2:]},
		{name: "a key under another's name", held: links[:1], list: renamed, want: links[:1], unbelieved: links[1:]},
		{name: "an endorsement for another kind", held: links[:1], list: otherKind, want: links[:1], unbelieved: links[1:]},
		{name: "a key that is too short", held: links[:1], list: short[:2], want: links[:1], unbelieved: short[1:2]},
		{name: "from keys that were held once", held: links[3:], list: links, want: links[3:]},
		{name: "from keys that were held once, in any order", held: links[2:3], list: reversed, want: links[2:]},
		{
			name: "from a key that did not endorse what is held", held: links[3:], list: forgedLast, want: links[3:],
			unbelieved: links[:3],
		},
		{
			name: "beside what is held, from a key that was held once", held: links[3:],
			list: append(slices.Clone(links), branch), want: links[3:],
			unbelieved: []pki.Link{branch},
		},
		{name: "nothing is left", held: links[:1], list: retired(links[:1], 0), refused: "it is empty"},
		{name: "empty", held: links[:1], refused: pki.ErrNoChain.Error()},
		{name: "nothing held", list: links, unbelieved: links, refused: pki.ErrNoChain.Error()},
		{name: "too long", held: long[:1], list: long, refused: fmt.Sprintf("more than %d", pki.MaxChain)},
		{name: "too many at once", held: long[:1], list: long[:pki.MaxKeys+1], refused: "more than"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var held *pki.KeySet
			if len(tt.held) > 0 {
				held = setOf(t, tt.held...)
			}
			got, unbelieved, err := pki.Advance(pki.TaskKind, held, tt.list)
			if tt.refused != "" {
				if err == nil || got != nil || !strings.Contains(err.Error(), tt.refused) {
					t.Fatalf("set %v, error %v, want %q", got, err, tt.refused)
				}
				if tt.refused == pki.ErrNoChain.Error() && !errors.Is(err, pki.ErrNoChain) {
					t.Errorf("error %v is not ErrNoChain", err)
				}
			} else if err != nil || got.String() != setOf(t, tt.want...).String() {
				t.Fatalf("set %v, want %v, error %v", got, setOf(t, tt.want...), err)
			}
			var names []string
			for _, link := range tt.unbelieved {
				names = append(names, link.KeyID)
			}
			if !slices.Equal(unbelieved, names) {
				t.Errorf("not believed: %q, want %q", unbelieved, names)
			}
		})
	}
}
