package watchdog

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/fleet"
)

// A recreation takes one token of its workspace's bucket and one of its placement's. A workspace's bucket has
// churn.recreates_per_hour tokens and refills at that rate. A placement's bucket is large enough for as many of its
// instances as may fail together without engaging the brake, a fifth by default and at least one, to use up the tokens
// of their workspaces.

const (
	scopeWorkspace = "workspace"
	scopePlacement = "placement"
)

// wait is a budget that is used up, and the time until which it is.
type wait struct {
	scope, key string
	rate       float64 // an hour
	until      time.Time
}

func (w *wait) by() string { return w.scope + ":" + w.key }

func (w *wait) because() string {
	what := "the workspace has"
	if w.scope == scopePlacement {
		what = "the instances of placement " + w.key + " have"
	}
	return fmt.Sprintf("%s used up the budget of recreations, %g an hour; the next one is possible at %s", what, w.rate,
		w.until.UTC().Format(time.RFC3339))
}

// level returns the tokens of a bucket after the elapsed time.
func level(tokens, rate float64, elapsed time.Duration) float64 {
	return math.Min(rate, tokens+rate*math.Max(elapsed.Hours(), 0))
}

// churnBucket is the number of tokens of a bucket at a time.
type churnBucket struct {
	Tokens float64   `db:"tokens"`
	At     time.Time `db:"at"`
}

var (
	lockBucket = pg.Define(pg.RoleRecovery, "watchdog.lock_bucket", `
		INSERT INTO recovery.churn_bucket AS b (scope, key, tokens, at) VALUES ($1, $2, $3, $4)
		ON CONFLICT (scope, key) DO UPDATE SET key = EXCLUDED.key RETURNING `+pg.Columns[churnBucket]("b"))

	setBucket = pg.Define(pg.RoleRecovery, "watchdog.set_bucket",
		`UPDATE recovery.churn_bucket SET tokens = $3, at = $4 WHERE scope = $1 AND key = $2`)

	returnTokens = pg.Define(pg.RoleRecovery, "watchdog.return_tokens", `
		UPDATE recovery.churn_bucket SET tokens = tokens + 1 WHERE (scope = $1 AND key = $2) OR (scope = $3 AND key = $4)`)
)

// take takes a token from both buckets and returns nil; or it takes none and returns the budget to wait for.
func (j *evaluation) take(ctx context.Context, r *record) (*wait, error) {
	if err := j.fleet.Writes(); err != nil {
		return nil, err
	}
	instances, err := j.fleet.Instances(ctx, r.Placement)
	if err != nil {
		return nil, err
	}
	perWorkspace := float64(j.rate)
	perPlacement := perWorkspace * math.Max(1, math.Ceil(j.fleet.Fraction()*float64(instances)))
	var longest *wait
	type bucket struct {
		scope, key   string
		rate, tokens float64
	}
	buckets := []bucket{
		{scope: scopePlacement, key: r.Placement, rate: perPlacement},
		{scope: scopeWorkspace, key: r.WorkspaceID, rate: perWorkspace},
	}
	for i := range buckets {
		b := &buckets[i]
		was, err := pg.One[churnBucket](ctx, j.tx, lockBucket, b.scope, b.key, b.rate, j.now)
		if err != nil {
			return nil, fmt.Errorf("look into budget: %w", err)
		}
		if b.tokens = level(was.Tokens, b.rate, j.now.Sub(was.At)); b.tokens >= 1 {
			continue
		}
		missing := time.Duration((1 - b.tokens) / b.rate * float64(time.Hour))
		until := j.now.Add(missing).Add(time.Millisecond).Round(time.Millisecond)
		if longest == nil || until.After(longest.until) {
			longest = &wait{scope: b.scope, key: b.key, rate: b.rate, until: until}
		}
	}
	if longest != nil {
		return longest, nil
	}
	for _, b := range buckets {
		_, err := pg.Exec(ctx, j.tx, setBucket, b.scope, b.key, b.tokens-1, j.now)
		if err != nil {
			return nil, fmt.Errorf("take from budget: %w", err)
		}
	}
	return nil, nil
}

// giveBack returns the tokens of a recreation that did not happen. A surplus is cut off when the bucket is next read.
func (w *Watchdog) giveBack(ctx context.Context, tx pgx.Tx, r *record) error {
	_, err := pg.Exec(ctx, tx, returnTokens, scopePlacement, r.Placement, scopeWorkspace, r.WorkspaceID)
	if err != nil {
		return fmt.Errorf("give back to budget: %w", err)
	}
	return nil
}

// budgets keeps one incident open for each budget that is used up, for as long as a recovery waits for it.
func (j *evaluation) budgets(ctx context.Context) error {
	waiting := map[string][]*record{}
	for _, r := range j.records {
		if r.EndedAt == nil && (strings.HasPrefix(r.WithheldBy, scopeWorkspace+":") ||
			strings.HasPrefix(r.WithheldBy, scopePlacement+":")) {
			waiting[r.WithheldBy] = append(waiting[r.WithheldBy], r)
		}
	}
	for by, list := range waiting {
		i := &fleet.Incident{
			Kind: kindChurn, Key: by, OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_DEPLOY,
			NextAction: "find out why recreating did not last: `gpuaas workspaces recoveries WS` and the timeline; then " +
				"recreate by hand or decommission",
		}
		for _, r := range list {
			i.About(r.TenantID, r.WorkspaceID, r.NodeID)
			i.Step, i.ErrorCode = r.Step, r.ErrorCode
		}
		i.Summary = "workspace " + list[0].Workspace + " has used up its recreations of this hour and needs another"
		if placement, ok := strings.CutPrefix(by, scopePlacement+":"); ok {
			i.Summary = fmt.Sprintf("placement %s has used up its recreations of this hour, and %d workspaces wait", placement,
				len(list))
		}
		if err := j.fleet.Raise(ctx, i); err != nil {
			return err
		}
	}
	return j.fleet.CloseOthers(ctx, kindChurn, func(i *fleet.Incident) bool { return len(waiting[i.Key]) > 0 })
}
