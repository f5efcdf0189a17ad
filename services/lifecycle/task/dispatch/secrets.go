package dispatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
)

// deployType is the one type of task that carries environment values.
const deployType = "workload.deploy"

// openValues opens the environment values of the tasks that were picked, and returns the tasks that can be signed. A
// task whose values do not open ends as failed with the reason, in the transaction that would have leased it: its agent
// never gets it, and its run decides how to go on.
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
		if _, _, err := s.change(ctx, tx, t.Row, commonv1.TaskState_TASK_STATE_FAILED, setRefused, refusal.Public,
			names.Of(refusal.Reason)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// openPayload returns the payload for the envelope, with opened environment values.
func (s *Server) openPayload(t picked) ([]byte, error) {
	if t.Type != deployType {
		return t.payload, nil
	}
	deploy := &nodev1.WorkloadDeploy{}
	if err := proto.Unmarshal(t.payload, deploy); err != nil {
		return t.payload, nil //nolint:nilerr // the agent cannot read it either, and refuses this one task
	}
	if err := s.deps.Secrets.OpenDeploy(deploy,
		secretenv.Owner{TenantID: t.TenantID, WorkspaceID: t.WorkspaceID}); err != nil {
		return nil, err
	}
	// Marshal deterministically: the task must have the same bytes each time it is offered.
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(deploy)
	if err != nil {
		return nil, fmt.Errorf("encode payload of task %s: %w", t.TaskID, err)
	}
	return payload, nil
}

// SealStored seals the values of stored deploys that are not sealed with the first key, in batches, and returns how
// many it changed: those sealed with a former first key, and those that a build before sealed values has queued.
// Deploys that have ended are sealed as well, if an earlier build has left their payloads. A payload whose values
// cannot be opened stays as it is; the error names it, after all others are done. One that is sealed with a key which
// was given up as lost is passed over without an error.
func (s *Server) SealStored(ctx context.Context) (int, error) {
	const batch = 100
	total := 0
	var failed error
	for _, part := range secretenv.Others(s.deps.Secrets.First()) {
		keys, last := part.From, part.FromID
		for {
			found, err := pg.All[storedDeploy](ctx, s.deps.DB, StoredDeploys, keys, last, part.Below, batch)
			if err != nil {
				return total, fmt.Errorf("list stored deploys: %w", err)
			}
			for _, t := range found {
				keys, last = t.Keys, t.TaskID
				if !s.deps.Secrets.HasAll(t.Keys) {
					continue // sealed with a key that was given up as lost
				}
				changed, err := s.sealStored(ctx, t)
				if err != nil {
					failed = errors.Join(failed, fmt.Errorf("seal payload of task %s: %w", t.TaskID, err))
				}
				if changed {
					total++
				}
			}
			if len(found) < batch {
				break
			}
		}
	}
	return total, failed
}

// storedDeploy is a queued deploy as it is stored.
type storedDeploy struct {
	TaskID      string `db:"task_id" expr:"@.task_id::text"`
	TenantID    string `db:"tenant_id" expr:"coalesce(@.tenant_id::text, '')"`
	WorkspaceID string `db:"workspace_id" expr:"coalesce(@.workspace_id::text, '')"`
	Payload     []byte `db:"payload"`
	Keys        string `db:"secret_keys" expr:"coalesce(@.secret_keys, '!')"`
}

// StoredDeploys lists deploys whose values are not all sealed with the first key, between two lists of keys. It does
// not read deploys that are sealed with the first key.
var StoredDeploys = pg.Define(pg.RoleLifecycle, "dispatch.stored_deploys", `SELECT `+pg.Columns[storedDeploy]("t")+`
	FROM lifecycle.task t
	WHERE type = 'workload.deploy' AND payload <> '' AND coalesce(secret_keys, '!') <> ''
		AND ((coalesce(secret_keys, '!')) COLLATE "C", task_id) > ($1, $2::uuid)
			AND (coalesce(secret_keys, '!')) COLLATE "C" < $3
	ORDER BY (coalesce(secret_keys, '!')) COLLATE "C", task_id LIMIT $4`)

var sealDeploy = pg.Define(pg.RoleLifecycle, "dispatch.seal_deploy", `
		UPDATE lifecycle.task SET payload = $3, secret_keys = $4 WHERE task_id = $1 AND payload = $2`)

// sealStored seals one deploy with the first key, and records which keys its values need. The bool is false if no value
// changed.
func (s *Server) sealStored(ctx context.Context, t storedDeploy) (bool, error) {
	payload, keys, deploy := t.Payload, "", &nodev1.WorkloadDeploy{}
	// A payload that cannot be parsed has no values that could be opened.
	if err := proto.Unmarshal(t.Payload, deploy); err == nil {
		keys = secretenv.KeysOfDeploy(deploy)
		if keys != "" && keys != s.deps.Secrets.First() {
			if err := s.deps.Secrets.ResealDeploy(deploy,
				secretenv.Owner{TenantID: t.TenantID, WorkspaceID: t.WorkspaceID}); err != nil {
				return false, err
			}
			keys = s.deps.Secrets.First()
			if payload, err = (proto.MarshalOptions{Deterministic: true}).Marshal(deploy); err != nil {
				return false, fmt.Errorf("encode: %w", err)
			}
		}
	}
	tag, err := pg.Exec(ctx, s.deps.DB, sealDeploy, t.TaskID, t.Payload, payload, keys)
	if err != nil {
		return false, err
	}
	return tag.RowsAffected() > 0 && !bytes.Equal(payload, t.Payload), nil
}
