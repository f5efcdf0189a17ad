package nodeapi_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// accepts returns nil if the agents' port accepts a certificate of an authority.
func (k *kit) accepts(r *replica, authority *nodeapitest.Authority) error {
	k.t.Helper()
	cert, err := authority.Node(ids.New())
	if err != nil {
		k.t.Fatal(err)
	}
	config, err := k.clientTLS(cert)
	if err != nil {
		k.t.Fatal(err)
	}
	config.NextProtos = []string{"h2"}
	conn, err := (&tls.Dialer{Config: config}).DialContext(k.t.Context(), "tcp", r.AgentAddr())
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := fmt.Fprint(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 1))
	return err
}

// TestIssuersThatRecoverySends: the agents' port trusts them beside those of its file, publishes them, and does not any
// more once they are withdrawn. What cannot be read is left out. A replica that starts trusts them from its first
// connection on.
func TestIssuersThatRecoverySends(t *testing.T) {
	k := newKit(t)
	var file string
	r := k.replica(func(cfg *nodeapi.Config) { file = cfg.NodeCAFile })
	next, err := nodeapitest.NewAuthority("next")
	if err != nil {
		t.Fatal(err)
	}
	roots, err := next.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	own, err := k.nodes.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	if k.accepts(r, k.nodes) != nil || k.accepts(r, next) == nil {
		t.Fatal("the port does not trust its file alone")
	}
	session := k.node()
	k.connect(session, r.AgentAddr(), true)
	session.open()
	published := func(want ...string) {
		t.Helper()
		slices.Sort(want)
		testkit.Eventually(t, patience, func() error {
			list, err := replicas.ReadTrust(t.Context(), k.db.Pool(pg.RoleRecovery))
			if err != nil || len(list) != 1 {
				return errors.Join(err, fmt.Errorf("%d replicas", len(list)))
			}
			got := slices.Clone(list[0].ClientCAs)
			if slices.Sort(got); !slices.Equal(got, want) {
				return fmt.Errorf("it publishes %v", got)
			}
			return nil
		})
	}
	leaf, err := next.Node(ids.New())
	if err != nil {
		t.Fatal(err)
	}
	k.backend.SendIssuers(roots.Roots()[0].Raw, []byte("junk"), leaf.Certificate[0])
	published(own.Fingerprints()[0], roots.Fingerprints()[0])
	if err := errors.Join(k.accepts(r, k.nodes), k.accepts(r, next)); err != nil {
		t.Errorf("with both: %v", err)
	}
	// The file is read again, and what recovery sends stays.
	third, err := nodeapitest.NewAuthority("third")
	if err != nil {
		t.Fatal(err)
	}
	swapped, err := third.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	if err := pki.WriteFile(file, swapped.PEM()); err != nil {
		t.Fatal(err)
	}
	published(swapped.Fingerprints()[0], roots.Fingerprints()[0])
	if err := k.accepts(r, next); err != nil {
		t.Errorf("with another file: %v", err)
	}
	second := k.replica()
	if err := k.accepts(second, next); err != nil {
		t.Errorf("the first connection of a replica that starts: %v", err)
	}
	second.stop()
	k.backend.SendIssuers()
	testkit.Eventually(t, patience, func() error {
		if k.accepts(r, next) == nil {
			return errors.New("it is trusted still")
		}
		return nil
	})
	select {
	case err := <-session.ended:
		t.Errorf("a session of the file's issuer ended: %v", err)
	default:
	}
}
