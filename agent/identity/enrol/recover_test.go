package enrol_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/recoverykey"
)

const codeMissing = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_TOKEN_MISSING

// recoverable is a host that was enrolled with grt_canary-0, and holds grt_canary-1 as the next of it.
func recoverable(t *testing.T) *host {
	t.Helper()
	h := newHost(t, "recovery", false)
	h.answer = func(_ int, ok *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
		ok.RecoveryToken = "grt_canary-0"
		return ok, nil
	}
	if err := h.enroller().Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	first := h.requests[0]
	if len(first.GetRecoveryPublicKey()) == 0 || len(first.GetRecoveryProof()) != 0 {
		t.Errorf("the first enrolment has key %x and proof %x", first.GetRecoveryPublicKey(), first.GetRecoveryProof())
	}
	key, err := h.store.RenewalKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := h.nodes.SignCSR(csr, h.nodeID, time.Now(), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if err := h.store.StoreIssued(chain, "grt_canary-1"); err != nil {
		t.Fatal(err)
	}
	h.calls, h.requests, h.codes, h.at = nil, nil, nil, nil
	clear(h.keys)
	return h
}

// sent returns the tokens of the requests, after it has checked their proofs and that each token had one key.
func (h *host) sent() []string {
	h.t.Helper()
	var out []string
	for _, r := range h.requests {
		out = append(out, r.GetToken())
		if err := recoverykey.Verify(r.GetRecoveryPublicKey(), r.GetToken(), r.GetCsr(), r.GetRecoveryProof()); err != nil {
			h.t.Error(err)
		}
	}
	if len(h.keys) > 1 {
		h.t.Errorf("%d keys", len(h.keys))
	}
	return out
}

func recoveries(t *testing.T, e *enrol.Enroller, n int) enrol.Recovery {
	t.Helper()
	var last enrol.Recovery
	for range n {
		var err error
		if last, err = e.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if last.Wait == 0 {
			break
		}
		time.Sleep(last.Wait)
	}
	return last
}

// TestALostReplyOfARecoveryIsAskedForAgain checks that a request whose reply was lost is repeated with the same token
// and the same key, also after a restart.
func TestALostReplyOfARecoveryIsAskedForAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := recoverable(t)
		defer h.end()
		h.answer = func(n int, ok *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
			if n < 3 {
				return nil, fault.ToConnect(fault.New(commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT, ""), "")
			}
			ok.RecoveryToken = "grt_canary-2"
			return ok, nil
		}
		if got := recoveries(t, h.enroller(), 2); !got.Sent || got.Outcome != "enrollment_in_flight" ||
			got.Wait < 2*time.Second {
			t.Errorf("%+v", got)
		}
		if err := h.store.Close(); err != nil {
			t.Fatal(err)
		}
		h.open()
		if got := recoveries(t, h.enroller(), 2); got.Outcome != enrol.Succeeded {
			t.Errorf("%+v", got)
		}
		for _, token := range h.sent() {
			if token != "grt_canary-1" {
				t.Errorf("sent %s", token)
			}
		}
		if r := h.requests[0]; r.GetCorrelationId() != "correlation" {
			t.Errorf("correlation id %q", r.GetCorrelationId())
		}
		if held, err := h.store.RecoveryTokens(); err != nil || len(held) != 1 || held[0] != "grt_canary-2" {
			t.Errorf("tokens %q, %v", held, err)
		}
	})
}

// TestARefusedTokenIsFollowedByTheFormer checks that after a refused token the former one is sent at once, with the key
// that the first was sent with.
func TestARefusedTokenIsFollowedByTheFormer(t *testing.T) {
	for _, reason := range []commonv1.Reason{
		commonv1.Reason_REASON_TOKEN_NOT_YET_VALID, commonv1.Reason_REASON_TOKEN_INVALID,
		commonv1.Reason_REASON_TOKEN_EXPIRED, commonv1.Reason_REASON_TOKEN_CONSUMED,
	} {
		t.Run(reason.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := recoverable(t)
				defer h.end()
				h.answer = func(n int, ok *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
					if n == 0 {
						return nil, fault.ToConnect(fault.New(reason, ""), "")
					}
					return ok, nil
				}
				begin := time.Now()
				if got := recoveries(t, h.enroller(), 2); got.Outcome != enrol.Succeeded {
					t.Errorf("%+v", got)
				}
				if took := time.Since(begin); took > time.Second {
					t.Errorf("after %v", took)
				}
				if sent := h.sent(); len(sent) != 2 || sent[0] != "grt_canary-1" || sent[1] != "grt_canary-0" {
					t.Errorf("sent %q", sent)
				}
				want := codeMissing
				if reason == commonv1.Reason_REASON_TOKEN_NOT_YET_VALID {
					want = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED
				}
				if len(h.codes) != 1 || h.codes[0] != want {
					t.Errorf("codes %v", h.codes)
				}
			})
		})
	}
}

// TestConsumedTokensAreNotSentAgain checks that nothing is left to send after both tokens were used with another key.
func TestConsumedTokensAreNotSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := recoverable(t)
		defer h.end()
		h.answer = func(int, *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
			return nil, fault.ToConnect(fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, ""), "")
		}
		e := h.enroller()
		recoveries(t, e, 2)
		if _, err := e.Recover(t.Context()); !errors.Is(err, identity.ErrNoRecoveryToken) {
			t.Errorf("a third attempt: %v", err)
		}
		if sent := h.sent(); len(sent) != 2 || sent[0] == sent[1] {
			t.Errorf("sent %q", sent)
		}
	})
}

// TestWithoutItsKeyNoTokenIsSent checks that no token is sent where its key is lost, with the token kept or lost as
// well.
func TestWithoutItsKeyNoTokenIsSent(t *testing.T) {
	for name, lost := range map[string]struct {
		token bool
		want  error
	}{"key": {false, identity.ErrRecoveryKeyLost}, "key and tokens": {true, identity.ErrNoRecoveryToken}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := recoverable(t)
				defer h.end()
				if err := h.store.Close(); err != nil {
					t.Fatal(err)
				}
				files := []string{filepath.Join(h.dirs.State, "recovery-key.pem")}
				if lost.token {
					files = append(files, filepath.Join(h.dirs.Etc, "node-agent.env"),
						filepath.Join(h.dirs.State, "recovery-tokens.json"))
				}
				for _, file := range files {
					if err := os.Remove(file); err != nil {
						t.Fatal(err)
					}
				}
				h.open()
				if got, err := h.enroller().Recover(t.Context()); !errors.Is(err, lost.want) || got.Sent {
					t.Errorf("%+v, %v", got, err)
				}
				if len(h.requests) != 0 {
					t.Errorf("%d requests", len(h.requests))
				}
			})
		})
	}
}

// TestAMissingTokenIsReportedToEnrolment checks that a missing token is reported with a proof of the certificate's key,
// and that it counts as reported once enrolment has taken note. Until then it is reported again after a wait, and one
// on which enrolment has decided otherwise counts against the hour.
func TestAMissingTokenIsReportedToEnrolment(t *testing.T) {
	for reason, want := range map[commonv1.Reason]enrol.Missing{
		commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING: {Noted: true},
		commonv1.Reason_REASON_INVALID_ARGUMENT:       {Counts: true}, // of a recovery of an earlier build
		commonv1.Reason_REASON_RATE_LIMITED:           {},
		commonv1.Reason_REASON_UNAVAILABLE:            {},
		commonv1.Reason_REASON_RECORDS_MISSING:        {},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := recoverable(t)
			defer h.end()
			h.requests = nil
			h.answer = func(int, *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
				return nil, fault.ToConnect(fault.New(reason, ""), "")
			}
			cert := h.store.Certificate()
			got := h.enroller().ReportMissing(t.Context(), h.nodeID, cert, true)
			if got.Noted != want.Noted || got.Counts != want.Counts || (got.Wait > 0) == want.Noted ||
				!fault.Has(got.Answer, reason) || len(h.requests) != 1 {
				t.Fatalf("%v: %+v, %d requests", reason, got, len(h.requests))
			}
			claim := h.requests[0].GetTokenMissing()
			if claim.GetNodeId() != h.nodeID || !claim.GetKeyLost() || h.requests[0].GetToken() != "" ||
				recoverykey.VerifyMissing(claim.GetPublicKey(), h.nodeID, pki.SerialString(cert.Leaf.SerialNumber),
					claim.GetProof()) != nil {
				t.Errorf("sent %v", h.requests[0])
			}
		})
	}
}

// TestAKeyThatWasCertifiedBeforeIsReplaced checks that a key whose request is refused is replaced, so that an
// operator's token is still used.
func TestAKeyThatWasCertifiedBeforeIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, "recovery", false)
		defer h.end()
		h.answer = func(n int, ok *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
			if n == 0 {
				return nil, fault.ToConnect(fault.New(commonv1.Reason_REASON_CSR_REFUSED, ""), "")
			}
			return ok, nil
		}
		if err := h.enroller().Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(h.requests) != 2 || len(h.keys) != 2 {
			t.Errorf("%d requests with %d keys", len(h.requests), len(h.keys))
		}
	})
}

// TestWhatMeansWaitDoesNotCount checks which refusals count as attempts, and that attempts after one that means wait
// still come at a bounded pace.
func TestWhatMeansWaitDoesNotCount(t *testing.T) {
	for reason, counts := range map[commonv1.Reason]bool{
		commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE: false, commonv1.Reason_REASON_UNAVAILABLE: false,
		commonv1.Reason_REASON_RATE_LIMITED: false, commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT: false,
		commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN: false, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK: false,
		commonv1.Reason_REASON_RECORDS_MISSING: false, commonv1.Reason_REASON_RECOVERY_LIMIT_REACHED: true,
		commonv1.Reason_REASON_TOKEN_EXPIRED: true, commonv1.Reason_REASON_KEY_REUSE: true,
	} {
		t.Run(reason.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := recoverable(t)
				defer h.end()
				h.answer = func(int, *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
					return nil, fault.ToConnect(fault.New(reason, "", fault.RetryAfter(time.Second)), "")
				}
				begin := time.Now()
				if got := recoveries(t, h.enroller(), 40); !got.Sent || got.Counts != counts {
					t.Errorf("%+v", got)
				}
				if took := time.Since(begin); !counts && took < 3*time.Minute { // 40 s, and 15 s on average from the sixth on
					t.Errorf("40 attempts in %v", took)
				}
			})
		})
	}
}

// TestAnUnreachableListenerIsNoRequest checks that a request that could not be sent does not count as sent: it has had
// no effect.
func TestAnUnreachableListenerIsNoRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := recoverable(t)
		defer h.end()
		other := newHost(t, "recovery", true) // another authority's
		defer other.end()
		h.dial = other.pipe.dial
		if got := recoveries(t, h.enroller(), 3); got.Sent || got.Outcome != "server_tls_untrusted" || got.Wait <= 0 {
			t.Errorf("%+v", got)
		}
		if len(h.requests)+len(other.requests) != 0 {
			t.Error("a token was sent")
		}
	})
}
