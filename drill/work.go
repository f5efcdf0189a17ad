package drill

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// observe takes the snapshot that later ones are compared with. Objects that are made after it are not compared.
func (r *Run) observe(ctx context.Context) error {
	var err error
	r.before, err = readWorld(ctx, r.Mesh, r.subject)
	return at(StageGood, err)
}

// serving checks that a workspace fully serves again in an epoch: active and normal to its user, its endpoints answer,
// and claims, launch log and host have no other epoch and no orphan.
func (m *Mesh) serving(ctx context.Context, id string, epoch int64) error {
	ws, err := m.workspace(ctx, id)
	if err != nil {
		return err
	}
	if ws.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE ||
		ws.GetUserState() != commonv1.UserState_USER_STATE_NORMAL || ws.GetEpoch() != epoch {
		return fmt.Errorf("it is %s, %s to its user, in epoch %d: %s %s %s", names.Of(ws.GetState()),
			names.Of(ws.GetUserState()), ws.GetEpoch(), ws.GetCurrentStep(), ws.GetWhyWaiting(), ws.GetLastError())
	}
	if len(ws.GetEndpoints()) == 0 {
		return errors.New("it has no endpoint")
	}
	claims, err := m.claims(ctx, id)
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
		if err := answers(ctx, e.GetUrl()); err != nil {
			return err
		}
	}
	if ws.GetSpec().GetPlacement() != commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS {
		return nil
	}
	ledger, err := m.ledger()
	if err != nil {
		return err
	}
	_, live, err := launches(ledger, id)
	if err == nil && live != epoch {
		err = fmt.Errorf("the ledger has epoch %d alive", live)
	}
	return errors.Join(err, m.oneLife(id, epoch))
}

// answers returns nil if a URL answers 200.
func answers(ctx context.Context, url string) error {
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
	defer resp.Body.Close() //nolint:errcheck // nothing was sent
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, resp.Status)
	}
	return nil
}

// retire decommissions a workspace at the end of a drill and checks that nothing of it is left anywhere.
func (r *Run) retire(ctx context.Context, id string) error {
	m := r.Mesh
	if _, err := m.operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION); err != nil {
		return at(StageEvidence, err)
	}
	if err := m.awaitState(ctx, id, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, settle); err != nil {
		return at(StageEvidence, err)
	}
	err := await(ctx, "everything of it to be gone", patience,
		func(ctx context.Context) error { return m.nothingLeft(ctx, id) })
	if err == nil {
		r.note("decommissioned: no claim, no instance, no process is left")
	}
	return at(StageEvidence, err)
}

// leave removes, as well as it can, the remains of a failed drill, so that the next one finds a healthy mesh.
func (r *Run) leave(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
	defer cancel()
	m := r.Mesh
	asked := map[commonv1.OperationKind]time.Time{}
	// Close ends what is still there afterwards.
	_ = await(ctx, "the drill's workspace to go", 2*time.Minute, func(ctx context.Context) error {
		ws, err := m.workspace(ctx, id)
		if err != nil {
			return err
		}
		kind := commonv1.OperationKind_OPERATION_KIND_CANCEL
		switch ws.GetState() { //nolint:exhaustive // the others are on their way
		case commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
			return nil
		case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
			commonv1.WorkspaceState_WORKSPACE_STATE_STUCK:
			kind = commonv1.OperationKind_OPERATION_KIND_DECOMMISSION
		}
		if time.Since(asked[kind]) > 5*time.Second {
			asked[kind] = time.Now()
			_, err = m.operate(ctx, id, kind)
		}
		return errors.Join(fmt.Errorf("it is %s", names.Of(ws.GetState())), err)
	})
}
