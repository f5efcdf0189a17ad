package project

import (
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
)

// Kinds of the events of recovery's watchdog.
const (
	KindRecovery = "recovery_record.changed"
	KindIncident = "incident.changed"
	KindBrake    = "brake.changed"
)

// watchdogRows returns the rows of an event about a recovery, an incident or the brake.
func watchdogRows(r events.Record) ([]row, error) {
	switch r.Kind {
	case KindRecovery:
		m, body, err := decode(r, &recoveryv1.RecoveryRecord{})
		if err != nil {
			return nil, err
		}
		detected := moment(m.GetDetectedAt())
		if detected == nil {
			detected = r.CreatedAt
		}
		return one(r, "recovery_record", []any{
			key(m.GetRecordId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()), detected, body,
		})
	case KindIncident:
		m, body, err := decode(r, &recoveryv1.Incident{})
		if err != nil {
			return nil, err
		}
		return one(r, "incident", []any{key(m.GetIncidentId()), r.AggregateVersion, m.GetClosedAt() == nil, body})
	default:
		m, body, err := decode(r, &recoveryv1.Brake{})
		if err != nil {
			return nil, err
		}
		return one(r, "brake", []any{r.AggregateID, r.AggregateVersion, m.GetEngaged(), body})
	}
}
