package nodeapi_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// TestACanaryOpensNoSession: the port accepts the handshake of a canary certificate, and refuses its stream before it
// asks recovery.
func TestACanaryOpensNoSession(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.node()
	a.id = pki.CanaryName
	var err error
	if a.cert, err = k.nodes.Node(a.id); err != nil {
		t.Fatal(err)
	}
	k.connect(a, r.AgentAddr(), true)
	a.send(a.hello())
	select {
	case err := <-a.ended:
		if !fault.Has(fault.FromGRPC(err), commonv1.Reason_REASON_PERMISSION_DENIED) { // by which recovery knows the port
			t.Errorf("the stream ended with %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the stream stands")
	}
	if len(a.frames) > 0 {
		t.Errorf("it was sent %v", <-a.frames)
	}
}

// TestAReplicaPublishesWhatItsPortTrusts: its row has the issuers of nodes that it trusts and where it serves agents,
// soon after they change.
func TestAReplicaPublishesWhatItsPortTrusts(t *testing.T) {
	k := newKit(t)
	var file string
	r := k.replica(func(cfg *nodeapi.Config) { file = cfg.NodeCAFile })
	published := func(want []string) {
		t.Helper()
		testkit.Eventually(t, patience, func() error {
			list, err := replicas.ReadTrust(t.Context(), k.db.Pool(pg.RoleRecovery))
			if err == nil && (len(list) != 1 || list[0].AgentAddress != r.AgentAddr() ||
				!slices.Equal(list[0].ClientCAs, want)) {
				return errors.New("the row has something else")
			}
			return err
		})
	}
	mine, err := k.nodes.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	published(mine.Fingerprints())
	other, err := nodeapitest.NewAuthority("others")
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := other.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	if err := pki.WriteFile(file, theirs.PEM()); err != nil {
		t.Fatal(err)
	}
	published(theirs.Fingerprints())
}
