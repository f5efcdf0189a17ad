package identity_test

import (
	"crypto"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

var errCrash = errors.New("crash")

// image is the state that a crash must leave either as before or as after the operation.
type image struct {
	Node    identity.Node
	Current string // serial
	Other   string
	Pending string // key
	Join    string
	Env     string
	// Files of trust.
	Bundle, Recovery, Listed, Former string
	// Recovery key, key of a recovery's request, and tokens beside the one in node-agent.env.
	RecoveryKey, Recovering, Renewing, Tokens string
	BeforeBundle                              string // what the last bundle replaced
}

type world struct {
	t        *testing.T
	dirs     identity.Dirs
	ca       *agenttest.Authority
	nodeID   string
	instance string
	now      time.Time
	// first is a key of tasks, retired by a list that has second.
	first, second pki.Link
	roots         [2]pki.RootLink   // of services
	offered       *commonv1.Profile // by offer
}

func newWorld(t *testing.T) *world {
	t.Helper()
	root := t.TempDir()
	ca, err := agenttest.NewAuthority("nodes", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, dirs: identity.Dirs{Etc: filepath.Join(root, "etc"), State: filepath.Join(root, "state")}, ca: ca,
		nodeID: ids.New(), instance: ids.New(), now: time.Now(), roots: rootsOfServices(t),
	}
	public, private, err := ed25519.GenerateKey(nil)
	must(t, err)
	next, _, err := ed25519.GenerateKey(nil)
	must(t, err)
	w.first = pki.Link{KeyID: pki.KeyID(public), Public: public, Retired: true}
	w.second = pki.Link{
		KeyID: pki.KeyID(next), Public: next, EndorsedBy: w.first.KeyID,
		Endorsement: pki.Endorse(private, pki.TaskKind, next),
	}
	return w
}

func (w *world) open(opts ...identity.Option) *identity.Store {
	w.t.Helper()
	s, err := identity.Open(w.dirs, opts...)
	if err != nil {
		w.t.Fatalf("open: %v", err)
	}
	return s
}

func (w *world) close(s *identity.Store) {
	w.t.Helper()
	if err := s.Close(); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) image(s *identity.Store) image {
	w.t.Helper()
	node, _ := s.Node()
	out := image{Node: node, Current: serial(s.Certificate()), Other: serial(s.Other()), Env: string(s.Env().Render())}
	if data, err := os.ReadFile(filepath.Join(w.dirs.Etc, "key-pending.pem")); err == nil {
		key, err := pki.DecodeKey(data)
		if err != nil {
			w.t.Fatalf("pending key: %v", err)
		}
		out.Pending, _ = pki.PublicKeyFingerprint(key.Public())
	}
	for path, into := range map[string]*string{
		filepath.Join(w.dirs.Etc, "ca-bundle.crt"):          &out.Bundle,
		filepath.Join(w.dirs.Etc, "recovery-ca-bundle.crt"): &out.Recovery,
		filepath.Join(w.dirs.State, "service-roots.json"):   &out.Listed,
		filepath.Join(w.dirs.State, "former-profile.json"):  &out.Former,
		filepath.Join(w.dirs.State, "recovery-key.pem"):     &out.RecoveryKey,
		filepath.Join(w.dirs.State, "key-recovering.pem"):   &out.Recovering,
		filepath.Join(w.dirs.Etc, "key-renewing.pem"):       &out.Renewing,
		filepath.Join(w.dirs.State, "recovery-tokens.json"): &out.Tokens,
		filepath.Join(w.dirs.State, "before-bundle.json"):   &out.BeforeBundle,
	} {
		if data, err := os.ReadFile(path); err == nil {
			*into = string(data)
		}
	}
	raw, generation := s.JoinState()
	out.Join = fmt.Sprintf("%d %s", generation, raw)
	return out
}

func serial(c *tls.Certificate) string {
	if c == nil {
		return ""
	}
	return pki.SerialString(c.Leaf.SerialNumber)
}

func (w *world) chain(key crypto.Signer) []byte {
	w.t.Helper()
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		w.t.Fatal(err)
	}
	chain, err := w.ca.SignCSR(csr, w.nodeID, w.now.Add(-time.Minute), w.now.Add(time.Hour))
	if err != nil {
		w.t.Fatal(err)
	}
	return chain
}

func (w *world) answer(key crypto.Signer) *recoveryv1.EnrollResponse {
	return &recoveryv1.EnrollResponse{
		NodeId: w.nodeID, NodeInstanceId: w.instance, CertificateChainPem: w.chain(key), NodeName: "n1",
		Profile: &commonv1.Profile{
			Name: "dev", Fingerprint: "f", ApiUrl: "127.0.0.1:7001", RecoveryUrl: "https://127.0.0.1:7002",
			CaBundlePem: w.ca.PEM(), RecoveryCaBundlePem: w.ca.PEM(),
		},
		Policy: &commonv1.NodePolicy{AutoRecovery: true}, TaskSigningPubkeys: "k1:AAAA",
	}
}

const token = "gbt_0123456789abcdef0123456789abcdef_secret"

func (w *world) bundle(token string) string {
	w.t.Helper()
	dir := w.t.TempDir()
	for name, content := range map[string]string{
		"node-agent.env":         "GPUAAS_RECOVERY_API_URL=https://127.0.0.1:7002\nGPUAAS_ENROLLMENT_TOKEN=" + token + "\n",
		"ca-bundle.crt":          string(w.ca.PEM()),
		"recovery-ca-bundle.crt": string(w.ca.PEM()),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
	return dir
}

func (w *world) read(dir string) *identity.Bundle {
	w.t.Helper()
	b, err := identity.ReadBundle(dir)
	must(w.t, err)
	return b
}

// TestCrashBetweenAnyTwoEffects ends each operation at each of its points, opens the directory again and checks that it
// is as before the operation or as after it; then the operation is done again, and must lead to one identity whatever
// the crash left.
func TestCrashBetweenAnyTwoEffects(t *testing.T) {
	testkit.IO(t) // it syncs thousands of files
	enrolled := func(w *world, s *identity.Store) {
		key, err := s.PendingKey()
		must(w.t, err)
		must(w.t, s.CommitEnrolment(token, w.answer(key)))
		_, err = s.StoreJoinState(1, []byte("one"))
		must(w.t, err)
	}
	renewed := func(w *world, s *identity.Store) {
		enrolled(w, s)
		key, err := s.RenewalKey()
		must(w.t, err)
		must(w.t, s.StoreIssued(w.chain(key), "grt_next"))
	}
	rotating := func(w *world, s *identity.Store) {
		w.trusting(s, w.roots[0].DER)
		_, err := s.TakeServiceRoots(w.roots[:])
		must(w.t, err)
	}
	tests := []struct {
		name  string
		setup func(w *world, s *identity.Store)
		// prepare returns the operation; its inputs are the same for every try, as a peer's would be.
		prepare func(w *world, s *identity.Store) func(s *identity.Store) error
		// accepted are the recovery tokens of which one must be there at every point: those that a control plane accepts,
		// whether it knows of the operation or not.
		accepted []string
	}{
		{name: "pending key", setup: enrolled, prepare: func(*world, *identity.Store) func(*identity.Store) error {
			return func(s *identity.Store) error { _, err := s.PendingKey(); return err }
		}},
		{name: "renewal key", setup: enrolled, prepare: func(*world, *identity.Store) func(*identity.Store) error {
			return func(s *identity.Store) error { _, err := s.RenewalKey(); return err }
		}},
		{
			name: "bundle", setup: func(*world, *identity.Store) {},
			prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
				dir := w.bundle(token)
				return func(s *identity.Store) error { return s.InstallBundle(w.read(dir)) }
			},
		},
		{
			name: "enrol", setup: func(w *world, s *identity.Store) { must(w.t, s.InstallBundle(w.read(w.bundle(token)))) },
			prepare: func(w *world, s *identity.Store) func(*identity.Store) error {
				key, err := s.PendingKey()
				must(w.t, err)
				answer := w.answer(key)
				return func(s *identity.Store) error {
					return s.CommitEnrolment(token, answer)
				}
			},
		},
		{name: "issued", setup: enrolled, prepare: func(w *world, s *identity.Store) func(*identity.Store) error {
			key, err := s.RenewalKey()
			must(w.t, err)
			chain := w.chain(key)
			return func(s *identity.Store) error {
				return s.StoreIssued(chain, "grt_next")
			}
		}},
		{name: "recovery key", setup: enrolled, prepare: func(*world, *identity.Store) func(*identity.Store) error {
			return func(s *identity.Store) error { _, err := s.RecoveryKey(); return err }
		}},
		{
			name: "issued with a token", setup: (*world).enrolled, accepted: []string{firstRecovery},
			prepare: func(w *world, s *identity.Store) func(*identity.Store) error {
				key, err := s.RenewalKey()
				must(w.t, err)
				chain := w.chain(key)
				return func(s *identity.Store) error { return s.StoreIssued(chain, secondRecovery) }
			},
		},
		{
			name: "confirm", accepted: []string{secondRecovery}, setup: func(w *world, s *identity.Store) {
				w.enrolled(s)
				w.renewed(s, secondRecovery)
				must(w.t, s.Flip())
			},
			prepare: func(*world, *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error { return s.Confirm(s.Certificate().Leaf) }
			},
		},
		{
			name: "key of a recovery", setup: (*world).enrolled, accepted: []string{firstRecovery},
			prepare: func(*world, *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error { _, _, err := s.RecoveringKey(firstRecovery); return err }
			},
		},
		{
			// The former token is accepted with its own key until the reply is stored, and the next one from then on.
			name: "recover", setup: (*world).enrolled, accepted: []string{firstRecovery, secondRecovery},
			prepare: func(w *world, s *identity.Store) func(*identity.Store) error {
				_, key, err := s.RecoveringKey(firstRecovery)
				must(w.t, err)
				answer := w.answer(key)
				answer.RecoveryToken = secondRecovery
				return func(s *identity.Store) error {
					if holdsToken(s, firstRecovery) {
						_, again, err := s.RecoveringKey(firstRecovery)
						if err != nil && !errors.Is(err, identity.ErrNoRecoveryToken) {
							return err
						}
						if err == nil && fingerprint(again.Public()) != fingerprint(key.Public()) {
							return errors.New("the former token goes with another key")
						}
					}
					return s.CommitEnrolment(firstRecovery, answer)
				}
			},
		},
		{name: "flip", setup: renewed, prepare: func(_ *world, s *identity.Store) func(*identity.Store) error {
			from := serial(s.Certificate())
			return func(s *identity.Store) error {
				if serial(s.Certificate()) != from {
					return nil
				}
				return s.Flip()
			}
		}},
		{name: "join state", setup: enrolled, prepare: func(*world, *identity.Store) func(*identity.Store) error {
			return func(s *identity.Store) error { _, err := s.StoreJoinState(2, []byte("two")); return err }
		}},
		{name: "task keys", setup: func(w *world, s *identity.Store) {
			key, err := s.PendingKey()
			must(w.t, err)
			answer := w.answer(key)
			answer.TaskSigningPubkeys = w.first.KeyID + ":" + base64.StdEncoding.EncodeToString(w.first.Public)
			must(w.t, s.CommitEnrolment(token, answer))
		}, prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
			return func(s *identity.Store) error {
				held, unbelieved, err := s.TakeTaskKeys([]pki.Link{w.first, w.second})
				if err != nil {
					if held == nil || !held.Has(w.first.KeyID) {
						w.t.Errorf("an error without the keys from before: %v", err)
					}
					return err
				}
				if len(unbelieved) > 0 || !held.Has(w.second.KeyID) || held.Has(w.first.KeyID) {
					return fmt.Errorf("held %v, not believed %q", held, unbelieved)
				}
				return nil
			}
		}},
		{
			name: "service roots", setup: func(w *world, s *identity.Store) { w.trusting(s, w.roots[0].DER) },
			prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error {
					_, err := s.TakeServiceRoots([]pki.RootLink{retired(w.roots[0]), w.roots[1]})
					return err
				}
			},
		},
		{
			name: "service roots after a list", setup: rotating,
			prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error {
					_, err := s.TakeServiceRoots([]pki.RootLink{retired(w.roots[0]), w.roots[1]})
					return err
				}
			},
		},
		{
			name: "bundle after a list", setup: rotating,
			prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
				dir := w.bundle("gbt_other")
				return func(s *identity.Store) error { return s.InstallBundle(w.read(dir)) }
			},
		},
		{
			name: "archive", setup: (*world).enrolled, accepted: []string{firstRecovery},
			prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
				given := w.archive(nil)
				return func(s *identity.Store) error { return s.InstallBundle(given) }
			},
		},
		{
			name: "restore", accepted: []string{firstRecovery},
			setup: func(w *world, s *identity.Store) {
				w.enrolled(s)
				must(w.t, s.InstallBundle(w.archive(nil)))
			},
			prepare: func(*world, *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error {
					if err := s.RestoreFormer(); !errors.Is(err, identity.ErrNothingBefore) {
						return err
					}
					return nil
				}
			},
		},
		{
			name: "offered profile", setup: enrolled,
			prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error { return stored(s, w.offer()) }
			},
		},
		{
			name: "bundle over an offered profile", accepted: []string{firstRecovery},
			setup: func(w *world, s *identity.Store) {
				w.enrolled(s)
				must(w.t, stored(s, w.offer()))
			},
			prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
				given := w.archive(nil)
				return func(s *identity.Store) error { return s.InstallBundle(given) }
			},
		},
		{
			name: "offered profile after a bundle", accepted: []string{firstRecovery},
			setup: func(w *world, s *identity.Store) {
				w.enrolled(s)
				must(w.t, s.InstallBundle(w.archive(nil)))
			},
			prepare: func(w *world, _ *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error { return stored(s, w.offer()) }
			},
		},
		{
			name: "profile confirmed", setup: func(w *world, s *identity.Store) {
				enrolled(w, s)
				must(w.t, stored(s, w.offer()))
			},
			prepare: func(*world, *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error { return s.ConfirmProfile("g") }
			},
		},
		{
			name: "former profile is back", setup: func(w *world, s *identity.Store) {
				enrolled(w, s)
				must(w.t, stored(s, w.offer()))
			},
			prepare: func(*world, *identity.Store) func(*identity.Store) error {
				return func(s *identity.Store) error { _, err := s.RevertProfile(); return err }
			},
		},
		{name: "drop key", setup: func(w *world, s *identity.Store) {
			enrolled(w, s)
			_, err := s.PendingKey()
			must(w.t, err)
		}, prepare: func(*world, *identity.Store) func(*identity.Store) error {
			return func(s *identity.Store) error { return s.DropPendingKey() }
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			points := 0
			for _, reopen := range []bool{true, false} { // a crash, or an error after which the same process goes on
				for nth := 1; ; nth++ {
					w := newWorld(t)
					s := w.open()
					tt.setup(w, s)
					op := tt.prepare(w, s)
					before := w.image(s)
					w.close(s)

					left, where := nth, ""
					s = w.open(identity.WithStep(func(point string) error {
						if left--; left == 0 {
							where = point
							return errCrash
						}
						return nil
					}))
					err := op(s)
					if where == "" {
						if err != nil {
							t.Fatalf("without a crash: %v", err)
						}
						w.close(s)
						points = nth - 1
						break
					}
					if !errors.Is(err, errCrash) {
						t.Fatalf("at %s: error %v", where, err)
					}
					if reopen {
						w.close(s)
						s = w.open()
						if problems := s.Problems(); len(problems) > 0 {
							t.Fatalf("crash at %s left %q", where, problems)
						}
					}
					middle := w.image(s)
					if tt.accepted != nil && !slices.ContainsFunc(tt.accepted, func(t string) bool { return holdsToken(s, t) }) {
						got, err := s.RecoveryTokens()
						t.Fatalf("crash at %s left no token that is accepted: %q, %v", where, got, err)
					}
					if err := op(s); err != nil {
						t.Fatalf("again after %s: %v", where, err)
					}
					after := w.image(s)
					w.close(s)
					s = w.open()
					if diff := cmp.Diff(after, w.image(s)); diff != "" {
						t.Fatalf("after %s memory and disk differ:\n%s", where, diff)
					}
					if reopen && !cmp.Equal(middle, before) && !cmp.Equal(middle, after) {
						t.Fatalf("crash at %s left neither before nor after:\n%s", where, cmp.Diff(before, middle))
					}
					if was := before.Node; was.NodeID != "" &&
						(after.Node.NodeID != was.NodeID || after.Node.InstanceID != was.InstanceID) {
						t.Fatalf("crash at %s changed the node: %+v", where, after.Node)
					}
					w.close(s)
				}
			}
			if points < 2 {
				t.Fatalf("only %d points passed: nothing is enumerated", points)
			}
			t.Logf("%d points", points)
		})
	}
}

func holdsToken(s *identity.Store, token string) bool {
	held, _ := s.RecoveryTokens()
	return slices.Contains(held, token)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
