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
		return t.payload, nil //nolint:nilerr // the agent cannot read it either, and refuses this one task
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

// SealStored seals the values of deploys that a build before sealed values has queued, and returns how many it changed. Deploys that have ended and may be
// queued again are sealed as well.
func (s *Server) SealStored(ctx context.Context) (int, error) {
	const batch = 100
	total, last := 0, "00000000-0000-0000-0000-000000000000"
	for {
		rows, err := s.deps.DB.Query(ctx, `SELECT task_id::text, coalesce(tenant_id::text, ''), coalesce(workspace_id::text, ''), payload FROM lifecycle.task
			WHERE type = $1 AND payload <> '' AND task_id > $2::uuid ORDER BY task_id LIMIT $3`, deployType, last, batch)
		if err != nil {
			return total, fmt.Errorf("list stored deploys: %w", err)
		}
		type stored struct {
			TaskID, TenantID, WorkspaceID string
			Payload                       []byte
		}
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[stored])
		if err != nil {
			return total, fmt.Errorf("list stored deploys: %w", err)
		}
		for _, t := range found {
			last = t.TaskID
			deploy := &nodev1.WorkloadDeploy{}
			if err := proto.Unmarshal(t.Payload, deploy); err != nil || len(deploy.GetWorkload().GetEnv())+len(deploy.GetSecretEnv()) == 0 {
				continue // what cannot be read has no value that could be
			}
			if err := s.deps.Secrets.SealDeploy(deploy, secretenv.Owner{TenantID: t.TenantID, WorkspaceID: t.WorkspaceID}); err != nil {
				return total, err //nolint:wrapcheck // it says what it did
			}
			payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(deploy)
			if err != nil {
				return total, fmt.Errorf("encode payload of task %s: %w", t.TaskID, err)
			}
			tag, err := s.deps.DB.Exec(ctx, `UPDATE lifecycle.task SET payload = $3 WHERE task_id = $1 AND payload = $2`, t.TaskID, t.Payload, payload)
			if err != nil {
				return total, fmt.Errorf("seal payload of task %s: %w", t.TaskID, err)
			}
			total += int(tag.RowsAffected())
		}
		if len(found) < batch {
			return total, nil
		}
	}
}
