package records

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Trouble is the part of the status beside the components: open incidents and the brake.
type Trouble struct {
	incidents []*recoveryv1.Incident
	brake     *recoveryv1.Brake
}

// ReadTrouble reads the open incidents and the brake. It returns none if the person may not see them, or if the mesh
// does not have the methods.
func ReadTrouble(ctx context.Context, s *kit.Session) (Trouble, error) {
	hidden := func(err error) bool {
		return fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) ||
			fault.Has(err, commonv1.Reason_REASON_UNIMPLEMENTED)
	}
	var t Trouble
	open, err := s.Client.Incidents.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{PageSize: 20})
	if err != nil {
		if hidden(err) {
			return t, nil
		}
		return t, fmt.Errorf("ask for incidents: %w", err)
	}
	t.incidents = open.GetItems()
	brake, err := s.Client.Incidents.GetBrake(ctx, &readmodelv1.GetBrakeRequest{})
	if err != nil && !hidden(err) {
		return t, fmt.Errorf("ask for the brake: %w", err)
	}
	t.brake = brake.GetBrake()
	return t, nil
}

// Members returns the fields that trouble adds to the status.
func (t Trouble) Members() []output.Member {
	return []output.Member{
		output.With("incidents", output.Messages(t.incidents...)),
		output.With("brake", output.Messages(t.brake)[0]),
	}
}

// Lines returns the lines that the status prints for it.
func (t Trouble) Lines() [][2]string {
	var out [][2]string
	if t.brake.GetEngaged() {
		out = append(out, [2]string{"BRAKE", "engaged: " + t.brake.GetReason() + " (`gpuaas brake release --reason TEXT`)"})
	}
	for _, i := range t.incidents {
		out = append(out, [2]string{
			"INCIDENT",
			strings.ToUpper(human.Enum(i.GetSeverity())) + " " + human.Enum(i.GetKind()) + ": " + i.GetSummary() + " (" +
				i.GetIncidentId() + ")",
		})
	}
	return out
}
