package statements_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
)

// kept are the tables whose rows no cut takes away, with the reason.
var kept = map[string]string{
	"lifecycle.tenant":            "one row a tenant, which stands",
	"lifecycle.gpu_hold":          "is taken away with the release",
	"lifecycle.row_evidence_open": "is taken away when its evidence is settled",
	"lifecycle.suspicion":         "is taken away by the sweep that no longer sees it, or an hour after its detector",
	"lifecycle.audit_window":      "is taken away when its window is over",
	"lifecycle.launch_log":        "one row a placement",
	"nodeapi.audit_window":        "is taken away when its window is over",
	"nodeapi.observation":         "is replaced by the next session of its node, or taken away with its observer",
	"nodeapi.observer":            "is taken away once its node is silent for long",
	"recovery.authority_head":     "one row",
	"recovery.audit_window":       "is taken away when its window is over",
	"recovery.brake":              "one row",
	"recovery.churn_bucket":       "is taken away after a day by the watchdog",
	"recovery.class_sighting":     "is taken away after a day by the watchdog",
	"recovery.enrollment_attempt": "one row a node and outcome, which goes with the node",
	"recovery.profile_name":       "one row a name, which is never given again",
	"recovery.profile_head":       "one row",
	"recovery.node_profile":       "one row a node, which goes with its judgement",
	"recovery.host_facts":         "one row a node, which goes with its judgement",
	"lifecycle.verdict_cordon":    "one row a node on which a verdict was applied, which goes with its gate",
	"recovery.watch_emptied":      "is taken away when its finding is resolved, or by the watchdog with its workspace",
	"recovery.record_request":     "is taken away when its task has ended or after an hour; there are about 256 at most",
	"recovery.host_record":        "one row a machine, which goes with its judgement",
	"recovery.ca_preflight":       "one row",
	"recovery.ca_preflight_lease": "one row",
	"recovery.issuance_look":      "one row",
	"recovery.authority_rotation": "one row a rotation, which a person asks for",
	"recovery.authority_holder":   "one row a replica, which goes when the next issuer signs or is given up",
	"recovery.authority_signs":    "one row",
	"recovery.trusted_issuer":     "is taken away when its root is retired or withdrawn; there are sixteen at most",
	"recovery.policy_version":     "one row a policy key",
	"recovery.profile_due":        "one row a version of a profile, which is taken away when its nodes are due",
	"recovery.rollback":           "one row",
	"recovery.rollback_seen":      "is taken away when the rollback is accepted",
	"recovery.watch_instance":     "is taken away by the watchdog",
	"recovery.watch_run":          "is taken away after two hours by the watchdog",
	"recovery.watch_session":      "is taken away by the watchdog",
	"recovery.watch_workspace":    "is taken away after a day by the watchdog",
	"recovery.watchdog_lease":     "one row",
	"recovery.watch_count":        "one row a placement",
	"recovery.watch_machine":      "is taken away with the last workspace of its machine",
	"readmodel.audit_head":        "one row",
	"readmodel.audit_window":      "is taken away when its window is over",
	"readmodel.brake":             "one row a brake",
	"readmodel.impact_due":        "one row a node or workspace, which is taken away when it was worked on",
	"readmodel.tenant":            "one row a tenant, which stands",
	"readmodel.workspace_count":   "one row a tenant, which stands",
	"readmodel.person":            "is taken away thirty days after its end",
	"readmodel.person_session":    "is taken away a week after its end",
	"mesh.era":                    "one row",
	"mesh.seeded":                 "one row",
	"mesh.policy":                 "one row a policy key",
	"mesh.goose_db_version":       "one row a migration",
	"mesh.replica":                "is taken away once its replica is silent for long",
	"mesh.periodic_job":           "one row a job",
	"mesh.retention":              "one row a cut",
	"mesh.judged":                 "one row a service",
	"mesh.storage_sample":         "is taken away after a week by the next sample",
	"lifecycle.task_backlog":      "is taken away once its node is back, or after a day, by the sweep",

	"lifecycle.replica_seen":   "not written any more (00113)",
	"nodeapi.replica":          "not written any more (00113)",
	"readmodel.replica":        "not written any more (00113)",
	"recovery.watch_listening": "not written any more (00113)",
	"recovery.watch_replica":   "not written any more (00113)",

	"mesh.signing_key":         "the chain of keys is what later ones are believed by",
	"mesh.key_rotation":        "one row a rotation",
	"mesh.key_rotation_repeat": "one row a person's further request for an issuer that is awaited",
	"mesh.key_replica":         "is taken away after a day",
	"mesh.clock_offset":        "of the test kit",
}

// TestEveryTableHasATerm: a table whose rows are never cut is a decision. The role that cuts may delete from the
// others.
func TestEveryTableHasATerm(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	rows, err := db.OwnerPool().Query(t.Context(),
		`SELECT n.nspname || '.' || c.relname, has_table_privilege('mesh_retention', c.oid, 'DELETE')
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
			AND n.nspname IN ('lifecycle', 'nodeapi', 'recovery', 'readmodel', 'events', 'mesh')
			AND c.relname NOT LIKE 'river\_%' AND c.relname NOT LIKE 'scratch\_%'
				AND c.relname NOT IN ('event_cursor', 'parked_event')`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	left := maps.Clone(kept)
	for rows.Next() {
		var name string
		var cut bool
		if err := rows.Scan(&name, &cut); err != nil {
			t.Fatal(err)
		}
		_, stays := left[name]
		delete(left, name)
		if cut == stays {
			t.Errorf("%s: a cut takes its rows away: %t; it is listed as kept: %t", name, cut, stays)
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	if len(left) > 0 {
		t.Errorf("listed and not there: %v", slices.Sorted(maps.Keys(left)))
	}
}
