package detect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// NextTwo is the next action for two instances of one workspace.
const NextTwo = "find out which instance the workspace works in: `gpuaas instances list --live` has both; if this " +
	"database was restored, follow docs/restore.md first; " +
	"a recreation of the workspace ends every other instance of it"

// TwoInstances finds the workspaces of which a placement runs two instances. It reads only the placement's own list: no
// row of ours can justify a second instance.
func (d *Detectors) TwoInstances(ctx context.Context, kind commonv1.PlacementDriver,
	driver placement.Driver) ([]finding.Seen,
	error,
) {
	list, err := driver.Standing(ctx)
	if err != nil {
		return nil, fmt.Errorf("list instances: %w", err)
	}
	standing := map[string][]placement.Instance{}
	for _, i := range list {
		if i.EndedAt.IsZero() {
			standing[i.WorkspaceID] = append(standing[i.WorkspaceID], i)
		}
	}
	maps.DeleteFunc(standing, func(_ string, of []placement.Instance) bool { return len(of) < 2 })
	if len(standing) == 0 {
		return nil, nil
	}
	owners, err := d.owners(ctx, slices.Sorted(maps.Keys(standing)))
	if err != nil {
		return nil, err
	}
	out := make([]finding.Seen, 0, len(standing))
	for workspaceID, of := range standing {
		out = append(out, twoSeen(kind, workspaceID, of, owners[workspaceID]))
	}
	return out, nil
}

// owner has the columns of a workspace that the finding names.
type owner struct {
	ID       string `db:"id" expr:"@.id::text"`
	TenantID string `db:"tenant_id" expr:"@.tenant_id::text"`
	Name     string `db:"name"`
	Epoch    int64  `db:"epoch"`
}

var workspacesOfInstances = pg.Define(pg.RoleLifecycle, "detect.workspaces_of_instances",
	`SELECT `+pg.Columns[owner]("w")+` FROM lifecycle.workspace w
		WHERE w.id = ANY ($1::uuid[])`)

// owners reads those workspaces of the list that have a row.
func (d *Detectors) owners(ctx context.Context, workspaces []string) (map[string]owner, error) {
	valid := slices.DeleteFunc(slices.Clone(workspaces), func(id string) bool { return !ids.Valid(id) })
	list, err := pg.All[owner](ctx, d.db, workspacesOfInstances, valid)
	if err != nil {
		return nil, fmt.Errorf("read workspaces of instances: %w", err)
	}
	out := make(map[string]owner, len(list))
	for _, o := range list {
		out[o.ID] = o
	}
	return out, nil
}

// twoSeen returns the finding about one workspace; known is empty if the workspace has no row.
func twoSeen(kind commonv1.PlacementDriver, workspaceID string, of []placement.Instance, known owner) finding.Seen {
	slices.SortFunc(of, func(a, b placement.Instance) int {
		return cmp.Or(cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.ProviderID, b.ProviderID))
	})
	epochs, list := make([]string, len(of)), make([]any, len(of))
	for i, one := range of {
		epochs[i] = fmt.Sprint(one.Epoch)
		list[i] = map[string]any{
			"epoch": one.Epoch, "provider_id": one.ProviderID, "instance_id": one.InstanceID,
			"started_at": one.StartedAt.UTC().Format(time.RFC3339),
		}
	}
	what := fmt.Sprintf("%q", known.Name)
	before := map[string]any{"workspace": known.Name, "epoch": known.Epoch}
	if known.ID == "" {
		what, before = "a workspace that is not known here", map[string]any{"workspace": "not known here"}
	}
	return finding.Seen{
		Kind: instanceUnknown, Severity: finding.P0, SubjectType: "workspace", SubjectID: workspaceID, WorkspaceID: known.ID,
		TenantID: known.TenantID, NextAction: NextTwo,
		Summary: fmt.Sprintf("%d instances of %s run at once, of epochs %s", len(of), what, strings.Join(epochs, ", ")),
		Before:  before, After: map[string]any{"placement": names.Of(kind), "instances": list},
	}
}
