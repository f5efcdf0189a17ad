package identity

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity/opened"
)

// reportEvery is the least time between two reports of one instance that keeps connecting: a host that starts the
// instance again and again must not fill the event log.
const reportEvery = 5 * time.Minute

// MarkEnded sets on each retired instance among the records the reason with which it is refused: epoch_superseded if a
// later epoch, or another instance of the same one, was prepared since, else epoch_ended. A retired machine is refused
// as identity_retired. The caller holds the locks on the records.
func MarkEnded(ctx context.Context, tx pgx.Tx, records map[string]*Record) error {
	retired := map[string][]*Record{}
	var workspaces []string
	for _, r := range records {
		if r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED || r.LaunchedInstanceID == "" {
			continue
		}
		r.ended = commonv1.Reason_REASON_EPOCH_ENDED
		if retired[r.WorkspaceID] == nil {
			workspaces = append(workspaces, r.WorkspaceID)
		}
		retired[r.WorkspaceID] = append(retired[r.WorkspaceID], r)
	}
	if len(workspaces) == 0 {
		return nil
	}
	holders, err := pg.All[epochHolder](ctx, tx, readHolders, workspaces)
	if err != nil {
		return fmt.Errorf("read epochs of workspaces: %w", err)
	}
	for _, h := range holders {
		for _, r := range retired[h.WorkspaceID] {
			if r.LaunchedInstanceID != h.InstanceID {
				r.ended = commonv1.Reason_REASON_EPOCH_SUPERSEDED
			}
		}
	}
	return nil
}

// Ended returns the reason that MarkEnded set; unspecified for everything but a retired instance.
func (r *Record) Ended() commonv1.Reason { return r.ended }

// Caller is what a refused instance reported of itself.
type Caller struct{ RemoteAddress, MachineID, BootID string }

// ReportWoken appends the event that a retired instance connected and was refused, unless one was appended within the
// last five minutes. It returns whether it appended one. MarkEnded must have been called on the record.
func ReportWoken(ctx context.Context, tx pgx.Tx, r *Record, by Caller) (bool, error) {
	due, err := pg.One[refused](ctx, tx, countRefusal, r.LaunchedInstanceID, reportEvery.Seconds())
	if pg.IsNoRows(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("count refusal of instance: %w", err)
	}
	_, err = events.Append(ctx, tx, events.Event{
		Kind: "instance.refused", AggregateType: "woken_instance", AggregateID: r.LaunchedInstanceID,
		AggregateVersion: due.Refusals,
		Payload: &recoveryv1.InstanceRefused{
			InstanceId: r.LaunchedInstanceID, WorkspaceId: r.WorkspaceID, TenantId: r.TenantID, Epoch: r.Epoch, NodeId: r.NodeID,
			Reason: r.ended, RemoteAddress: opened.Cut(by.RemoteAddress), MachineId: opened.Cut(by.MachineID),
			BootId:    opened.Cut(by.BootID),
			RefusedAt: timestamppb.New(due.RefusedAt),
			Version:   due.Refusals,
		},
		Correlation: events.Correlation{
			CorrelationID: obs.From(ctx).CorrelationID, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID, NodeID: r.NodeID,
			NodeInstanceID: r.InstanceID,
		},
	})
	if err != nil {
		return false, fmt.Errorf("report refused instance: %w", err)
	}
	return true, nil
}
