package watchdog_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/fleet"
)

// An incident that a newer build opened, with a severity and a layer that this one does not know: the round goes on and
// closes others, and the stored values of the incident stay as they were written. It is not announced with other values
// than its own.
func TestAnIncidentOfANewerBuildStopsNoOther(t *testing.T) {
	k := newKit(t)
	k.fleet(3)
	put := func(key, severity, layer string) string {
		id := ids.New()
		_, err := k.db.OwnerPool().Exec(k.ctx,
			`INSERT INTO recovery.incident (incident_id, kind, key, severity, summary, owner_layer, next_action,
				opened_at, last_seen_at, count)
					VALUES ($1, 'machine_unreachable', $2, $3, 's', $4, 'n', mesh.clock(), mesh.clock(), 1)`,
			id, key, severity, layer)
		k.must(err)
		return id
	}
	// as its migration does
	_, err := k.db.OwnerPool().Exec(k.ctx, `ALTER TABLE recovery.incident DROP CONSTRAINT incident_severity_check`)
	k.must(err)
	newer := put(ids.New(), "p9", "fabric")
	known := put(ids.New(), "p1", "workflow")
	announce := reannounce.NewServer(k.db.Pool(pg.RoleRecovery), func() {}, fleet.Announced()...)
	if _, err := announce.AnnounceRows(k.ctx, &commonv1.AnnounceRowsRequest{}); err == nil ||
		!strings.Contains(err.Error(), newer) {
		t.Errorf("announced as something that this build knows: %v", err)
	}
	k.detect()
	var stored []string
	rows, err := k.db.OwnerPool().Query(k.ctx,
		`SELECT incident_id || ' ' || severity || ' ' || owner_layer || ' ' || (closed_at IS NOT NULL)
		FROM recovery.incident ORDER BY incident_id`)
	k.must(err)
	defer rows.Close()
	for rows.Next() {
		var text string
		k.must(rows.Scan(&text))
		stored = append(stored, text)
	}
	k.must(rows.Err())
	if diff := cmp.Diff([]string{newer + " p9 fabric true", known + " p1 workflow true"}, stored); diff != "" {
		t.Errorf("incidents are stored as (-want +got):\n%s", diff)
	}
	shown := map[string]commonv1.Severity{}
	for _, i := range k.incidents(commonv1.IncidentKind_INCIDENT_KIND_MACHINE_UNREACHABLE) {
		if i.GetClosedAt() == nil {
			t.Errorf("shown as open: %v", i)
		}
		shown[i.GetIncidentId()] = i.GetSeverity()
	}
	want := map[string]commonv1.Severity{
		newer: commonv1.Severity_SEVERITY_UNSPECIFIED,
		known: commonv1.Severity_SEVERITY_P1,
	}
	if diff := cmp.Diff(want, shown); diff != "" {
		t.Errorf("incidents are shown as (-want +got):\n%s", diff)
	}
}

// Two classes of failures, one in a layer that this build does not know: both become incidents, the one without a
// layer.
func TestAClassOfANewerBuildStopsNoOther(t *testing.T) {
	k := newKit(t)
	k.fleet(1)
	reported := testkit.SetAside(t, "watchdog.class")
	for range 3 {
		_, err := k.db.OwnerPool().Exec(k.ctx, `INSERT INTO recovery.class_sighting (step, error_code, run_id, workspace_id,
				tenant_id, error_layer, seen_at)
			SELECT n.step, 'internal', $1::uuid, $1::uuid, $1::uuid, n.layer, mesh.clock()
			FROM (VALUES ('a', 'fabric'), ('b', 'workflow')) AS n (step, layer)`, ids.New())
		k.must(err)
	}
	k.detect()
	got := map[string]commonv1.OwnerLayer{}
	for _, i := range k.incidents(commonv1.IncidentKind_INCIDENT_KIND_STEP_CLASS) {
		got[i.GetStep()] = i.GetOwnerLayer()
	}
	want := map[string]commonv1.OwnerLayer{
		"a": commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED, "b": commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW,
	}
	if diff := cmp.Diff(want, got); diff != "" || reported() != 1 {
		t.Errorf("%d were reported, incidents are (-want +got):\n%s", reported(), diff)
	}
}
