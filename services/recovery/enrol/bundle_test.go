package enrol_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/enrol"
)

func (k *kit) bundleFor(node string) (enrol.BundleToken, error) {
	k.t.Helper()
	return k.enroller.IssueBundle(k.ctx, enrol.BundleRequest{NodeID: node, Reason: "its disk was lost", By: "ada"})
}

func (k *kit) mustBundle(node string) enrol.BundleToken {
	k.t.Helper()
	out, err := k.bundleFor(node)
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

func (k *kit) identityRow(node string) string {
	k.t.Helper()
	var out string
	if err := k.pool.QueryRow(k.ctx, `SELECT to_jsonb(i)::text FROM recovery.identity i WHERE node_id = $1`,
		node).Scan(&out); err != nil {
		k.t.Fatal(err)
	}
	return out
}

// A bundle changes nothing of an active node until its token is used. With the join state the host is the same node
// instance; its earlier recovery tokens end.
func TestABundleKeepsTheNodeInstanceOfTheSameHost(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	instance, before := m.instance, k.identityRow(m.node)
	b := k.mustBundle(m.node)
	if got := k.identityRow(m.node); got != before {
		t.Errorf("the node changed when a bundle was issued:\n%s\n%s", before, got)
	}
	if b.NodeID != m.node || b.InstanceID != instance || b.Name != "node-1" || !strings.HasPrefix(b.Token, "gnb_") ||
		!b.ExpiresAt.After(b.IssuedAt) {
		t.Errorf("the bundle is %+v", b)
	}
	csr := k.csr()
	resp := m.mustEnroll(b.Token, csr)
	if resp.GetNodeInstanceId() != instance || resp.GetNodeId() != m.node {
		t.Errorf("it is %s/%s now", resp.GetNodeId(), resp.GetNodeInstanceId())
	}
	again := m.mustEnroll(b.Token, csr)
	if k.serialOf(again) != k.serialOf(resp) {
		t.Error("a repetition with the same key got another certificate")
	}
	if got := m.states(); !strings.HasPrefix(got, "revoked:enrolled") {
		t.Errorf("the recovery tokens are %s", got)
	}
	m.took(resp)
	m.admit()
}

// A host that was rebuilt has no join state: it is the same node and another node instance, and the certificates from
// before are revoked.
func TestABundleMakesAnotherNodeInstanceOfARebuiltHost(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	b := k.mustBundle(m.node)
	rebuilt := k.machine()
	resp := rebuilt.mustEnroll(b.Token, k.csr())
	if resp.GetNodeId() != m.node || resp.GetNodeInstanceId() == m.instance || resp.GetNodeName() != "node-1" {
		t.Errorf("it is %s/%s of %s", resp.GetNodeId(), resp.GetNodeInstanceId(), resp.GetNodeName())
	}
	if n := k.count(`SELECT count(*) FROM recovery.serial WHERE serial = $1 AND state = 'revoked'`, m.serial); n != 1 {
		t.Error("the certificate of the lost host counts still")
	}
	rebuilt.took(resp)
	rebuilt.admit()
}

// Another key that presents the token ends it, and the node is on hold.
func TestABundleIsGoodForOneKey(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	b := k.mustBundle(m.node)
	m.took(m.mustEnroll(b.Token, k.csr()))
	_, err := k.enroll(b.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
	if r := k.record(m.node); r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD {
		t.Errorf("the node is %s", r.State)
	}
	_, err = k.bundleFor(m.node)
	k.refused(err, commonv1.Reason_REASON_PRECONDITION_FAILED)
}

// Of many that present one token at once, each with a key of its own, one is served.
func TestManyWithOneBundleAtOnce(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	signed := k.ca.signed.Load()
	b := k.mustBundle(m.node)
	var wg sync.WaitGroup
	served := make(chan string, 200)
	for range 200 {
		csr := k.csr()
		wg.Go(func() {
			if resp, err := k.enroll(b.Token, csr); err == nil {
				served <- resp.GetNodeInstanceId()
			}
		})
	}
	wg.Wait()
	if len(served) != 1 || k.ca.signed.Load() != signed+1 {
		t.Errorf("%d were served, %d signed", len(served), k.ca.signed.Load()-signed)
	}
}

// The states in which a node may be given a bundle, and in which one that was issued before may be used.
func TestABundleByNodeState(t *testing.T) {
	type refusal = commonv1.Reason
	const (
		none    = commonv1.Reason_REASON_UNSPECIFIED
		unmet   = commonv1.Reason_REASON_PRECONDITION_FAILED
		retired = commonv1.Reason_REASON_IDENTITY_RETIRED
	)
	for name, c := range map[string]struct {
		state, alarm string
		issue, use   refusal
		next         string // a part of the next action
	}{
		"active": {"active", "", none, none, ""},
		"held for a lost join state": {
			"held", "join_state_lost", none, none, "",
		},
		"held by an operator": {
			"held", "", unmet, commonv1.Reason_REASON_IDENTITY_HELD, "gpuaas nodes reactivate",
		},
		"copied": {
			"held", "cloned_identity_detected", unmet, commonv1.Reason_REASON_IDENTITY_HELD, "gpuaas nodes enroll",
		},
		"with a token of two keys": {
			"held", "token_reuse", unmet, commonv1.Reason_REASON_IDENTITY_HELD, "security role reactivates",
		},
		"quarantined": {
			"quarantined", "", unmet, commonv1.Reason_REASON_IDENTITY_QUARANTINED, "gpuaas nodes reactivate",
		},
		"fenced": {
			"fenced", "", unmet, commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED, "security role reactivates",
		},
		"retired": {"retired", "", retired, retired, "gpuaas nodes enroll"},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			m := k.enrolled("node-1")
			before := k.mustBundle(m.node)
			k.exec(`UPDATE recovery.identity SET state = $2, alarm = $3 WHERE node_id = $1`, m.node, c.state, c.alarm)
			_, err := m.k.enroller.Enroll(k.ctx, "192.0.2.1", m.request(before.Token, k.csr()))
			k.refused(err, c.use)
			k.exec(`UPDATE recovery.identity SET state = $2, alarm = $3 WHERE node_id = $1`, m.node, c.state, c.alarm)
			_, err = k.bundleFor(m.node)
			k.refused(err, c.issue)
			if c.next == "" {
				return
			}
			if f, ok := fault.As(err); !ok || !strings.Contains(f.Remedy, c.next) {
				t.Errorf("the next action is %v", f)
			}
		})
	}
}

func TestBadRequestsForBundles(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	for name, c := range map[string]struct {
		req  enrol.BundleRequest
		want commonv1.Reason
	}{
		"no reason":    {enrol.BundleRequest{NodeID: m.node, Reason: "  "}, commonv1.Reason_REASON_REASON_REQUIRED},
		"no node":      {enrol.BundleRequest{NodeID: "node-1", Reason: "r"}, commonv1.Reason_REASON_NOT_FOUND},
		"unknown node": {enrol.BundleRequest{NodeID: ids.New(), Reason: "r"}, commonv1.Reason_REASON_IDENTITY_UNKNOWN},
		"too long": {
			enrol.BundleRequest{NodeID: m.node, Reason: "r", Life: 25 * time.Hour}, commonv1.Reason_REASON_INVALID_ARGUMENT,
		},
		"negative": {
			enrol.BundleRequest{NodeID: m.node, Reason: "r", Life: -time.Hour}, commonv1.Reason_REASON_INVALID_ARGUMENT,
		},
	} {
		c.req.By = "ada"
		_, err := k.enroller.IssueBundle(k.ctx, c.req)
		if got := fault.ReasonOf(err); got != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A repetition with the same key has the same token with a new secret; another bundle ends the one before.
func TestRepeatedRequestsForABundle(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	other := k.enrolled("node-2")
	ask := func(node, key string) (enrol.BundleToken, error) {
		return k.enroller.IssueBundle(k.ctx, enrol.BundleRequest{NodeID: node, Reason: "r", Key: key, By: "ada"})
	}
	first, err := ask(m.node, "k1")
	if err != nil {
		t.Fatal(err)
	}
	again, err := ask(m.node, "k1")
	if err != nil || again.TokenID != first.TokenID || again.Token == first.Token {
		t.Fatalf("the repetition: %+v, %v", again, err)
	}
	_, err = k.enroll(first.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_INVALID)
	_, err = ask(other.node, "k1")
	k.refused(err, commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED)
	_, err = k.enroller.IssueBootstrap(k.ctx, "node-1", "", 0, "k1", "ada")
	k.refused(err, commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED)
	next := k.mustBundle(m.node)
	_, err = k.enroll(again.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_CONSUMED)
	testkit.SetClockOffset(k.db, 2*time.Hour)
	_, err = k.enroll(next.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_EXPIRED)
}

// An instance is given a bundle while it has its workspace's epoch; its launch secret follows, so that the same host
// may still repeat its registration.
func TestABundleOfAnInstance(t *testing.T) {
	k := newKit(t)
	workspace := ids.New()
	first := k.prepare(workspace, 1)
	m := k.machine()
	m.took(m.mustEnroll(first.secret, k.csr()))
	m.admit()
	b := k.mustBundle(first.node)
	resp := m.mustEnroll(b.Token, k.csr())
	if resp.GetNodeInstanceId() != m.instance || resp.GetWorkspaceId() != workspace || resp.GetEpoch() != 1 {
		t.Errorf("it is %v", resp)
	}
	if n := k.count(`SELECT count(*) FROM recovery.token WHERE kind = 'launch' AND state = 'used' AND used_serial = $1`,
		k.serialOf(resp)); n != 1 {
		t.Error("the launch secret does not follow")
	}
	left := k.mustBundle(first.node)
	k.prepare(workspace, 2)
	_, err := k.enroll(left.Token, k.csr())
	k.refused(err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	_, err = k.bundleFor(first.node)
	k.refused(err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
}

// A key that a bundle's request has must be one that certified nothing yet.
func TestABundleWithAKeyThatWasUsed(t *testing.T) {
	k := newKit(t)
	m := k.machine()
	csr := k.csr()
	m.took(m.mustEnroll(k.bootstrap("node-1").Token, csr))
	m.admit()
	b := k.mustBundle(m.node)
	_, err := m.k.enroller.Enroll(k.ctx, "192.0.2.1", m.request(b.Token, csr))
	k.refused(err, commonv1.Reason_REASON_CSR_REFUSED)
	m.took(m.mustEnroll(b.Token, k.csr()))
}
