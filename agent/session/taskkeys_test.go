package session_test

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// taskKeys makes a chain of keys as a control plane sends it.
func taskKeys(t *testing.T, n int) []*nodev1.TaskKey {
	t.Helper()
	var out []*nodev1.TaskKey
	var before ed25519.PrivateKey
	for i := range n {
		public, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		key := &nodev1.TaskKey{KeyId: pki.KeyID(public), PublicKey: public}
		if i > 0 {
			key.EndorsedBy, key.Endorsement = out[i-1].GetKeyId(), pki.Endorse(before, pki.TaskKind, public)
		}
		out, before = append(out, key), private
	}
	return out
}

func idsOf(keys ...*nodev1.TaskKey) []string {
	out := make([]string, 0, len(keys))
	for _, key := range keys {
		out = append(out, key.GetKeyId())
	}
	slices.Sort(out)
	return out
}

// TestAnAgentFollowsTheKeysOfTasks sends lists in Welcome and within a session: the resulting keys are on disk and in
// force before the agent reports them, also after a restart and after two rotations that it missed; a list of other
// keys is refused, and the agent goes on with the keys it has.
func TestAnAgentFollowsTheKeysOfTasks(t *testing.T) {
	dirs := dirsOf(t)
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		keys := taskKeys(t, 4)
		foreign := taskKeys(t, 2)
		first := keys[0].GetKeyId() + ":" + base64.StdEncoding.EncodeToString(keys[0].GetPublicKey())
		// onDisk returns the keys by which a restarted agent would verify.
		onDisk := func() []string {
			env, err := pki.ReadFile(dirs.Etc + "/node-agent.env")
			if err != nil {
				t.Error(err)
				return nil
			}
			parsed, err := envfile.Parse(env)
			if err != nil {
				t.Error(err)
				return nil
			}
			set, err := pki.ParseKeySet(parsed.Get(envfile.TaskKeys))
			if err != nil {
				t.Error(err)
				return nil
			}
			return set.IDs()
		}
		lists := make(chan []*nodev1.TaskKey)
		reported := make(chan []string, 8)
		listed := keys[:2]
		p.script = func(v *visit) error {
			generation, err := v.issue()
			if err != nil {
				return v.deny(err)
			}
			v.mu.Lock()
			list := listed
			v.mu.Unlock()
			if err := v.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Welcome{Welcome: &nodev1.Welcome{
				Generation: generation, JoinState: make([]byte, generation), Nonce: v.nonce, TaskKeys: list,
			}}}); err != nil {
				return err
			}
			frame, err := v.stream.Recv()
			if err != nil {
				return err
			}
			if frame.GetReady() == nil {
				return errors.New("no Ready")
			}
			if got := frame.GetReady().GetTaskKeyIds(); !slices.Equal(got, onDisk()) {
				t.Errorf("Ready says %q, on disk is %q", got, onDisk())
			}
			reported <- frame.GetReady().GetTaskKeyIds()
			v.mu.Lock()
			v.confirmed = generation
			v.mu.Unlock()
			if err := v.admit(generation); err != nil {
				return err
			}
			go func() {
				for {
					select {
					case list := <-lists:
						_ = v.send(
							&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskKeys{TaskKeys: &nodev1.TaskKeys{Keys: list}}},
						)
					case <-v.stream.Context().Done():
						return
					}
				}
			}()
			for {
				frame, err := v.stream.Recv()
				if err != nil {
					return nil //nolint:nilerr // the agent has gone
				}
				if held := frame.GetTaskKeysHeld(); held != nil {
					if !slices.Equal(held.GetKeyIds(), onDisk()) {
						t.Errorf("the agent says %q, on disk is %q", held.GetKeyIds(), onDisk())
					}
					reported <- held.GetKeyIds()
				}
				if err := v.on(frame); err != nil {
					return err
				}
			}
		}
		inForce := make(chan []string, 16)
		run := func() *harness {
			store := p.disk(dirs)
			t.Cleanup(func() { _ = store.Close() })
			return start(t, p, store, func(d *session.Deps, _ *session.Config) {
				d.Hooks.TaskKeys = func(set *pki.KeySet) { inForce <- set.IDs() }
			})
		}
		want := func(what string, ids []string) {
			t.Helper()
			if got := <-reported; !slices.Equal(got, ids) {
				t.Errorf("%s: the agent holds %q, want %q", what, got, ids)
			}
			if got := <-inForce; !slices.Equal(got, ids) {
				t.Errorf("%s: in force are %q, want %q", what, got, ids)
			}
		}
		p.taskPubkeys = first
		h := run()
		want("Welcome", idsOf(keys[:2]...))

		retired := &nodev1.TaskKey{KeyId: keys[0].GetKeyId(), PublicKey: keys[0].GetPublicKey(), Retired: true}
		lists <- []*nodev1.TaskKey{retired, keys[1]}
		want("a retired key", idsOf(keys[1]))
		lists <- foreign
		want("a list of others", idsOf(keys[1]))
		h.hmu.Lock()
		if len(h.diagnostics) != 1 || h.diagnostics[0].Code != commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_KEYS_REFUSED ||
			!strings.Contains(h.diagnostics[0].Detail, pki.ErrNoChain.Error()) {
			t.Errorf("diagnostics: %v", h.diagnostics)
		}
		h.hmu.Unlock()
		h.cancel()
		if err := <-h.done; err != nil {
			t.Error(err)
		}

		// Away during two rotations.
		p.mu.Lock()
		listed = []*nodev1.TaskKey{retired, link(keys[1], true), link(keys[2], true), keys[3]}
		p.mu.Unlock()
		time.Sleep(time.Hour)
		if err := h.id.(*identity.Store).Close(); err != nil {
			t.Fatal(err)
		}
		h = run()
		want("after two rotations", idsOf(keys[3]))
		h.stop()
	})
}

func link(key *nodev1.TaskKey, retired bool) *nodev1.TaskKey {
	return &nodev1.TaskKey{
		KeyId: key.GetKeyId(), PublicKey: key.GetPublicKey(), EndorsedBy: key.GetEndorsedBy(),
		Endorsement: key.GetEndorsement(), Retired: retired,
	}
}
