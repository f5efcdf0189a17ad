package provision

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
)

// handleOutput is the output of the step that makes the handle, which later steps read.
type handleOutput struct {
	Handle        string   `json:"handle"`
	SignalAddress string   `json:"signal_address"`
	Reserved      []string `json:"reserved_names"`
}

// SchemaOutput is the output of the step that applies the schema, which later steps read. The password is derived,
// never stored.
type SchemaOutput struct {
	Schema  string `json:"schema"`
	Role    string `json:"role"`
	Version int    `json:"version"`
}

var insertHandle = pg.Define(pg.RoleLifecycle, "provision.insert_handle", `
			INSERT INTO lifecycle.workspace_handle AS h (workspace_id, handle, epoch, signal_address, reserved_names)
				VALUES ($1, $2, $3, $4, $5)
			ON CONFLICT (workspace_id) DO UPDATE SET epoch = $3 WHERE h.epoch <= $3`)

// makeHandle gives the workspace its durable handle: the address at which it is signalled, and the names that are its
// own.
func (s *Steps) makeHandle(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	in, _, err := spec.Read(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	out := handleOutput{
		Handle: "ws-" + env.WorkspaceID, SignalAddress: "lifecycle/workspaces/" + env.WorkspaceID,
		Reserved: []string{in.Tenant + "/" + in.Workspace, schema.Name(in.Tenant, in.Workspace, env.WorkspaceID)},
	}
	claim, _, err := env.Intent(ctx,
		claims.Spec{Kind: allocation.KindHandle, Name: out.Handle, Scope: commonv1.ClaimScope_CLAIM_SCOPE_SHARED})
	if err != nil {
		return saga.Outcome{}, fmt.Errorf("claim handle: %w", err)
	}
	return saga.Done(out, func(ctx context.Context, tx pgx.Tx) error {
		_, err := pg.Exec(ctx, tx, insertHandle,
			env.WorkspaceID, out.Handle, env.Epoch, out.SignalAddress, out.Reserved)
		if err != nil {
			return fmt.Errorf("write handle: %w", err)
		}
		return env.ConfirmTx(ctx, tx, claim, out.SignalAddress)
	}), nil
}

var dropHandleOfEpoch = pg.Define(pg.RoleLifecycle, "provision.drop_handle_of_epoch",
	`DELETE FROM lifecycle.workspace_handle WHERE workspace_id = $1 AND epoch <= $2`)

func (s *Steps) dropHandle(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	held, err := claimsOf(ctx, env, allocation.KindHandle)
	if err != nil {
		return saga.Outcome{}, err
	}
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := pg.Exec(ctx, tx, dropHandleOfEpoch, env.WorkspaceID, env.Epoch); err != nil {
			return fmt.Errorf("drop handle: %w", err)
		}
		for _, c := range held {
			if err := env.ReleaseTx(ctx, tx, c); err != nil {
				return fmt.Errorf("release handle: %w", err)
			}
		}
		return nil
	}), nil
}

// storedHandle is the handle of a workspace as it is stored.
type storedHandle struct {
	Handle        string   `db:"handle"`
	SignalAddress string   `db:"signal_address"`
	Reserved      []string `db:"reserved_names"`
	Epoch         int64    `db:"epoch"`
}

var handleOfWorkspace = pg.Define(pg.RoleLifecycle, "provision.handle_of_workspace",
	`SELECT `+pg.Columns[storedHandle]("h")+` FROM lifecycle.workspace_handle h WHERE h.workspace_id = $1`)

func (s *Steps) observeHandle(ctx context.Context, env *saga.Env) (saga.Observation, error) {
	stored, err := pg.One[storedHandle](ctx, s.deps.DB, handleOfWorkspace, env.WorkspaceID)
	if errors.Is(err, pgx.ErrNoRows) {
		return saga.Observation{Presence: saga.Absent}, nil
	}
	if err != nil {
		return saga.Observation{}, fmt.Errorf("read handle: %w", err)
	}
	if stored.Epoch != env.Epoch {
		return saga.Observation{Presence: saga.Partial, Why: "the handle is of an earlier epoch"}, nil
	}
	out := handleOutput{Handle: stored.Handle, SignalAddress: stored.SignalAddress, Reserved: stored.Reserved}
	return saga.Observation{Presence: saga.Present, Output: out}, nil
}

// applySchema makes the workspace's login role and schema in the workload database and brings the schema up to date.
func (s *Steps) applySchema(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	in, _, err := spec.Read(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	name := schema.Name(in.Tenant, in.Workspace, env.WorkspaceID)
	claim, _, err := env.Intent(ctx,
		claims.Spec{Kind: allocation.KindSchema, Name: name, Scope: commonv1.ClaimScope_CLAIM_SCOPE_SHARED})
	if err != nil {
		return saga.Outcome{}, fmt.Errorf("claim schema: %w", err)
	}
	version, err := s.migrateTenant(ctx, env, name)
	if err != nil {
		return saga.Outcome{}, schemaFailed("the workspace's schema was not applied", err)
	}
	return saga.Done(SchemaOutput{Schema: name, Role: name, Version: version}, func(ctx context.Context, tx pgx.Tx) error {
		return env.ConfirmTx(ctx, tx, claim, name)
	}), nil
}

// schemaFailed returns the error with which a failed write ends the attempt. A refusal by the fence is kept as final:
// another try would be just as late.
func schemaFailed(public string, err error) error {
	if e, ok := errors.AsType[*saga.StepError](err); ok {
		return e
	}
	return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DATABASE, commonv1.Reason_REASON_SCHEMA_FAILED, public, err)
}

// migrateTenant makes the schema and its role, or brings them up to date, and returns the version that they have.
func (s *Steps) migrateTenant(ctx context.Context, env *saga.Env, name string) (int, error) {
	version := 0
	err := pg.InTx(ctx, s.deps.Workloads, func(ctx context.Context, tx pgx.Tx) error {
		if err := s.deps.EpochRefusals.Note(atSchema,
			schema.PassFence(ctx, tx, name, schema.WriterOf(env), false)); err != nil {
			return err
		}
		verifier := schema.Verifier(s.databasePassword(name, env.Epoch), s.derive("salt", name)[:16])
		var err error
		version, err = schema.Make(ctx, tx, name, verifier, schema.WriterOf(env))
		return err
	})
	if err != nil {
		return 0, err
	}
	return version, nil
}

// undoSchema drops the schema and the role that this run made, so that a run that fails destroys no data that the
// tenant had before. From the role of a schema that existed before, it takes the login that applySchema gave it;
// applying the schema gives the login back.
func (s *Steps) undoSchema(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	w := schema.WriterOf(env)
	return s.dropOwnSchema(ctx, env, func(note string) bool {
		// An earlier build left no note: the schema that its run made is dropped where none can have existed before.
		return note == w.Note() || note == "" && env.Kind == commonv1.OperationKind_OPERATION_KIND_CREATE && env.Epoch == 1
	})
}

// releaseSchema drops a schema that was made in the epoch whose run could not be undone, and keeps a schema that
// existed before: the workspace goes on, and a decommission drops it.
func (s *Steps) releaseSchema(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	w := schema.WriterOf(env)
	return s.dropOwnSchema(ctx, env, func(note string) bool {
		return strings.HasPrefix(note, "made by operation ") && strings.HasSuffix(note, w.InEpoch())
	})
}

func (s *Steps) dropOwnSchema(ctx context.Context, env *saga.Env, own func(note string) bool) (saga.Outcome, error) {
	held, err := claimsOf(ctx, env, allocation.KindSchema)
	if err != nil {
		return saga.Outcome{}, err
	}
	if env.Direction == commonv1.Direction_DIRECTION_UNDO {
		// A claim of another run: this run did not reach the step that makes the schema, so it has nothing to undo.
		held = slices.DeleteFunc(held, func(c claims.Claim) bool { return c.RunID != env.RunID })
	}
	kept := make([]bool, len(held))
	for i, c := range held {
		if err := env.Proceed(ctx); err != nil {
			return saga.Outcome{}, err
		}
		kept[i], err = schema.DropOwn(ctx, s.deps.Workloads, c.Name, schema.WriterOf(env), own)
		if err = s.deps.EpochRefusals.Note(atSchema, err); err != nil {
			return saga.Outcome{}, schemaFailed("the workspace's schema was not dropped",
				fmt.Errorf("drop schema %s: %w", c.Name, err))
		}
	}
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		for i, c := range held {
			change := env.ReleaseTx
			if kept[i] {
				// The schema is kept, so its claim is kept too.
				change = func(ctx context.Context, tx pgx.Tx, c claims.Claim) error { return env.ConfirmTx(ctx, tx, c, c.Name) }
			}
			if err := change(ctx, tx, c); err != nil {
				return fmt.Errorf("release schema: %w", err)
			}
		}
		return nil
	}), nil
}

// dropSchema drops the claimed schemas: it ends the sessions of the role first, then drops schema and role.
func (s *Steps) dropSchema(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	held, err := claimsOf(ctx, env, allocation.KindSchema)
	if err != nil {
		return saga.Outcome{}, err
	}
	for _, c := range held {
		if err := s.dropTenant(ctx, env, c.Name); err != nil {
			return saga.Outcome{}, schemaFailed("the workspace's schema was not dropped", err)
		}
	}
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		for _, c := range held {
			if err := env.ReleaseTx(ctx, tx, c); err != nil {
				return fmt.Errorf("release schema: %w", err)
			}
		}
		return nil
	}), nil
}

func (s *Steps) dropTenant(ctx context.Context, env *saga.Env, name string) error {
	if err := env.Proceed(ctx); err != nil {
		return fmt.Errorf("drop schema %s: %w", name, err)
	}
	if err := s.deps.EpochRefusals.Note(atSchema,
		schema.DropFenced(ctx, s.deps.Workloads, name, schema.WriterOf(env))); err != nil {
		return fmt.Errorf("drop schema %s: %w", name, err)
	}
	return nil
}

var schemaStands = pg.Define(pg.RoleWorkloadAdmin, "provision.schema_stands",
	`SELECT EXISTS (SELECT 1 FROM pg_roles r JOIN pg_namespace n ON n.nspname = r.rolname WHERE r.rolname = $1)`)

func (s *Steps) observeSchema(ctx context.Context, env *saga.Env) (saga.Observation, error) {
	in, _, err := spec.Read(env.Input)
	if err != nil {
		return saga.Observation{}, err
	}
	name := schema.Name(in.Tenant, in.Workspace, env.WorkspaceID)
	var there bool
	err = pg.QueryRow(ctx, s.deps.Workloads, schemaStands, name).Scan(&there)
	if err != nil {
		return saga.Observation{}, fmt.Errorf("look for schema: %w", err)
	}
	if !there {
		return saga.Observation{Presence: saga.Absent}, nil
	}
	// Applying the schema again brings an old one up to date and leaves a current one unchanged.
	return saga.Observation{Presence: saga.Partial, Why: "the schema is there; its version is checked"}, nil
}

// DatabaseEnv returns the environment variables by which workloads find their own schema.
func (s *Steps) DatabaseEnv(out SchemaOutput, epoch int64) map[string]string {
	cfg := s.deps.Workloads.Config().ConnConfig
	u := url.URL{
		Scheme: "postgresql", Host: net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port))), Path: cfg.Database,
		User: url.UserPassword(out.Role, s.databasePassword(out.Role, epoch)),
	}
	return map[string]string{"DATABASE_URL": u.String(), "PGSCHEMA": out.Schema}
}

// output reads an earlier step's output, which must be there.
func output[T any](env *saga.Env, step string) (T, error) {
	var out T
	ok, err := env.Output(step, &out)
	if err != nil {
		return out, fmt.Errorf("read output of %q: %w", step, err)
	}
	if !ok {
		return out, fmt.Errorf("read output of %q: there is none", step)
	}
	return out, nil
}
