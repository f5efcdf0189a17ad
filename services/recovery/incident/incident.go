// Package incident reports the incidents that parts of recovery open, go on with and close, each in its own row.
package incident

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
)

// Event returns the event of an incident as it is now.
func Event(i *recoveryv1.Incident) events.Event {
	return events.Event{
		Kind: "incident.changed", AggregateType: "incident", AggregateID: i.GetIncidentId(), AggregateVersion: i.GetVersion(),
		Payload:     i,
		Correlation: events.Correlation{CorrelationID: i.GetIncidentId()},
	}
}

// Entry returns the audit entry of a decision about an incident. Without an actor it is recovery's own.
func Entry(i *recoveryv1.Incident, action, actor string) audit.Entry {
	return audit.Entry{
		Action: action, Actor: actor, Reason: i.GetSummary(), SubjectType: "incident", SubjectID: i.GetIncidentId(),
		CorrelationID: i.GetIncidentId(),
		Details:       map[string]any{"kind": i.GetKind(), "severity": i.GetSeverity(), "count": i.GetCount()},
	}
}

// Report appends the event of an incident and, for an action, the audit entry of it.
func Report(ctx context.Context, tx pgx.Tx, i *recoveryv1.Incident, action, actor string) error {
	if _, err := events.Append(ctx, tx, Event(i)); err != nil || action == "" {
		return err
	}
	_, err := audit.Record(ctx, tx, Entry(i, action, actor))
	return err
}

// Stamp returns a time of a row as a message; nil for none.
func Stamp(at *time.Time) *timestamppb.Timestamp {
	if at == nil {
		return nil
	}
	return timestamppb.New(*at)
}
