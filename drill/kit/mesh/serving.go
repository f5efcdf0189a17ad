package mesh

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// NothingLeft checks that a workspace without an instance has no claims, no allocation, no live instance, and that the
// launch log and the host agree.
func (m *Mesh) NothingLeft(ctx context.Context, id string) error {
	claims, err := m.Claims(ctx, id)
	if err != nil {
		return err
	}
	for _, c := range claims {
		return fmt.Errorf("%d claims are not released, such as %s %s of epoch %d (orphaned: %t)", len(claims), c.GetKind(),
			c.GetName(), c.GetEpoch(), c.GetOrphanedAt() != nil)
	}
	instances, err := m.Client.Query.ListInstances(ctx,
		&readmodelv1.ListInstancesRequest{PageSize: 100, WorkspaceId: id, LiveOnly: true})
	if err != nil {
		return err
	}
	if n := len(instances.GetItems()); n > 0 {
		return fmt.Errorf("%d instances are live", n)
	}
	if m.cluster == nil {
		return nil
	}
	ledger, err := m.Launches()
	if err != nil {
		return err
	}
	_, live, err := host.CheckLaunches(ledger, id)
	if err == nil && live != 0 {
		err = fmt.Errorf("the ledger has epoch %d alive", live)
	}
	return errors.Join(err, m.OneLife(id, 0))
}

// AwaitServing waits until a workspace is fully serving in an epoch.
func (m *Mesh) AwaitServing(ctx context.Context, id string, epoch int64) error {
	return await.Until(ctx, fmt.Sprintf("epoch %d to serve", epoch), await.Limit,
		func(ctx context.Context) error { return m.Serving(ctx, id, epoch) })
}

// Serving checks that a workspace fully serves again in an epoch: active, managed and normal to its user, its endpoints
// answer, and claims, launch log and host have no other epoch and no orphan.
func (m *Mesh) Serving(ctx context.Context, id string, epoch int64) error {
	ws, err := m.Workspace(ctx, id)
	if err != nil {
		return err
	}
	if ws.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE ||
		ws.GetManagement().GetState() != readmodelv1.LayerState_LAYER_STATE_CONNECTED ||
		ws.GetUserState() != commonv1.UserState_USER_STATE_NORMAL || ws.GetEpoch() != epoch {
		return fmt.Errorf("it is %s, %s to its user, its management %s, in epoch %d: %s %s %s", names.Of(ws.GetState()),
			names.Of(ws.GetUserState()), names.Of(ws.GetManagement().GetState()), ws.GetEpoch(),
			ws.GetCurrentStep(), ws.GetWhyWaiting(), ws.GetLastError())
	}
	if len(ws.GetEndpoints()) == 0 {
		return errors.New("it has no endpoint")
	}
	claims, err := m.Claims(ctx, id)
	if err != nil {
		return err
	}
	bound := []string{"slot", "instance", "identity", "workload"} // to an epoch; the others may outlive one
	for _, c := range claims {
		if c.GetOrphanedAt() != nil || (slices.Contains(bound, c.GetKind()) && c.GetEpoch() != epoch) {
			return fmt.Errorf("the claim on %s %s is of epoch %d, orphaned: %t", c.GetKind(), c.GetName(), c.GetEpoch(),
				c.GetOrphanedAt() != nil)
		}
	}
	if m.cluster == nil {
		return nil
	}
	for _, e := range ws.GetEndpoints() {
		if err := Answers(ctx, e.GetUrl()); err != nil {
			return err
		}
	}
	if ws.GetSpec().GetPlacement() != commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS {
		return nil
	}
	ledger, err := m.Launches()
	if err != nil {
		return err
	}
	_, live, err := host.CheckLaunches(ledger, id)
	if err == nil && live != epoch {
		err = fmt.Errorf("the ledger has epoch %d alive", live)
	}
	return errors.Join(err, m.OneLife(id, epoch))
}

// Answers returns nil if a URL answers 200.
func Answers(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() // nothing was sent
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, resp.Status)
	}
	return nil
}
