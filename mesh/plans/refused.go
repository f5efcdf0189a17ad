package plans

import "github.com/gpuaas/mesh/internal/pg"

// refused are the statements that are not planned with arguments: a constraint, a policy or a function refuses the
// values that Arguments makes up. Most insert one row, and read by its key at most. What they cost is in the benches
// of the operations that they are part of.
var refused = map[string]bool{
	"allocation.account_instance": true, "allocation.bind_devices": true, "allocation.reserve_slot_again": true,
	"allocation.insert_allocation_row": true, "allocation.insert_instance": true,
	"allocation.note_unaccounted_rows": true, "ask.want": true, "audit.count_in_window": true,
	"audit.close_windows": true, "churn.set_buckets": true, "claims.change": true, "claims.intend": true,
	"detect.make_cursor": true, "diagnostics.write_record": true, "drift.write_facts": true,
	"drift.write_profile": true, "enrol.insert_claim": true, "enrol.insert_operator_token": true,
	"events.append_many": true, "events.append_many_uuids": true, "events.append_one": true,
	"events.append_one_uuids": true, "events.append_seen": true, "events.make_cursor": true,
	"events.notify_all": true, "finding.insert_finding": true, "fleet.insert_incidents": true,
	"gate.note_verdict": true, "gate.raise": true, "guard.settle_evidence": true, "identity.insert_node": true,
	"identity.insert_opened_sessions": true, "identity.insert_serial": true, "identity.update_nodes": true,
	"instance.insert": true, "instance.insert_launch_secret": true, "keys.insert_incident": true,
	"keyset.insert_key": true, "keyset.insert_repeat": true, "keyset.insert_rotation": true,
	"launchlog.accept": true, "launchlog.advance": true, "launchlog.remember_report": true,
	"notify.put_impacts": true, "operation.insert_operation_key": true, "people.insert_person": true,
	"people.insert_session": true, "profiles.insert": true, "auditlog.insert_audit": true,
	"auditlog.insert_checkpoint": true, "project.keep_events": true, "project.upsert": true,
	"provision.insert_handle": true, "reap.count_try": true, "reap.insert_ended_instance": true,
	"rig.insert_tenant": true, "rollback.insert_incident": true, "saga.start_run": true,
	"spec.limit_counting": true, "status.drop_parked": true, "status.forget_consumer": true,
	"status.replay_parked": true, "storage.insert_incident": true, "task.enqueue": true,
	"tenants.insert_tenant": true, "tokens.offer": true, "tokens.use": true, "trust.insert_issuer": true,
	"trust.open_incident": true, "view.take_snapshot": true, "watchdog.insert_records": true,
	"watchdog.note_instance": true, "watchdog.note_run": true, "watchdog.note_workspace": true,
	"workspace.insert": true,
}

// Refused reports whether a statement is one of those whose made-up arguments the database refuses.
func Refused(s *pg.Statement) bool { return refused[s.Name()] }
