package diagnostics_test

import (
	"context"
	"maps"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/diagnostics"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type kit struct {
	t      *testing.T
	ctx    context.Context
	db     *testkit.Database
	server *diagnostics.Server
	node   string
	merged int // calls of Merged

	registry *prometheus.Registry
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{t: t, db: testkit.DB(t), node: ids.New(), registry: prometheus.NewPedanticRegistry()}
	k.ctx = rpc.WithPerson(testkit.Context(t), rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	var err error
	if k.server, err = diagnostics.New(diagnostics.Deps{
		Logger: testkit.Logger(t), Pool: k.db.Pool(pg.RoleRecovery), Fresh: time.Hour, Merged: func() { k.merged++ },
		Registerer: k.registry,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := k.db.Pool(pg.RoleRecovery).Exec(k.ctx, `INSERT INTO recovery.judgement (node_id, identity_state,
		generation, session_version) VALUES ($1, 'active', 0, 0)`, k.node); err != nil {
		t.Fatal(err)
	}
	return k
}

func (k *kit) merge(list ...*recoveryv1.HostRecord) *recoveryv1.MergeDiagnosticsResponse {
	k.t.Helper()
	out, err := k.server.MergeDiagnostics(k.ctx, &recoveryv1.MergeDiagnosticsRequest{NodeId: k.node, Records: list})
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

func (k *kit) count(query string) int {
	k.t.Helper()
	n := 0
	if err := k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, query).Scan(&n); err != nil {
		k.t.Fatal(err)
	}
	return n
}

// wantRefused checks how many entries were counted as not kept.
func (k *kit) wantRefused(unknown, outOfTime int) {
	k.t.Helper()
	families, err := k.registry.Gather()
	if err != nil {
		k.t.Fatal(err)
	}
	got := map[string]int{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			got[family.GetName()+" "+m.GetLabel()[0].GetValue()] = int(m.GetCounter().GetValue())
		}
	}
	const name = "recovery_diagnostics_refused_total"
	if want := map[string]int{name + " unknown_code": unknown, name + " out_of_time": outOfTime}; !maps.Equal(got, want) {
		k.t.Errorf("counted %v, want %v", got, want)
	}
}

func record(code string, at time.Time) *recoveryv1.HostRecord {
	return &recoveryv1.HostRecord{
		Code: code, Detail: "it is " + code, FirstSeenAt: timestamppb.New(at), LastSeenAt: timestamppb.New(at), Count: 2,
		NextRetry: durationpb.New(time.Minute), RetryCorrelationId: ids.New(),
	}
}

// The same record twice is one: one event, one audit entry, one piece of evidence. A record that cannot be read is set
// aside by itself, and counted each time that it is brought.
func TestTheSameRecordTwiceIsOne(t *testing.T) {
	k := newKit(t)
	now := time.Now()
	list := []*recoveryv1.HostRecord{
		record("server_tls_untrusted", now), record("process_alive", now), record("of_a_newer_agent", now),
		record("edge_rate_limited", now.Add(-48*time.Hour)),
		{Code: "connection_refused"},
		{Code: "edge_rate_limited", LastSeenAt: &timestamppb.Timestamp{Seconds: 1 << 60}},
	}
	k.wantRefused(0, 0)
	first := k.merge(list...)
	k.wantRefused(1, 3)
	if !first.GetChanged() || first.GetTaken() != 2 || first.GetUnknownCodes() != 1 || first.GetOutOfTime() != 3 ||
		len(first.GetExplains()) != 1 || first.GetExplains()[0] != "server_tls_untrusted" || first.GetPos() == "" {
		t.Errorf("%v", first)
	}
	if second := k.merge(list...); second.GetChanged() || second.GetPos() != "" || second.GetTaken() != 2 {
		t.Errorf("once more: %v", second)
	}
	k.wantRefused(2, 6)
	for query, want := range map[string]int{
		`SELECT count(*) FROM events.event WHERE kind = 'diagnostics.merged'`:                           1,
		`SELECT count(*) FROM recovery.host_record WHERE brought_by LIKE '%ada%' AND version = 1`:       1,
		`SELECT count(*) FROM recovery.evidence WHERE source = 'host'`:                                  1,
		`SELECT count(*) FROM recovery.judgement WHERE due_at IS NOT NULL`:                              1,
		`SELECT count(*) FROM recovery.evidence WHERE fresh_until > mesh.clock() + interval '1 hour'`:   0,
		`SELECT count(*) FROM recovery.evidence WHERE detail LIKE 'server_tls_untrusted: it is%ada%'`:   1,
		`SELECT count(*) FROM events.event WHERE kind LIKE 'audit%' AND aggregate_type LIKE '%audit%'`:  1,
		`SELECT count(*) FROM recovery.evidence WHERE observed_at > mesh.clock() + interval '1 minute'`: 0,
	} {
		if got := k.count(query); got != want {
			t.Errorf("%s: %d, want %d", query, got, want)
		}
	}
	if k.merged != 1 {
		t.Errorf("the judge was called %d times", k.merged)
	}
	if third := k.merge(record("edge_rate_limited", now)); !third.GetChanged() ||
		k.count(`SELECT version FROM recovery.host_record`) != 2 {
		t.Errorf("another record: %v", third)
	}
}

func TestANodeThatIsNotKnown(t *testing.T) {
	k := newKit(t)
	_, err := k.server.MergeDiagnostics(k.ctx, &recoveryv1.MergeDiagnosticsRequest{
		NodeId: ids.New(), Records: []*recoveryv1.HostRecord{record("edge_rate_limited", time.Now())},
	})
	if !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) || k.merged != 0 {
		t.Errorf("%v", err)
	}
	k.wantRefused(0, 0)
}
