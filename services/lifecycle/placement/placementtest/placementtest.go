// Package placementtest is the conformance test of placement drivers: it checks the guarantees of placement.Driver with
// a real driver.
package placementtest

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Conform checks the contract against a driver. node is the machine that instances are placed on, empty for a driver
// that makes its own.
func Conform(t *testing.T, d placement.Driver, node string) {
	t.Helper()
	request := func(ws string, epoch int64) placement.LaunchRequest {
		return placement.LaunchRequest{
			WorkspaceID: ws, TenantID: ids.New(), Epoch: epoch, InstanceID: ids.New(),
			NodeID: node, LaunchSecret: "gls_secret",
		}
	}
	launch := func(t *testing.T, b placement.LaunchRequest) placement.Launched {
		t.Helper()
		out, err := d.Launch(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	refused := func(t *testing.T, b placement.LaunchRequest, want commonv1.Reason) {
		t.Helper()
		if _, err := d.Launch(t.Context(), b); err == nil || fault.ReasonOf(err) != want {
			t.Fatalf("launch of epoch %d: got %v, want %v", b.Epoch, err, want)
		}
	}
	end := func(t *testing.T, ws string, epoch int64) {
		t.Helper()
		if err := d.End(t.Context(), ws, epoch); err != nil {
			t.Fatal(err)
		}
	}
	listed := func(t *testing.T, ws string) map[string]bool {
		t.Helper()
		list, err := d.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]bool{}
		for _, i := range list {
			if i.WorkspaceID == ws {
				out[i.InstanceID] = i.EndedAt.IsZero()
			}
		}
		standing, err := d.Standing(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		alive := map[string]bool{}
		for _, i := range standing {
			if alive[i.InstanceID] = true; i.WorkspaceID == ws && !out[i.InstanceID] {
				t.Errorf("instance %s stands, and is not listed as one that has not ended", i.InstanceID)
			}
		}
		for id, stands := range out {
			if alive[id] != stands {
				t.Errorf("instance %s stands: %v, and is listed as standing: %v", id, alive[id], stands)
			}
		}
		return out
	}

	t.Run("a launch is made once for an instance", func(t *testing.T) {
		b := request(ids.New(), 1)
		first := launch(t, b)
		if again := launch(t, b); again.ProviderID != first.ProviderID || !again.StartedAt.Equal(first.StartedAt) {
			t.Errorf("again: %+v, first %+v", again, first)
		}
		if got := listed(t, b.WorkspaceID); len(got) != 1 || !got[b.InstanceID] {
			t.Errorf("listed: %v", got)
		}
		end(t, b.WorkspaceID, 1)
	})
	t.Run("another instance at the same epoch is of a lost history", func(t *testing.T) {
		first := request(ids.New(), 2)
		launch(t, first)
		refused(t, request(first.WorkspaceID, 2), commonv1.Reason_REASON_INSTANCE_OF_LOST_HISTORY)
		if got := listed(t, first.WorkspaceID); len(got) != 1 || !got[first.InstanceID] {
			t.Errorf("the instance that stands is not as it was: %v", got)
		}
		launch(t, first) // it is still its own history's
		end(t, first.WorkspaceID, 2)
		if got := listed(t, first.WorkspaceID); len(got) != 1 || got[first.InstanceID] {
			t.Errorf("listed after the end: %v", got)
		}
		refused(t, request(first.WorkspaceID, 2), commonv1.Reason_REASON_EPOCH_ENDED)
	})
	t.Run("epochs do not overlap", func(t *testing.T) {
		ws := ids.New()
		launch(t, request(ws, 2))
		refused(t, request(ws, 1), commonv1.Reason_REASON_EPOCH_SUPERSEDED)
		refused(t, request(ws, 3), commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE)
		end(t, ws, 2)
		end(t, ws, 2)
		launch(t, request(ws, 3))
		end(t, ws, 3)
	})
	t.Run("an epoch that ended before it was is never launched", func(t *testing.T) {
		ws := ids.New()
		end(t, ws, 1)
		refused(t, request(ws, 1), commonv1.Reason_REASON_EPOCH_ENDED)
	})
	t.Run("a fenced epoch stands in the way of none", func(t *testing.T) {
		ws := ids.New()
		launch(t, request(ws, 1))
		if err := d.Fence(t.Context(), ws, 1, "powered_off, says olga: it is dark"); err != nil {
			t.Fatal(err)
		}
		refused(t, request(ws, 1), commonv1.Reason_REASON_EPOCH_ENDED)
		launch(t, request(ws, 2))
		end(t, ws, 1)
		end(t, ws, 2)
	})
}
