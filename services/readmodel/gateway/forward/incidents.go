package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Incidents serves IncidentService.
type Incidents struct {
	reads  caller.Reads
	owners Owners
}

// NewIncidents returns the server.
func NewIncidents(reads caller.Reads, owners Owners) *Incidents {
	return &Incidents{reads: reads, owners: owners}
}

// ListIncidents lists the open incidents, or all of them if the request includes closed ones.
func (i *Incidents) ListIncidents(ctx context.Context,
	req *readmodelv1.ListIncidentsRequest,
) (*readmodelv1.ListIncidentsResponse, error) {
	items, next, err := caller.List(ctx, i.reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*recoveryv1.Incident, string, error) {
			return s.Incidents(ctx, req.GetIncludeClosed(), page)
		})
	return &readmodelv1.ListIncidentsResponse{Items: items, NextPageToken: next}, err
}

// GetIncident returns one incident with the recoveries that it refers to, and how many workspaces are touched by
// evidence of their own while it covers their nodes.
func (i *Incidents) GetIncident(ctx context.Context,
	req *readmodelv1.GetIncidentRequest,
) (*readmodelv1.GetIncidentResponse, error) {
	out := &readmodelv1.GetIncidentResponse{}
	err := i.reads.Read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		if out.Incident, out.Recoveries, err = s.Incident(ctx, req.GetIncidentId()); err != nil {
			return err
		}
		if out.WorkspacesTouched, err = s.WorkspacesTouched(ctx, req.GetIncidentId()); err != nil {
			return err
		}
		out.CordonsWaiting, err = s.CordonsWaiting(ctx, out.GetIncident())
		return err
	})
	return out, err
}

// CloseIncident forwards a person's judgement of an incident to recovery.
func (i *Incidents) CloseIncident(ctx context.Context,
	req *readmodelv1.CloseIncidentRequest,
) (*readmodelv1.CloseIncidentResponse, error) {
	answer, err := operator(ctx, "recovery", i.owners.Watchdog.CloseIncident,
		&recoveryv1.CloseIncidentRequest{IncidentId: req.GetIncidentId(), Reason: req.GetReason()})
	return &readmodelv1.CloseIncidentResponse{Incident: answer.GetIncident(), Pos: answer.GetPos()}, err
}

// ListRecoveries lists recovery records, newest first. A person of a tenant gets only the records of that tenant.
func (i *Incidents) ListRecoveries(ctx context.Context,
	req *readmodelv1.ListRecoveriesRequest,
) (*readmodelv1.ListRecoveriesResponse, error) {
	items, next, err := caller.List(ctx, i.reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*recoveryv1.RecoveryRecord, string, error) {
			f := view.RecoveryFilter{}
			if req.GetWorkspace() != "" {
				w, err := s.Workspace(ctx, req.GetWorkspace())
				if err != nil {
					return nil, "", err
				}
				f.WorkspaceID = w.GetWorkspaceId()
			}
			return s.Recoveries(ctx, f, page)
		})
	return &readmodelv1.ListRecoveriesResponse{Items: items, NextPageToken: next}, err
}

// GetBrake returns the fleet brake.
func (i *Incidents) GetBrake(ctx context.Context, req *readmodelv1.GetBrakeRequest) (*readmodelv1.GetBrakeResponse,
	error,
) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	out := &readmodelv1.GetBrakeResponse{}
	err := i.reads.Read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		out.Brake, err = s.Brake(ctx)
		return err
	})
	return out, err
}

// ReleaseBrake asks recovery to resume automatic remedies.
func (i *Incidents) ReleaseBrake(ctx context.Context,
	req *readmodelv1.ReleaseBrakeRequest,
) (*readmodelv1.ReleaseBrakeResponse, error) {
	answer, err := operator(ctx, "recovery", i.owners.Watchdog.ReleaseBrake,
		&recoveryv1.ReleaseBrakeRequest{Reason: req.GetReason()})
	return &readmodelv1.ReleaseBrakeResponse{Brake: answer.GetBrake(), Pos: answer.GetPos()}, err
}
