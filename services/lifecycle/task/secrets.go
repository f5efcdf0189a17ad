package task

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/secretenv"
)

// deployType is the one type of task that carries environment values.
const deployType = "workload.deploy"

// openValues opens the environment values of the tasks that were picked, and returns those tasks that can be signed. One whose values do not open ends as
// failed with the reason, in the transaction that would have leased it: its agent never hears of it, and its run decides what follows.
func (s *Server) openValues(ctx context.Context, tx pgx.Tx, tasks []picked) ([]picked, error) {
	out := tasks[:0]
	for _, t := range tasks {
		payload, err := s.openPayload(t)
		if err == nil {
			t.payload = payload
			out = append(out, t)
			continue
		}
		refusal, ok := fault.As(err)
		if !ok {
			return nil, err
		}
		set := `payload = '', reason = '` + names.Of(refusal.Reason) + `', error = $4`
		if _, _, err := s.change(ctx, tx, t.Row, commonv1.TaskState_TASK_STATE_FAILED, set, refusal.Public); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// openPayload returns the payload as it is signed.
func (s *Server) openPayload(t picked) ([]byte, error) {
	if t.Type != deployType {
		return t.payload, nil
	}
	deploy := &nodev1.WorkloadDeploy{}
	if err := proto.Unmarshal(t.payload, deploy); err != nil {
		return nil, fmt.Errorf("read payload of task %s: %w", t.TaskID, err)
	}
	if err := s.deps.Secrets.OpenDeploy(deploy, secretenv.Owner{TenantID: t.TenantID, WorkspaceID: t.WorkspaceID}); err != nil {
		return nil, err //nolint:wrapcheck // a fault that names the variable
	}
	// The same task is the same bytes each time it is offered.
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(deploy)
	if err != nil {
		return nil, fmt.Errorf("encode payload of task %s: %w", t.TaskID, err)
	}
	return payload, nil
}
