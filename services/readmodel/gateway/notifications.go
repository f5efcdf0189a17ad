package gateway

import (
	"context"
	"log/slog"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/notify"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Notifications serves NotificationService.
type Notifications struct {
	reads  caller.Reads
	db     pg.Querier
	logger *slog.Logger
}

// NewNotifications returns the server. db logs in as readmodel.
func NewNotifications(reads caller.Reads, db pg.Querier, logger *slog.Logger) *Notifications {
	return &Notifications{reads: reads, db: db, logger: logger}
}

// ListNotifications lists how workspaces are or were touched, newest first, and records which of the texts are shown
// for the first time.
func (n *Notifications) ListNotifications(ctx context.Context, req *readmodelv1.ListNotificationsRequest) (
	*readmodelv1.ListNotificationsResponse, error,
) {
	scope, err := caller.ScopeOf(ctx)
	if err != nil {
		return nil, err
	}
	items, next, err := caller.List(ctx, n.reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*readmodelv1.Notification, string, error) {
			filter := view.NotificationFilter{Open: req.GetOpenOnly(), IncidentID: req.GetIncidentId()}
			if req.GetWorkspace() != "" {
				w, err := s.Workspace(ctx, req.GetWorkspace())
				if err != nil {
					return nil, "", err
				}
				filter.WorkspaceID = w.GetWorkspaceId()
			}
			return s.Notifications(ctx, filter, page)
		})
	if err != nil {
		return nil, err
	}
	// A database that cannot be written to must not keep people from reading.
	if err := notify.Shown(ctx, n.db, view.AudienceOf(scope), items); err != nil {
		n.logger.WarnContext(ctx, "notifications were shown and not recorded as shown", slog.String("error", err.Error()))
	}
	return &readmodelv1.ListNotificationsResponse{Items: items, NextPageToken: next}, nil
}
