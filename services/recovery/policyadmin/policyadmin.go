// Package policyadmin owns changes of the policy keys. Package policy decides which values are valid; this package
// never acts on a key itself. A change and its event are one transaction, and changes are validated one after another,
// since keys bound each other.
package policyadmin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// lock serialises changes.
const lock = 0x67707561_0021

var (
	takeLock = pg.Define(pg.RoleRecovery, "policyadmin.take_lock", `SELECT pg_advisory_xact_lock($1)`)

	drawVersion = pg.Define(pg.RoleRecovery, "policyadmin.draw_version", `
		INSERT INTO recovery.policy_version AS v (key, version) VALUES ($1, 1)
		ON CONFLICT (key) DO UPDATE SET version = v.version + 1 RETURNING version`)
)

// Deps are the dependencies of a Server.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Wake   *events.Signal // notified after commits that appended events
	Audit  *audit.Log     // records refusals; nil: none are recorded
}

// Server implements PolicyService.
type Server struct{ deps Deps }

// New checks the dependencies.
func New(deps Deps) (*Server, error) {
	if deps.Logger == nil || deps.Pool == nil {
		return nil, errors.New("policy server needs a logger and a pool")
	}
	return &Server{deps: deps}, nil
}

// GetPolicy lists one key or all of them.
func (s *Server) GetPolicy(ctx context.Context, req *recoveryv1.GetPolicyRequest) (*recoveryv1.GetPolicyResponse,
	error,
) {
	rows, err := stored(ctx, s.deps.Pool)
	if err != nil {
		return nil, err
	}
	out := &recoveryv1.GetPolicyResponse{}
	for _, key := range policy.Keys() {
		if req.GetKey() == "" || req.GetKey() == key.Name {
			out.Keys = append(out.Keys, describe(key, rows))
		}
	}
	if len(out.GetKeys()) == 0 {
		return nil, fault.New(commonv1.Reason_REASON_POLICY_KEY_UNKNOWN, "")
	}
	return out, nil
}

// SetPolicy changes one key for the person of the call.
func (s *Server) SetPolicy(ctx context.Context, req *recoveryv1.SetPolicyRequest) (*recoveryv1.SetPolicyResponse,
	error,
) {
	out := &recoveryv1.SetPolicyResponse{}
	by := rpc.ActorFrom(ctx)
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := s.set(ctx, tx, req, by, out); err != nil {
			return err
		}
		return failpoint.Hit("recovery.set_policy.before_commit")
	})
	if err != nil {
		refused := audit.Entry{
			Action: "policy.set", SubjectType: "policy", SubjectID: req.GetKey(),
			Details: map[string]any{"value": req.GetValue()},
		}
		return nil, fmt.Errorf("set policy: %w", s.deps.Audit.Refuse(ctx, refused, err))
	}
	s.deps.Wake.Notify()
	s.deps.Logger.InfoContext(ctx, "policy changed", slog.String("key", req.GetKey()),
		slog.String("value", out.GetKey().GetValue()), slog.String("by", by))
	return out, nil
}

func (s *Server) set(ctx context.Context, tx pgx.Tx, req *recoveryv1.SetPolicyRequest, by string,
	out *recoveryv1.SetPolicyResponse,
) error {
	if err := rollback.Refuse(ctx, tx); err != nil {
		return err
	}
	rows, present, err := lockAll(ctx, tx)
	if err != nil {
		return err
	}
	ack := policy.Ack{Weakening: req.GetAcknowledgeWeakening(), Reason: req.GetReason()}
	if err := present.Validate(req.GetKey(), req.GetValue(), ack); err != nil {
		return err
	}
	c := change{
		key: req.GetKey(), value: strings.TrimSpace(req.GetValue()), by: by, reason: strings.TrimSpace(req.GetReason()),
		weakens: present.Weakens(req.GetKey(), req.GetValue()),
	}
	if c.reason == "" {
		c.former = formerReason(rows[c.key], c.value)
	}
	out.Key, out.Pos, err = put(ctx, tx, rows, c)
	return err
}

// noneGiven begins the reason of a value for which none was given, before that of the value before.
const noneGiven = "none was given; for the value before: "

// formerReason returns the reason that stays for a value without one: that of the same value, or that of the value
// before, which it names as such.
func formerReason(row policystore.Row, value string) string {
	if row.Reason == "" || row.Value == value {
		return row.Reason
	}
	return noneGiven + strings.TrimPrefix(row.Reason, noneGiven)
}

// Apply sets several keys at once, for a caller that composes a mesh. by is the subject of the request, and the reason
// counts as the acknowledgement of all protections that the values weaken. Either all keys are set, each with its
// event, or none. The values are validated together, since keys bound each other. A value that is stored already is not
// a change and has no event. In rollback mode a change is refused, as SetPolicy refuses it; values that are all stored
// already are not. The values are not validated in the mode: they may fit the values of the lost history alone.
func Apply(ctx context.Context, pool *pgxpool.Pool, values map[string]string, by, reason string) error {
	if strings.TrimSpace(reason) == "" {
		return fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	}
	err := pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		rows, present, err := lockAll(ctx, tx)
		if err != nil {
			return err
		}
		var changes []change
		for _, key := range slices.Sorted(maps.Keys(values)) {
			c := change{
				key: key, value: strings.TrimSpace(values[key]), by: by, reason: reason,
				weakens: present.Weakens(key, values[key]),
			}
			if row, ok := rows[key]; !ok || row.Value != c.value {
				changes = append(changes, c)
			}
		}
		active, err := rollback.Active(ctx, tx)
		switch {
		case err != nil:
			return err
		case active && len(changes) > 0:
			return rollback.Refusal()
		case active:
			return nil
		}
		wanted := maps.Clone(present.Given())
		if wanted == nil {
			wanted = map[string]string{}
		}
		maps.Copy(wanted, values)
		if _, err := policy.NewSet(wanted); err != nil {
			return err
		}
		for _, c := range changes {
			if _, _, err := put(ctx, tx, rows, c); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("apply policy: %w", err)
	}
	return nil
}

// lockAll makes this transaction the only one that changes keys, and returns the stored rows and the policy that
// follows from them.
func lockAll(ctx context.Context, tx pgx.Tx) (map[string]policystore.Row, policy.Set, error) {
	if _, err := pg.Exec(ctx, tx, takeLock, int64(lock)); err != nil {
		return nil, policy.Set{}, fmt.Errorf("take policy lock: %w", err)
	}
	rows, err := stored(ctx, tx)
	if err != nil {
		return nil, policy.Set{}, err
	}
	values := make(map[string]string, len(rows))
	for key, row := range rows {
		values[key] = row.Value
	}
	// A stored value that is invalid counts as absent, here as for every reader.
	present, _ := policy.NewSet(values)
	return rows, present, nil
}

// change is one value that was validated.
type change struct {
	key, value, by, reason string
	former                 string // what is stored in place of an empty reason
	weakens                bool   // it is weaker than the default and than the value before
}

// put stores a change and appends its event. It returns the key as it is now and the event's position.
func put(ctx context.Context, tx pgx.Tx, rows map[string]policystore.Row, c change) (*recoveryv1.PolicyKey, string,
	error,
) {
	if err := policystore.Put(ctx, tx, c.key, c.value, c.by, cmp.Or(c.reason, c.former)); err != nil {
		return nil, "", err
	}
	key, _ := policy.Lookup(c.key)
	before := describe(key, rows).GetValue()
	now, err := stored(ctx, tx)
	if err != nil {
		return nil, "", err
	}
	maps.Copy(rows, now)
	version, err := pg.Value[int64](ctx, tx, drawVersion, c.key)
	if err != nil {
		return nil, "", fmt.Errorf("draw policy version: %w", err)
	}
	shown := describe(key, rows)
	pos, err := events.Append(ctx, tx, events.Event{
		Kind: "policy.changed", AggregateType: "policy", AggregateID: key.Name, AggregateVersion: version, Payload: shown,
		Correlation: events.Correlation{CorrelationID: obs.From(ctx).CorrelationID},
	})
	if err != nil {
		return nil, "", fmt.Errorf("append policy event: %w", err)
	}
	_, err = audit.Record(ctx, tx, audit.Entry{
		Action: "policy.set", Actor: c.by, Reason: c.reason, SubjectType: "policy", SubjectID: key.Name,
		Details: map[string]any{"value": c.value, "before": before, "weakens": c.weakens},
	})
	return shown, pos, err
}

func stored(ctx context.Context, q pg.Querier) (map[string]policystore.Row, error) {
	rows, err := policystore.List(ctx, q)
	if err != nil {
		return nil, fmt.Errorf("read policy: %w", err)
	}
	out := make(map[string]policystore.Row, len(rows))
	for _, row := range rows {
		out[row.Key] = row
	}
	return out, nil
}

func describe(key policy.Key, rows map[string]policystore.Row) *recoveryv1.PolicyKey {
	out := &recoveryv1.PolicyKey{
		Key: key.Name, Value: key.Default, DefaultValue: key.Default, Minimum: key.Min, Maximum: key.Max,
		Meaning: key.Meaning,
	}
	if row, ok := rows[key.Name]; ok {
		out.Value, out.Overridden, out.UpdatedBy, out.Reason = row.Value, true, row.UpdatedBy, row.Reason
		out.UpdatedAt = timestamppb.New(row.UpdatedAt)
	}
	return out
}
