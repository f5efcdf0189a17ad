package trust

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/services/recovery/incident"
	"github.com/gpuaas/mesh/services/recovery/trust/canary"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
)

// GetTrust returns the state, the authority, what each replica of nodeapi publishes, the last rotation and what
// replicas are sent.
func (p *Preflight) GetTrust(
	ctx context.Context, _ *recoveryv1.GetTrustRequest,
) (*recoveryv1.GetTrustResponse, error) {
	c, row, last, err := p.begin(ctx)
	if err != nil {
		return nil, err
	}
	out := &recoveryv1.GetTrustResponse{
		Preflight: row.message(), Authority: c.authority.message(c.err), Ingress: c.ingress(),
		LastCheckAt: incident.Stamp(last),
	}
	if c.authority == nil {
		if f, ok := fault.As(p.checkIssuer(ctx, p.deps.Pool)); ok {
			out.Authority.Problem = f.Public + ": " + f.Remedy
		}
	}
	err = pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if out.Rotation, err = rotation(ctx, tx); err != nil {
			return err
		}
		out.Issuers, err = roots.List(ctx, tx)
		return err
	})
	if err != nil {
		return nil, pg.Fault(err)
	}
	return out, nil
}

// RunPreflight makes one check, with a canary certificate of its own. It changes no state.
func (p *Preflight) RunPreflight(
	ctx context.Context, _ *recoveryv1.RunPreflightRequest,
) (*recoveryv1.RunPreflightResponse, error) {
	c, row, _, err := p.begin(ctx)
	if err != nil {
		return nil, err
	}
	out := &recoveryv1.RunPreflightResponse{Preflight: row.message()}
	c.targets = targetsOf(p.agentAddress(), trusting(c.targets), c.authority)
	if c.authority != nil {
		var with canary.Certificate
		if with, c.err = p.sign(ctx, c.at); c.err == nil {
			p.shake(ctx, c, with)
		}
	}
	out.Result, out.Authority, out.Ingress = c.result(), c.authority.message(c.err), c.ingress()
	return out, nil
}

// trusting returns the replicas of targets.
func trusting(list []*target) []replicas.Trusting {
	var out []replicas.Trusting
	for _, t := range list {
		if t.replica.ReplicaID != "" {
			out = append(out, t.replica)
		}
	}
	return out
}

// begin reads what both sides publish, and the state. The targets of the check are the replicas alone.
func (p *Preflight) begin(ctx context.Context) (*check, preflightRow, *time.Time, error) {
	var row preflightRow
	var list []replicas.Trusting
	var last *time.Time
	c := &check{}
	err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if row, err = readPreflight(ctx, tx); err != nil {
			return err
		}
		if last, err = pg.Value[*time.Time](ctx, tx, readLastCheck); err != nil {
			return fmt.Errorf("read when the preflight checked last: %w", err)
		}
		if c.at, err = pg.Value[time.Time](ctx, tx, readClock); err != nil {
			return fmt.Errorf("read clock: %w", err)
		}
		list, err = replicas.ReadTrust(ctx, tx)
		return err
	})
	if err != nil {
		return nil, row, nil, pg.Fault(err)
	}
	bounded, cancel := context.WithTimeout(ctx, p.cfg.Ask)
	defer cancel()
	c.authority, c.err = ask(bounded, p.deps.Signer)
	c.targets = targetsOf("", list, c.authority)
	return c, row, last, nil
}
