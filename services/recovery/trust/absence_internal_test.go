package trust

import (
	"context"
	"slices"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// keyless is an authority that answers and does not sign.
type keyless struct{ ca.Signer }

func (keyless) Sign(context.Context, ca.SignRequest) (ca.Issued, error) {
	return ca.Issued{}, fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "its key is away")
}

// notices returns what was passed on of the absence of the authority: for each a begin or an end.
func (k *kit) notices() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []string
	for _, s := range k.absences {
		switch {
		case s.Until.IsZero() && !s.From.IsZero():
			out = append(out, "begin")
		case !s.Until.IsZero():
			out = append(out, "end")
		default:
			out = append(out, "neither")
		}
	}
	return out
}

func (k *kit) now() time.Time {
	k.t.Helper()
	now, err := pg.Value[time.Time](k.t.Context(), k.db.Pool(pg.RoleRecovery), readClock)
	if err != nil {
		k.t.Fatal(err)
	}
	return now
}

// TestAnAuthorityThatIsAwayIsAStop: three checks in a row that it does not answer, or answers and does not sign, begin
// it, once, and the first certificate that it signs ends it, also after another replica has taken over.
func TestAnAuthorityThatIsAwayIsAStop(t *testing.T) {
	for name, away := range map[string]func(k *kit){
		"no answer":    func(k *kit) { k.authority.become(nil, true) },
		"no signature": func(k *kit) { k.authority.become(keyless{k.issuers.nodes}, false) },
	} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			is := func(when string, want ...string) {
				t.Helper()
				if got := k.notices(); !slices.Equal(got, want) {
					t.Fatalf("%s: told %v, want %v", when, got, want)
				}
			}
			away(k)
			p := k.preflight()
			k.round(p, 2)
			is("two failures")
			k.authority.become(k.issuers.nodes, false)
			k.round(p, 3)
			is("it was there again", "end") // that of an earlier holder
			p.canary.Store = nil            // the next check has another one signed
			before := k.now()
			away(k)
			k.round(p, 5)
			is("five failures", "end", "begin")
			k.authority.become(keyless{k.issuers.nodes}, false)
			k.round(p, 1)
			is("it answers and does not sign", "end", "begin")
			next := k.preflight()
			k.authority.become(k.issuers.nodes, false)
			k.round(next, 3)
			is("it signs", "end", "begin", "end")
			if from, until := k.absences[1].From, k.absences[2].Until; !from.Before(until) {
				t.Errorf("from %s until %s", from, until)
			}
			if from := k.absences[1].From; from.Before(before) != (name == "no signature") {
				t.Errorf("it was away after %s, and counts from %s", before, from)
			}
		})
	}
}
