package allocation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// unaccountedColumns are the columns of an instance in the table of instances that no row accounts for. The tenant and
// name are the workspace's, if the workspace exists.
const unaccountedColumns = `u.instance_id::text AS instance_id, u.workspace_id::text AS workspace_id,
	coalesce((SELECT w.tenant_id::text FROM lifecycle.workspace w WHERE w.id = u.workspace_id), '') AS tenant_id,
	u.epoch, u.state, u.placement, u.provider_id, '' AS node_id, u.started_at, u.ended_at, u.end_reason,
	coalesce((SELECT w.name FROM lifecycle.workspace w WHERE w.id = u.workspace_id), '') AS workspace_name, u.version`

// UnaccountedEvent returns the event of an instance that no row accounts for.
func UnaccountedEvent(i Instance) events.Event {
	e := i.Event()
	if p, ok := e.Payload.(*lifecyclev1.Instance); ok {
		shown, _ := proto.Clone(p).(*lifecyclev1.Instance)
		shown.Unaccounted = true
		e.Payload = shown
	}
	return e
}

// NoteUnaccounted brings the table of unaccounted instances of a placement up to date with the placement's list, and
// appends an event for each change. It returns how many there were.
func NoteUnaccounted(ctx context.Context, tx pgx.Tx, kind commonv1.PlacementDriver, seen []placement.Instance) (int,
	error,
) {
	var instances, workspaces, providers []string
	var epochs []int64
	var started []*time.Time
	for _, b := range seen {
		if !ids.Valid(b.WorkspaceID) {
			continue // of no mesh; the sweep logs it
		}
		id, at := b.InstanceID, (*time.Time)(nil)
		if !ids.Valid(id) {
			id = ids.New()
		}
		if !b.StartedAt.IsZero() {
			at = &b.StartedAt
		}
		instances, workspaces, providers = append(instances, id), append(workspaces, b.WorkspaceID),
			append(providers, b.ProviderID)
		epochs, started = append(epochs, b.Epoch), append(started, at)
	}
	changed, err := unaccounted(ctx, tx, noteUnaccountedRows, names.Of(kind), instances, workspaces, epochs, providers,
		started)
	if err != nil {
		return 0, fmt.Errorf("note unaccounted instances: %w", err)
	}
	gone, err := unaccounted(ctx, tx, endUnlisted, names.Of(kind), workspaces, epochs)
	if err != nil {
		return 0, fmt.Errorf("note ends of unaccounted instances: %w", err)
	}
	changed = append(changed, gone...)
	return len(changed), reportUnaccounted(ctx, tx, changed)
}

var noteUnaccountedRows = pg.Define(pg.RoleLifecycle, "allocation.note_unaccounted_rows", `
		INSERT INTO lifecycle.unaccounted_instance AS u (instance_id, workspace_id, epoch, state, placement, provider_id,
			started_at)
		SELECT x.instance_id, x.workspace_id, x.epoch, 'live', $1, x.provider_id, x.started_at
		FROM unnest($2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::timestamptz[]) AS x (instance_id, workspace_id,
			epoch, provider_id, started_at)
		ON CONFLICT (placement, workspace_id, epoch) DO UPDATE
			SET state = 'live', ended_at = NULL, end_reason = '', version = u.version + 1
			WHERE u.state = 'ended'
		RETURNING `+unaccountedColumns)

var endUnlisted = pg.Define(pg.RoleLifecycle, "allocation.end_unlisted", `
		UPDATE lifecycle.unaccounted_instance AS u
			SET state = 'ended', ended_at = mesh.clock(), end_reason = 'the placement does not list it as running any more',
			version = u.version + 1
		WHERE u.placement = $1 AND u.state = 'live' AND NOT EXISTS (
			SELECT 1 FROM unnest($2::uuid[], $3::bigint[]) AS x (workspace_id, epoch)
				WHERE x.workspace_id = u.workspace_id AND x.epoch = u.epoch)
		RETURNING `+unaccountedColumns)

func unaccounted(ctx context.Context, tx pgx.Tx, s *pg.Statement, args ...any) ([]Instance, error) {
	list, err := pg.All[storedInstance](ctx, tx, s, args...)
	if err != nil {
		return nil, err
	}
	return aside.Rows(ctx, "instance", list, func(d storedInstance) string { return d.ID }, storedInstance.instance)
}

func reportUnaccounted(ctx context.Context, tx pgx.Tx, changed []Instance) error {
	if len(changed) == 0 {
		return nil
	}
	list := make([]events.Event, 0, len(changed))
	for _, i := range changed {
		list = append(list, UnaccountedEvent(i))
	}
	if _, err := events.Append(ctx, tx, list...); err != nil {
		return fmt.Errorf("report unaccounted instances: %w", err)
	}
	return nil
}

var accountInstance = pg.Define(pg.RoleLifecycle, "allocation.account_instance", `
		INSERT INTO lifecycle.unaccounted_instance AS u (instance_id, workspace_id, epoch, state, placement, provider_id,
			started_at, ended_at, end_reason)
		VALUES ($2, $3, $4, 'ended', $1, $5, $6, mesh.clock(), $7)
		ON CONFLICT (placement, workspace_id, epoch) DO UPDATE
			SET state = 'ended', ended_at = mesh.clock(), end_reason = $7, version = u.version + 1
		RETURNING `+unaccountedColumns)

// EndUnaccounted records the confirmed end of an instance that no row accounts for, whether or not a sweep has seen it
// before.
func EndUnaccounted(ctx context.Context, tx pgx.Tx, kind commonv1.PlacementDriver, b placement.Instance,
	why string,
) (Instance, string, error) {
	id := b.InstanceID
	if !ids.Valid(id) {
		id = ids.New()
	}
	var started *time.Time
	if !b.StartedAt.IsZero() {
		started = &b.StartedAt
	}
	i, err := OneInstance(ctx, tx, accountInstance, names.Of(kind), id, b.WorkspaceID, b.Epoch, b.ProviderID, started, why)
	if err != nil {
		return Instance{}, "", fmt.Errorf("record end of unaccounted instance: %w", err)
	}
	pos, err := events.Append(ctx, tx, UnaccountedEvent(i))
	if err != nil {
		return Instance{}, "", fmt.Errorf("report unaccounted instance: %w", err)
	}
	return i, pos, nil
}

// shownAs is the id under which an instance without a row was shown, and its version.
type shownAs struct {
	ID      string `db:"instance_id" expr:"@.instance_id::text"`
	Version int64  `db:"version"`
}

var forgetUnaccounted = pg.Define(pg.RoleLifecycle, "allocation.forget_unaccounted",
	`DELETE FROM lifecycle.unaccounted_instance u WHERE u.placement = $1 AND u.workspace_id = $2 AND u.epoch = $3
		RETURNING `+pg.Columns[shownAs]("u"))

// AccountFor takes an instance out of the table because a row of its own takes its place. It returns the id for that
// row, which is the one under which the instance was shown, if it was, and the version above which the versions of that
// row begin.
func AccountFor(ctx context.Context, tx pgx.Tx, kind commonv1.PlacementDriver, b placement.Instance) (string, int64,
	error,
) {
	shown, err := pg.One[shownAs](ctx, tx, forgetUnaccounted, names.Of(kind), b.WorkspaceID, b.Epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		id := b.InstanceID
		if !ids.Valid(id) {
			id = ids.New()
		}
		return id, 0, nil
	}
	if err != nil {
		return "", 0, fmt.Errorf("account for instance: %w", err)
	}
	return shown.ID, shown.Version, nil
}
