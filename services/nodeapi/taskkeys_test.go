package nodeapi_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
)

// signer opens the set of the keys of tasks as lifecycle, which signs with them.
func (k *kit) signer() *keyset.Set {
	k.t.Helper()
	set, err := keyset.Open(k.t.Context(), keyset.Deps{
		Logger: testkit.Logger(k.t), Pool: k.db.Pool(pg.RoleLifecycle), Wake: &events.Signal{}, Service: pg.RoleLifecycle,
		ReplicaID: ids.New(),
	}, keyset.Part{
		Kind: keyset.TaskSigning, Signs: true, Files: keyset.FilesOf(filepath.Join(k.t.TempDir(), "tasks.pem")),
		Distributed: func(context.Context, pg.Querier, keyset.Key) (string, error) { return "", nil },
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return set
}

func (k *kit) rotate(set *keyset.Set) {
	k.t.Helper()
	recovery := k.db.Pool(pg.RoleRecovery)
	err := pg.InTx(k.t.Context(), recovery, func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := keyset.Ask(ctx, tx,
			keyset.Request{Kind: keyset.TaskSigning, IdempotencyKey: ids.New(), By: "sam", Reason: "test"})
		return err
	})
	if err != nil {
		k.t.Fatal(err)
	}
	if err := set.Refresh(k.t.Context()); err != nil {
		k.t.Fatal(err)
	}
}

func isKeys(f *nodev1.ConnectResponse) bool { return f.GetTaskKeys() != nil }

// TestAgentsAreSentTheKeysOfTasks makes a key while agents of this build and of the one before are connected: Welcome
// and a frame have the chain, the keys that the agents report are passed on to lifecycle, and the key does not sign
// before this replica relays it.
func TestAgentsAreSentTheKeysOfTasks(t *testing.T) {
	k := newKit(t)
	set := k.signer()
	r := k.replica()
	open := func(protocol int32) (*agent, *nodev1.Welcome) {
		a := k.node()
		k.connect(a, r.AgentAddr(), true)
		a.send(a.hello(func(h *nodev1.Hello) { h.ProtocolVersion = protocol }))
		w := a.exactly("Welcome", func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil }).GetWelcome()
		a.session = w.GetSessionId()
		frame := &nodev1.Ready{Generation: w.GetGeneration()}
		if protocol >= 4 {
			for _, key := range w.GetTaskKeys() {
				frame.TaskKeyIds = append(frame.TaskKeyIds, key.GetKeyId())
			}
		}
		a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Ready{Ready: frame}})
		a.exactly("Admitted", func(f *nodev1.ConnectResponse) bool { return f.GetAdmitted() != nil })
		k.raised(a)
		return a, w
	}
	now, welcome := open(4)
	if len(welcome.GetTaskKeys()) != 1 {
		t.Fatalf("Welcome has keys %v", welcome.GetTaskKeys())
	}
	first := welcome.GetTaskKeys()[0].GetKeyId()
	earlier, _ := open(3)
	for _, s := range k.backend.Readies() {
		want := []string{first}
		if s.GetSessionId() == earlier.session {
			want = nil
		}
		if !slices.Equal(s.GetTaskKeyIds(), want) {
			t.Errorf("lifecycle is told of the keys %q, want %q", s.GetTaskKeyIds(), want)
		}
	}

	k.rotate(set)
	list := now.next("the keys of tasks", isKeys).GetTaskKeys().GetKeys()
	if len(list) != 2 || list[0].GetKeyId() != first || list[1].GetEndorsedBy() != first || list[0].GetRetired() ||
		list[1].GetRetired() {
		t.Fatalf("the chain is %v", list)
	}
	links := make([]pki.Link, len(list))
	for i, key := range list {
		links[i] = pki.Link{
			KeyID: key.GetKeyId(), Public: key.GetPublicKey(), EndorsedBy: key.GetEndorsedBy(),
			Endorsement: key.GetEndorsement(),
		}
	}
	held, err := pki.NewKeySet(links[0].Public)
	if err != nil {
		t.Fatal(err)
	}
	next, unbelieved, err := pki.Advance(pki.TaskKind, held, links)
	if err != nil || len(unbelieved) > 0 || len(next.IDs()) != 2 {
		t.Fatalf("an agent believes %v, not %q, %v", next, unbelieved, err)
	}
	now.send(
		&nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_TaskKeysHeld{TaskKeysHeld: &nodev1.TaskKeysHeld{KeyIds: next.IDs()}},
		},
	)
	testkit.Eventually(t, patience, func() error {
		if got := k.backend.Held(now.session); !slices.Equal(got, next.IDs()) {
			return fmt.Errorf("lifecycle knows of %q", got)
		}
		return nil
	})
	// The replica has reported that it relays the key.
	testkit.Eventually(t, patience, func() error {
		var verifies bool
		err := k.db.OwnerPool().QueryRow(t.Context(),
			`SELECT count(*) = 1 FROM mesh.key_replica WHERE service = 'nodeapi' AND $1 = ANY (holds)`,
			"verify:task_signing:"+links[1].KeyID).Scan(&verifies)
		if err == nil && !verifies {
			err = errors.New("the replica has not reported the key")
		}
		return err
	})
	// The agent of the build before has been sent nothing that it does not know: the next frame that it reads is the
	// acknowledgement of its heartbeat.
	earlier.send(beat(7))
	earlier.next("acknowledgement", func(f *nodev1.ConnectResponse) bool {
		if isKeys(f) {
			t.Errorf("an agent of protocol 3 was sent %v", f)
		}
		return f.GetHeartbeatAck().GetSequence() == 7
	})
	_, welcome = open(4)
	if len(welcome.GetTaskKeys()) != 2 {
		t.Errorf("the next Welcome has keys %v", welcome.GetTaskKeys())
	}
}

// TestAgentsAreSentTheRootsOfServices adds a root while an agent is connected: Welcome has the earlier roots, and a
// frame has the new one as well.
func TestAgentsAreSentTheRootsOfServices(t *testing.T) {
	k := newKit(t)
	services, err := ca.OpenServiceCA(t.TempDir(), "mesh.test")
	if err != nil {
		t.Fatal(err)
	}
	insert := func(state, by string, cross []byte) {
		t.Helper()
		_, err := k.db.Pool(pg.RoleLifecycle).Exec(t.Context(), `INSERT INTO mesh.signing_key
			(kind, key_id, public_key, state, file, endorsed_by, endorsement, made_by, made_at, state_at)
			VALUES ('services', $1, $2, $3, 'ca.crt', $4, $5, 'test', mesh.clock(), mesh.clock())`,
			pki.RootID(services.Root()), services.Root().Raw, state, by, cross)
		if err != nil {
			t.Fatal(err)
		}
	}
	first := services.Root()
	insert("signing", "", []byte{})
	r := k.replica()
	a := k.node()
	k.connect(a, r.AgentAddr(), true)
	a.send(a.hello())
	w := a.exactly("Welcome", func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil }).GetWelcome()
	if got := w.GetServiceRoots().GetRoots(); len(got) != 1 || !bytes.Equal(got[0].GetCertificate(), first.Raw) {
		t.Fatalf("Welcome has roots %v", got)
	}
	a.session = w.GetSessionId()
	ready := &nodev1.Ready{Generation: w.GetGeneration()}
	a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Ready{Ready: ready}})
	a.exactly("Admitted", func(f *nodev1.ConnectResponse) bool { return f.GetAdmitted() != nil })

	if err := services.Next(); err != nil {
		t.Fatal(err)
	}
	bundle, err := services.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	_, crosses := bundle.Given()
	insert("verify_only", pki.RootID(first), crosses[0].Raw)
	list := a.next("the roots of services", func(f *nodev1.ConnectResponse) bool {
		return f.GetServiceRoots() != nil
	}).GetServiceRoots().GetRoots()
	if len(list) != 2 || !bytes.Equal(list[1].GetCertificate(), services.Root().Raw) ||
		!bytes.Equal(list[1].GetCrossCertificate(), crosses[0].Raw) {
		t.Errorf("the list has %v", list)
	}
}
