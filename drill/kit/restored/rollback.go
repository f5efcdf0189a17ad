package restored

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// Incidents returns the incidents of rollbacks, open and over, the newest first.
func Incidents(ctx context.Context, m *mesh.Mesh) ([]*recoveryv1.Incident, error) {
	resp, err := m.Client.Incidents.ListIncidents(ctx,
		&readmodelv1.ListIncidentsRequest{IncludeClosed: true, PageSize: 1000})
	return slices.DeleteFunc(resp.GetItems(), func(i *recoveryv1.Incident) bool {
		return i.GetKind() != commonv1.IncidentKind_INCIDENT_KIND_CONTROL_PLANE_ROLLBACK
	}), err
}

// Accept ends rollback mode, as an operator does.
func Accept(ctx context.Context, m *mesh.Mesh) error {
	_, err := await.Answer(ctx, "accept the rollback",
		func(ctx context.Context) (*readmodelv1.AcceptRollbackResponse, error) {
			return m.Client.Rollback.AcceptRollback(ctx, &readmodelv1.AcceptRollbackRequest{Reason: "drill"})
		})
	return err
}

// AwaitMode waits until rollback mode is set, and returns it.
func AwaitMode(ctx context.Context, m *mesh.Mesh) (*recoveryv1.RollbackMode, error) {
	var mode *recoveryv1.RollbackMode
	err := await.Until(ctx, "rollback mode", await.Limit, func(ctx context.Context) error {
		answer, err := m.Client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
		if mode = answer.GetRollback(); err == nil && !mode.GetActive() {
			err = errors.New("it is not set")
		}
		return err
	})
	return mode, err
}

// Declare runs the command that an operator runs before the services are started.
func Declare(ctx context.Context, c *cluster.Cluster) error {
	// of our own mesh
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(c.Plan.AgentBinary), "gpuaas"), "migrate", "restored",
		"--database-url-file", c.Material.URLFile(pg.RoleOwner), "--reason", "drill")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("migrate restored: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}
