package nodeapi_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// handshake makes a handshake as a client with a certificate, and returns the error by which the server ended it; nil:
// the server accepted it. In TLS 1.3 the client learns of a refusal with its first read.
func (k *kit) handshake(addr string, cert tls.Certificate, change ...func(*tls.Config)) (tls.ConnectionState, error) {
	k.t.Helper()
	conf, err := k.clientTLS(cert)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, c := range change {
		c(conf)
	}
	ctx, cancel := context.WithTimeout(k.t.Context(), patience)
	defer cancel()
	conn, err := (&tls.Dialer{Config: conf}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return tls.ConnectionState{}, err
	}
	defer func() { _ = conn.Close() }() // only what the server said matters
	tlsConn, ok := conn.(*tls.Conn)
	if !ok {
		k.t.Fatal("no TLS connection")
	}
	_, err = conn.Read(make([]byte, 1)) // the first of the server's HTTP/2 settings
	return tlsConn.ConnectionState(), err
}

// TestRefusedHandshakesAreReportedWithTheirClaims makes handshakes at the agents' port with certificates that it
// refuses, and checks that each is written as an event with what was claimed, cleaned and bounded, and that those that
// nothing is wrong with are not.
func TestRefusedHandshakesAreReportedWithTheirClaims(t *testing.T) {
	k := newKit(t)
	node := [8]string{}
	for i := range node {
		node[i] = ids.New()
		k.backend.Change(node[i], func(*recoveryv1.NodeAuthority) {}) // recovery knows it
	}
	r := k.replica()
	addr := r.AgentAddr()
	k.session(r)                                      // the replica has recovery's view
	foreign, err := nodeapitest.NewAuthority("nodes") // of the same name
	if err != nil {
		t.Fatal(err)
	}
	san := func(id string) string { return pki.NodeID(nodeapitest.TrustDomain, id).String() }
	now := time.Now()
	type claim struct {
		reason, node, san string
	}
	want := map[string]claim{} // by serial and issuer
	refuse := func(name string, authority *nodeapitest.Authority, leaf nodeapitest.Leaf, reason commonv1.Reason, node,
		claimed string,
	) {
		t.Helper()
		cert, err := authority.Issue(leaf)
		if err != nil {
			t.Fatal(err)
		}
		cert.Certificate = append(cert.Certificate, authority.Cert.Raw)
		_, err = k.handshake(addr, cert)
		if alert := (tls.AlertError(0)); err == nil || !errors.As(err, &alert) && !strings.Contains(err.Error(), "tls") {
			t.Fatalf("%s: %v", name, err)
		}
		want[pki.SerialString(cert.Leaf.SerialNumber)+pki.Fingerprint(authority.Cert)] = claim{reason.String(), node, claimed}
	}
	const (
		expired   = commonv1.Reason_REASON_CERTIFICATE_EXPIRED
		untrusted = commonv1.Reason_REASON_CERTIFICATE_UNTRUSTED
		invalid   = commonv1.Reason_REASON_CERTIFICATE_INVALID
	)
	refuse("expired", k.nodes, nodeapitest.Leaf{
		URIs: []string{san(node[0])}, From: now.Add(-2 * time.Hour), To: now.Add(-time.Hour),
	}, expired, node[0], san(node[0]))
	refuse("not yet valid", k.nodes, nodeapitest.Leaf{
		URIs: []string{san(node[1])}, From: now.Add(time.Hour), To: now.Add(2 * time.Hour),
	}, invalid, node[1], san(node[1]))
	refuse("of another authority", foreign, nodeapitest.Leaf{URIs: []string{san(node[2])}}, untrusted, node[2],
		san(node[2]))
	refuse("without a name", k.nodes, nodeapitest.Leaf{Common: node[3]}, invalid, "", "")
	refuse("with two names", k.nodes, nodeapitest.Leaf{URIs: []string{san(node[4]), san(node[5])}}, invalid, "",
		san(node[4])+","+san(node[5]))
	huge := san(strings.Repeat("a", 8<<10))
	refuse("with a huge name", k.nodes, nodeapitest.Leaf{URIs: []string{huge}}, invalid, "", huge[:255]+"...")
	many := make([]string, 200)
	for i := range many {
		many[i] = san(ids.New())
	}
	refuse("with many names", foreign, nodeapitest.Leaf{URIs: many}, untrusted, "", (strings.Join(many[:4], ",") +
		",and 196 more")[:255]+"...")
	refuse("of another mesh", k.nodes, nodeapitest.Leaf{URIs: []string{"spiffe://other.test/node/" + node[6]}}, invalid,
		"", "spiffe://other.test/node/"+node[6])

	good, err := k.nodes.Node(node[7])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.handshake(addr, good); err != nil {
		t.Fatalf("a good certificate: %v", err)
	}

	testkit.Eventually(t, patience, func() error {
		list, err := testkit.ReadEvents(t.Context(), k.db.Pool(pg.RoleReadmodel), `kind = 'ingress.rejected'`)
		if err != nil {
			return err
		}
		got := map[string]testkit.Event{}
		for _, e := range list {
			got[e.Text("serial")+e.Text("issuer_fingerprint")] = e
		}
		if len(got) != len(want) {
			return fmt.Errorf("%d rejections, want %d", len(got), len(want))
		}
		for certificate, w := range want {
			e, ok := got[certificate]
			if !ok {
				return fmt.Errorf("no rejection of %v", w)
			}
			if e.Text("reason") != w.reason || e.Text("claimed_node_id") != w.node || e.Text("claimed_san") != w.san ||
				e.Text("remote_address") != "127.0.0.1" ||
				e.Text("count") != "1" || e.Text("replica_id") == "" || e.NodeID != w.node {
				t.Fatalf("rejection %v, want %v", e.Message, w)
			}
		}
		return nil
	})
}

// TestEveryConnectionIsAdmittedOrRefused checks that the agents' port resumes no TLS session: a client that would gets
// none to resume, and is judged by its certificate again.
func TestEveryConnectionIsAdmittedOrRefused(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.node()
	cache := tls.NewLRUClientSessionCache(8)
	for range 3 {
		state, err := k.handshake(r.AgentAddr(), a.cert, func(c *tls.Config) {
			c.ClientSessionCache = cache
			c.ServerName = "nodeapi" // the key of the cache
		})
		if err != nil {
			t.Fatal(err)
		}
		if state.DidResume {
			t.Fatal("a session was resumed")
		}
	}
	if _, ok := cache.Get("nodeapi"); ok {
		t.Error("the server gave a ticket")
	}
}
