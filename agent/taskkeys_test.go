package agent_test

import (
	"crypto/ed25519"
	"errors"
	"slices"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheAgentTakesNewKeysOfTasksWithoutARestart rotates the key by which tasks are signed under a running agent and
// under one that is away: each task of a key that the agent reports succeeds, a list with a stranger's keys changes
// nothing, and is reported.
func TestTheAgentTakesNewKeysOfTasksWithoutARestart(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	enrolled(t, m, cfg)
	privates := make([]ed25519.PrivateKey, 3)
	links := []*nodev1.TaskKey{{KeyId: m.signer.ID(), PublicKey: m.signer.Public()}}
	for i := range privates {
		public, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		privates[i] = private
		links = append(links, &nodev1.TaskKey{KeyId: pki.KeyID(public), PublicKey: public})
	}
	stranger := links[3:]
	endorse := func(i int, by ed25519.PrivateKey) {
		links[i].EndorsedBy, links[i].Endorsement = links[i-1].GetKeyId(),
			pki.Endorse(by, pki.TaskKind, links[i].GetPublicKey())
	}
	endorse(1, m.private)
	endorse(2, privates[0])
	held := func(what string, keys ...*nodev1.TaskKey) {
		t.Helper()
		var want []string
		for _, key := range keys {
			want = append(want, key.GetKeyId())
		}
		slices.Sort(want)
		select {
		case got := <-m.accepted:
			if !slices.Equal(got, want) {
				t.Fatalf("%s: the agent holds %q, want %q", what, got, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: the agent reports nothing", what)
		}
	}
	works := func(what string) {
		t.Helper()
		id := m.probe("x")
		select {
		case result := <-m.results:
			if result.GetTask().GetTaskId() != id || result.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
				t.Errorf("%s: %v", what, result)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: no result", what)
		}
	}
	sign := func(private ed25519.PrivateKey) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.signer = envelope.NewKey(private)
	}
	list := func(keys ...*nodev1.TaskKey) {
		t.Helper()
		m.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskKeys{TaskKeys: &nodev1.TaskKeys{Keys: keys}}})
	}
	retired := func(key *nodev1.TaskKey) *nodev1.TaskKey {
		return &nodev1.TaskKey{
			KeyId: key.GetKeyId(), PublicKey: key.GetPublicKey(), EndorsedBy: key.GetEndorsedBy(),
			Endorsement: key.GetEndorsement(), Retired: true,
		}
	}

	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	held("a control plane that lists nothing", links[0])
	works("the key of the enrolment")
	list(links[0], links[1])
	held("the next key", links[0], links[1])
	works("the former key")
	sign(privates[0])
	works("the next key")
	list(retired(links[0]), links[1])
	held("the former key is retired", links[1])
	works("after that")
	list(stranger...)
	held("a list of a stranger", links[1])
	works("after a list of a stranger")
	testkit.Eventually(t, time.Minute, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, d := range m.diagnostics {
			if d.GetCode() == commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_KEYS_REFUSED {
				return nil
			}
		}
		return errors.New("the control plane is not told of the refusal")
	})
	if err := end(); err != nil {
		t.Fatal(err)
	}

	// Away while the key is rotated.
	sign(privates[1])
	m.mu.Lock()
	m.keys = []*nodev1.TaskKey{retired(links[0]), retired(links[1]), links[2]}
	m.mu.Unlock()
	end, _ = run(t, open(t, cfg))
	m.wait("admitted")
	held("after it was away", links[2])
	works("after it was away")
	if err := end(); err != nil {
		t.Fatal(err)
	}
}
