package lifecycle

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestLiveRowsAreAnnounced walks the announcement of two lives to its end: the rows of the live one are announced as
// they are, and of the one that is over only its tenant is announced.
func TestLiveRowsAreAnnounced(t *testing.T) {
	testkit.IO(t)
	db, ctx := testkit.DB(t), testkit.Context(t)
	pool := db.Pool(pg.RoleLifecycle)
	stands := life{
		workspace: "active", run: "running", task: "running", claim: "held", allocation: "active",
		instance: "live", age: time.Hour,
	}
	over := life{
		workspace: "decommissioned", run: "succeeded", task: "succeeded", claim: "released", allocation: "released",
		instance: "ended", age: time.Hour,
	}
	for _, l := range []*life{&stands, &over} {
		if err := l.insert(ctx, pool); err != nil {
			t.Fatal(err)
		}
	}
	server := reannounce.NewServer(pool, func() {}, announced()...)
	for after := ""; ; {
		answer, err := server.AnnounceRows(ctx, &commonv1.AnnounceRowsRequest{After: after})
		if err != nil {
			t.Fatalf("after %q: %v", after, err)
		}
		if after = answer.GetNext(); after == "" {
			break
		}
	}
	rows, err := pool.Query(ctx, `SELECT e.kind || ' ' || e.aggregate_id || ' ' || e.aggregate_version FROM events.event e
		ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		got = append(got, line)
	}
	tenants := []string{"tenant.changed " + stands.of["tenant"] + " 1", "tenant.changed " + over.of["tenant"] + " 1"}
	want := []string{
		"allocation.changed " + stands.of["allocation"] + " 1", "claim.changed " + stands.of["claim"] + " 1",
		"instance.changed " + stands.of["instance"] + " 1", "run.changed " + stands.of["run"] + " 1",
		"task.changed " + stands.of["task"] + " 1",
	}
	want = append(append(want, tenants...), "workspace.changed "+stands.of["workspace"]+" 1")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("announced (-want +got):\n%s", diff)
	}
	if _, err := server.AnnounceRows(ctx, &commonv1.AnnounceRowsRequest{After: "elsewhere/1"}); err == nil {
		t.Error("an unknown place was taken")
	}
}
