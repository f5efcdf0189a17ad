package client

import (
	"context"
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// trouble is the part of the status beside the components: open incidents and the brake.
type trouble struct {
	incidents []*recoveryv1.Incident
	brake     *recoveryv1.Brake
}

// readTrouble reads the open incidents and the brake. It returns none if the person may not see them, or if the mesh does
// not have the methods.
func readTrouble(ctx context.Context, s *session) (trouble, error) {
	hidden := func(err error) bool {
		return fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) ||
			fault.Has(err, commonv1.Reason_REASON_UNIMPLEMENTED)
	}
	var t trouble
	open, err := s.client.Incidents.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{PageSize: 20})
	if err != nil {
		if hidden(err) {
			return t, nil
		}
		return t, fmt.Errorf("ask for incidents: %w", err)
	}
	t.incidents = open.GetItems()
	brake, err := s.client.Incidents.GetBrake(ctx, &readmodelv1.GetBrakeRequest{})
	if err != nil && !hidden(err) {
		return t, fmt.Errorf("ask for the brake: %w", err)
	}
	t.brake = brake.GetBrake()
	return t, nil
}

// members returns the fields that trouble adds to the status.
func (t trouble) members() []member {
	return []member{with("incidents", messages(t.incidents...)), with("brake", messages(t.brake)[0])}
}

// lines returns the lines that the status prints for it.
func (t trouble) lines() [][2]string {
	var out [][2]string
	if t.brake.GetEngaged() {
		out = append(out, [2]string{"BRAKE", "engaged: " + t.brake.GetReason() + " (`gpuaas brake release --reason TEXT`)"})
	}
	for _, i := range t.incidents {
		out = append(out, [2]string{
			"INCIDENT",
			strings.ToUpper(enumText(i.GetSeverity())) + " " + enumText(i.GetKind()) + ": " + i.GetSummary() + " (" +
				i.GetIncidentId() + ")",
		})
	}
	return out
}
