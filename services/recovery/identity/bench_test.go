package identity_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// BenchmarkReconnect is a fleet that comes back at once: each node opens and confirms, in the batches of a nodeapi
// replica.
func BenchmarkReconnect(b *testing.B) {
	const fleet, batch = 1024, 256
	testkit.IO(b)
	kit := makeBench(b)
	nodes := make([]*node, fleet)
	for i := range nodes {
		nodes[i] = &node{id: ids.New(), instance: ids.New(), serial: fmt.Sprintf("%x", []byte(ids.New()[24:]))}
	}
	kit.tx(func(tx pgx.Tx) error {
		m, err := identity.ReadMoment(kit.ctx, tx)
		if err != nil {
			return err
		}
		records := make([]*identity.Record, 0, fleet)
		for i, n := range nodes {
			r := &identity.Record{NodeID: n.id, Name: fmt.Sprintf("node-%d", i)}
			if _, err := identity.Insert(kit.ctx, tx, r); err != nil {
				return err
			}
			if err := identity.Activate(kit.ctx, tx, r, n.instance, certificate(n.serial), "bench", "enrolled", m); err != nil {
				return err
			}
			records = append(records, r)
		}
		_, err = identity.Save(kit.ctx, tx, records...)
		return err
	})
	for b.Loop() {
		for at := 0; at < fleet; at += batch {
			opens := make([]*recoveryv1.OpenSession, batch)
			for i := range opens {
				opens[i] = kit.hello(nodes[at+i])
			}
			results, _, err := kit.identities.Open(kit.ctx, opens)
			if err != nil {
				b.Fatal(err)
			}
			confirms := make([]*recoveryv1.ConfirmSession, batch)
			for i, r := range results {
				nodes[at+i].joinState = r.GetJoinState()
				confirms[i] = &recoveryv1.ConfirmSession{
					SessionId: opens[i].GetSessionId(), NodeId: opens[i].GetNodeId(), NodeInstanceId: opens[i].GetNodeInstanceId(),
					Generation: r.GetGeneration(), Serial: opens[i].GetSerial(),
				}
			}
			counted, _, err := kit.identities.Confirm(kit.ctx, confirms)
			if err != nil {
				b.Fatal(err)
			}
			for _, c := range counted {
				if !c.GetAdmitted() {
					b.Fatalf("%v", c)
				}
			}
		}
	}
	b.ReportMetric(float64(fleet)*float64(b.N)/b.Elapsed().Seconds(), "sessions/s")
}
